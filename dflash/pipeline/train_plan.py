"""The whole plan of a run as steps: which micro-batches each makes, and which of them a process computes.

Everything follows from rows, parameters and a position, so a resume needs no loader state and any number of processes
cuts the same steps among them.
"""

import threading
from collections.abc import Iterator

import numpy as np
import torch

from cache.batches.epoch import EpochPlan, plan_epoch
from cache.batches.gather import Buffers, gather
from cache.disk.store import TokenCache
from dflash.anchors import (
    LENGTH_BINS,
    block_counts,
    block_labels,
    covered_tokens,
    default_gamma,
    draw_anchors,
    length_bin,
    slot_weights,
)
from dflash.batch import Position, Step, TrainBatch
from dflash.config import RunConfig


class TrainPlan:
    """Steps and micro-batches of every epoch. Stages on several threads may ask."""

    def __init__(self, store: TokenCache, config: RunConfig, rank: int = 0, ranks: int = 1) -> None:
        self.store = store
        self.rank, self.ranks = rank, ranks
        self._training, self._slots = config.training, config.drafter.block_size
        self._gamma = config.training.gamma or default_gamma(self._slots)
        self._rows, self._lengths = store.rows(0), store.lengths
        self._lock = threading.Lock()
        self._epoch: EpochPlan | None = None
        self._batches: dict[int, int] = {}

    @property
    def buffer_tokens(self) -> int:
        """B·S of the largest micro-batch: a row longer than tokens_per_batch is one of its own."""
        return max(self._training.tokens_per_batch, int(self._lengths.max(initial=0)))

    def epoch(self, epoch: int) -> EpochPlan:
        """Micro-batches of one epoch."""
        with self._lock:
            if self._epoch is None or self._epoch.epoch != epoch:
                self._epoch = plan_epoch(
                    self._lengths,
                    self._rows,
                    tokens_per_batch=self._training.tokens_per_batch,
                    seed=self._training.seed,
                    epoch=epoch,
                )
                self._batches[epoch] = self._epoch.num_batches
            return self._epoch

    def steps(self, epoch: int) -> int:
        """Optimizer steps of one epoch."""
        if epoch not in self._batches:
            self.epoch(epoch)
        return -(-self._batches[epoch] // self._training.batches_per_step)

    def work(self, epoch: int, step: int, end: int) -> Iterator[Step]:
        """Steps from a position up to the end of epoch `end - 1`, with the micro-batches dealt to this process.

        The last step of an epoch may have fewer than the others; a step never crosses an epoch.
        """
        size = self._training.batches_per_step
        for e in range(epoch, end):
            steps = self.steps(e)
            for s in range(step if e == epoch else 0, steps):
                last = min((s + 1) * size, self._batches[e])
                yield Step(e, s, steps, tuple(range(s * size + self.rank, last, self.ranks)))

    def micro_batches(self, epoch: int, step: int, end: int) -> Iterator[tuple[Position, np.ndarray]]:
        """Micro-batches of `work` with their rows."""
        for at in self.work(epoch, step, end):
            for index in at.indices:
                yield Position(at.epoch, at.step, index), self.epoch(at.epoch).batch(index)

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
        valid = np.zeros((count, most), dtype=bool)
        labels = np.zeros((count, most, slots), dtype=np.int32)
        weights = np.zeros((count, most, slots), dtype=np.float32)
        coverage = np.zeros((2, LENGTH_BINS), dtype=np.int64)
        by_slot = slot_weights(slots, self._gamma)
        for b, (positions, length) in enumerate(zip(drawn, rows.lengths, strict=True)):
            n, mask = positions.size, rows.mask[b, :length]
            anchor[b, :n], valid[b, :n] = positions, True
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
            valid=torch.from_numpy(valid),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            counted=torch.from_numpy(np.flatnonzero(weights)),
            padded=rows.ids.size,
            coverage=coverage,
        )
