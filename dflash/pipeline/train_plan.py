"""The whole plan of a run as steps: which rows each has, which of them a process computes, and in what passes.

Rows of a step follow from rows, parameters and a position, so a resume needs no loader state. Any number of processes
shares out the same steps, and passes of any size add up to the same sums.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int32
from numpy import ndarray

from cache.batches.epoch import EpochPlan, plan_epoch
from cache.batches.gather import Buffers, gather
from cache.batches.passes import PassRoom, cut_passes, deal
from cache.disk.store import TokenCache
from dflash.anchors import (
    LENGTH_BINS,
    block_counts,
    block_labels,
    count_legal,
    covered_tokens,
    default_gamma,
    draw_anchors,
    length_bin,
    num_drawn,
    slot_weights,
)
from dflash.batch import Position, Step, TrainBatch
from dflash.config import RunConfig

# Larger passes make no device faster: products of so many rows are long past the size that keeps it busy.
MOST = PassRoom(tokens=32_768, slots=65_536)


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a context token and a slot cost in proportion: processes share out a step by it."""

    token: float = 1.0
    slot: float = 1.0


class TrainPlan:
    """Steps and passes of every epoch. Stages on several threads may ask."""

    def __init__(
        self,
        store: TokenCache,
        config: RunConfig,
        rank: int = 0,
        ranks: int = 1,
        *,
        room: PassRoom | None = None,
        cost: RowCost = RowCost(),
    ) -> None:
        self.store = store
        self.room = room or PassRoom(MOST.tokens, config.training.pass_slots or MOST.slots)
        self.rank, self.ranks = rank, ranks
        self._training, self._slots = config.training, config.drafter.block_size
        self._gamma = config.training.gamma or default_gamma(self._slots)
        self._cost = cost
        self._rows = store.rows(0).astype(np.int32)
        self.row_tokens: Int32[ndarray, " R"] = store.lengths.astype(np.int32)
        legal = count_legal(store.mask, store.offsets)
        self.row_slots: Int32[ndarray, " R"] = num_drawn(legal, config.training.anchors) * np.int32(self._slots)
        self._lock = threading.Lock()
        self._epoch: EpochPlan | None = None
        self._steps: dict[int, int] = {}

    @property
    def buffer_tokens(self) -> int:
        """B·S of the largest pass: a row longer than the room is one of its own."""
        return max(self.room.tokens, int(self.row_tokens.max(initial=0)))

    def epoch(self, epoch: int) -> EpochPlan:
        """Steps of one epoch, in units that are dealt to processes."""
        with self._lock:
            if self._epoch is None or self._epoch.epoch != epoch:
                self._epoch = plan_epoch(
                    self.row_tokens,
                    self.row_slots,
                    self._rows,
                    tokens_per_step=self._training.tokens_per_step,
                    seed=self._training.seed,
                    epoch=epoch,
                )
                self._steps[epoch] = self._epoch.num_steps
            return self._epoch

    def steps(self, epoch: int) -> int:
        """Optimizer steps of one epoch."""
        if epoch not in self._steps:
            self.epoch(epoch)
        return self._steps[epoch]

    def work(self, epoch: int, step: int, end: int) -> Iterator[Step]:
        """Steps from a position up to the end of epoch `end - 1`; a step never crosses an epoch."""
        for at, passes in self._walk(epoch, step, end):
            yield Step(at.epoch, at.step, self.steps(at.epoch), len(passes))

    def passes(self, epoch: int, step: int, end: int) -> Iterator[tuple[Position, ndarray]]:
        """Passes of `work` with their rows."""
        for at, passes in self._walk(epoch, step, end):
            for index, rows in enumerate(passes):
                yield Position(at.epoch, at.step, index), rows

    def _walk(self, epoch: int, step: int, end: int) -> Iterator[tuple[Position, list[ndarray]]]:
        """Steps with the passes of this process."""
        for e in range(epoch, end):
            for s in range(step if e == epoch else 0, self.steps(e)):
                yield Position(e, s, 0), cut_passes(self._dealt(e, s), self.row_tokens, self.row_slots, self.room)

    def _dealt(self, epoch: int, step: int) -> ndarray:
        """Rows of a step that this process computes."""
        units = self.epoch(epoch).step(step)
        if self.ranks > 1:
            cost = [self.cost(rows) for rows in units]
            units = [units[unit] for unit in deal(cost, self.ranks)[self.rank]]
        return np.concatenate([self._rows[:0], *units]).astype(np.int64)

    def cost(self, rows: ndarray) -> float:
        """What these rows cost target and drafter, as `RowCost` says."""
        return self._cost.token * int(self.row_tokens[rows].sum()) + self._cost.slot * int(self.row_slots[rows].sum())

    def make_batch(self, position: Position, row_ids: np.ndarray, out: Buffers) -> TrainBatch:
        """Gather rows into leased buffers and draw their blocks."""
        rows = gather(self.store, row_ids, out)
        drawn = [
            draw_anchors(
                rows.mask[b, :length],
                anchors=self._training.anchors,
                seed=self._training.seed,
                epoch=position.epoch,
                row=int(row),
            )
            for b, (row, length) in enumerate(zip(row_ids, rows.lengths, strict=True))
        ]
        count, most, slots = len(drawn), max(1, *(anchor.size for anchor in drawn)), self._slots
        anchor = np.zeros((count, most), dtype=np.int32)
        labels = np.zeros((count, most, slots), dtype=np.int32)
        weights = np.zeros((count, most, slots), dtype=np.float32)
        coverage = np.zeros((2, LENGTH_BINS), dtype=np.int64)
        by_slot = slot_weights(slots, self._gamma)
        for b, (positions, length) in enumerate(zip(drawn, rows.lengths, strict=True)):
            n, mask = positions.size, rows.mask[b, :length]
            anchor[b, :n] = positions
            anchor[b, n:] = positions[-1] if n else 0  # ascending, so padding costs no context of its own
            labels[b, :n] = block_labels(rows.ids[b, :length], positions, slots)
            weights[b, :n] = block_counts(mask, positions, slots) * by_slot
            covered = np.count_nonzero(covered_tokens(mask, positions, slots))
            coverage[:, length_bin(int(length))] += covered, np.count_nonzero(mask)
        return TrainBatch(
            position=position,
            row_ids=row_ids,
            ids=torch.from_numpy(rows.ids),
            lengths=rows.lengths,
            anchor=torch.from_numpy(anchor),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            counted=torch.from_numpy(np.flatnonzero(weights)),
            slots=slots * sum(positions.size for positions in drawn),
            coverage=coverage,
        )
