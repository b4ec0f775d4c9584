"""The three stages: read rows and draw anchors, run the target, train the drafter. Each is a loop over its input."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from cache.gather import Buffers, gather, prefetch
from cache.plan import EpochPlan
from cache.store import TokenCache
from dflash.anchors import block_counts, block_labels, draw_anchors, slot_weights
from dflash.batch import FeatureBatch, Position, StepReport, TrainBatch
from dflash.features import FeatureStore
from dflash.pipeline.channel import Channel, Reorder
from dflash.pipeline.telemetry import Clock
from dflash.target import Target
from dflash.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Blocks:
    """How blocks are drawn: all that a TrainBatch depends on besides rows and position."""

    anchors: int
    block_size: int
    gamma: float
    seed: int


@dataclass(frozen=True, slots=True)
class Leased:
    """A micro-batch and the buffers that its ids lie in."""

    order: int
    batch: TrainBatch
    buffers: Buffers


def positions(plan: EpochPlan, batches_per_step: int, first_step: int) -> Iterator[tuple[Position, np.ndarray]]:
    """Micro-batches of an epoch from a step on, with their rows. The last step may have fewer than the others."""
    steps = -(-plan.num_batches // batches_per_step)
    for index in range(first_step * batches_per_step, plan.num_batches):
        step = index // batches_per_step
        last = index + 1 == plan.num_batches or (index + 1) % batches_per_step == 0
        yield Position(plan.epoch, step, index, steps, last), plan.batch(index)


def make_batch(store: TokenCache, row_ids: np.ndarray, position: Position, blocks: Blocks, out: Buffers) -> TrainBatch:
    """Gather rows into leased buffers and draw their blocks."""
    rows = gather(store, row_ids, out)
    drawn = [
        draw_anchors(
            rows.mask[b, :length], anchors=blocks.anchors, seed=blocks.seed, epoch=position.epoch, row=int(row)
        )
        for b, (row, length) in enumerate(zip(row_ids, rows.lengths, strict=True))
    ]
    count, most, slots = len(drawn), max(anchor.size for anchor in drawn), blocks.block_size
    anchor = np.zeros((count, most), dtype=np.int32)
    valid = np.zeros((count, most), dtype=bool)
    labels = np.zeros((count, most, slots), dtype=np.int32)
    weights = np.zeros((count, most, slots), dtype=np.float32)
    by_slot = slot_weights(slots, blocks.gamma)
    for b, (positions_, length) in enumerate(zip(drawn, rows.lengths, strict=True)):
        n = positions_.size
        anchor[b, :n], valid[b, :n] = positions_, True
        anchor[b, n:] = positions_[-1] if n else 0  # ascending, so padding costs no context of its own
        labels[b, :n] = block_labels(rows.ids[b, :length], positions_, slots)
        weights[b, :n] = block_counts(rows.mask[b, :length], positions_, slots) * by_slot
    return TrainBatch(
        position=position,
        row_ids=row_ids,
        ids=torch.from_numpy(rows.ids),
        lengths=torch.from_numpy(rows.lengths),
        anchor=torch.from_numpy(anchor),
        valid=torch.from_numpy(valid),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(weights),
    )


def read(
    store: TokenCache,
    work: Iterable[tuple[Position, np.ndarray]],
    blocks: Blocks,
    free: Channel[Buffers],
    output: Channel[Leased],
    clock: Clock,
) -> int:
    """Fill leased buffers with one micro-batch after another; how many there were."""
    order = -1
    for order, (position, row_ids) in enumerate(work):
        prefetch(store, row_ids)
        buffers, blocked = free.take()
        start = time.perf_counter()
        batch = make_batch(store, row_ids, position, blocks, buffers)
        clock.busy += time.perf_counter() - start
        clock.blocked += blocked + output.put(Leased(order, batch, buffers))
    return order + 1


def run_target(
    target: Target | None,
    features: FeatureStore | None,
    device: torch.device,
    source: Channel[Leased],
    free: Channel[Buffers],
    output: Reorder[FeatureBatch],
    clock: Clock,
) -> None:
    """Take micro-batches as they come, put their features under their index; returns by raising Closed."""
    while True:
        leased, starved = source.take()
        start = time.perf_counter()
        item = _on_device(leased.batch, batch_features(target, features, leased.batch), device)
        free.put(leased.buffers)
        clock.starved += starved
        clock.busy += time.perf_counter() - start
        clock.blocked += output.put(leased.order, item)


def batch_features(target: Target | None, features: FeatureStore | None, batch: TrainBatch) -> torch.Tensor:
    """The features of a micro-batch: from the store when it has them all, else from the target."""
    if features is not None and features.has(batch.row_ids):
        return features.get(batch.row_ids, batch.ids.shape[1])
    assert target is not None
    values = target.features(batch.ids.to(target.device))
    if features is not None:
        features.put(batch.row_ids, values)
    return values


def _on_device(batch: TrainBatch, features: torch.Tensor, device: torch.device) -> FeatureBatch:
    if device.type == "cpu":
        # The ids lie in leased memory, which is given back now; the trainer reads labels, not ids.
        return FeatureBatch(replace(batch, ids=batch.ids[:0]), features)
    moved = {
        name: getattr(batch, name).to(device, non_blocking=True)
        for name in ("ids", "anchor", "valid", "labels", "weights")
    }
    values = features.to(device, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))
    ready.synchronize()  # the leased host memory is read until here
    return FeatureBatch(replace(batch, **moved), values, ready)


def train(trainer: Trainer, source: Reorder[FeatureBatch], clock: Clock, on_step: Callable[[StepReport], bool]) -> None:
    """Consume micro-batches in order; `on_step` sees each report and says whether to go on. Ends by Closed, too."""
    while True:
        item, starved = source.take()
        clock.starved += starved
        start = time.perf_counter()
        if item.ready is not None:
            item.ready.wait(torch.cuda.current_stream(trainer.device))
        trainer.accumulate(item)
        position = item.batch.position
        report = trainer.step(position.epoch, position.step, position.steps_in_epoch) if position.last_in_step else None
        clock.busy += time.perf_counter() - start
        if report is not None and not on_step(report):
            return
