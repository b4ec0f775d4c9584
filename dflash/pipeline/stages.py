"""The three stages: read rows and draw anchors, run the target, train the drafter. Each is a loop over its input."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cache.batches.gather import Buffers, prefetch
from dflash.batch import FeatureBatch, Position, Step, TrainBatch
from dflash.pipeline.channel import Channel, Reorder
from dflash.pipeline.device import Lane, Stopwatch, pinned, receive
from dflash.pipeline.feature_store import FeatureStore
from dflash.pipeline.telemetry import Clock
from dflash.pipeline.train_plan import TrainPlan
from dflash.step_sums import PendingReport


class HasFeatures(Protocol):
    """What the target stage needs of a target: its first device takes the ids, its last gives the features."""

    @property
    def devices(self) -> tuple[torch.device, ...]: ...

    def features(self, ids: Tensor) -> Tensor: ...


class Trains(Protocol):
    """What the train stage needs of a trainer."""

    @property
    def device(self) -> torch.device: ...

    def accumulate(self, item: FeatureBatch) -> None: ...

    def step(self, at: Step) -> PendingReport: ...


@dataclass(frozen=True, slots=True)
class Leased:
    """A micro-batch and the buffers that its ids lie in."""

    order: int
    batch: TrainBatch
    buffers: Buffers


def read(
    plan: TrainPlan,
    work: Iterable[tuple[Position, np.ndarray]],
    device: torch.device,
    free: Channel[Buffers],
    output: Channel[Leased],
    clock: Clock,
) -> int:
    """Fill leased buffers with one micro-batch after another, for targets on `device`; how many there were."""
    order = -1
    for order, (position, row_ids) in enumerate(work):
        prefetch(plan.store, row_ids)
        buffers, waited = free.take()
        clock.begin()
        start = time.perf_counter()
        batch = pinned(plan.make_batch(position, row_ids, buffers), device)
        busy = time.perf_counter() - start
        clock.rest()
        clock.add(busy=busy, starved=0.0, blocked=waited + output.put(Leased(order, batch, buffers)))
    return order + 1


def run_target(
    target: HasFeatures,
    features: FeatureStore | None,
    lane: Lane,
    source: Channel[Leased],
    free: Channel[Buffers],
    output: Reorder[FeatureBatch],
    clock: Clock,
    *,
    shares_cores: bool,
) -> None:
    """Take micro-batches as they come, put their features under their index; returns by raising Closed.

    A target on the trainer's own cores computes in the trainer's thread. OpenMP keeps a pool for each thread that
    computes; two pools have more threads than there are cores, and then it puts those that wait to sleep at once. To
    wake them again and again costs a sixth of the time.
    """
    watch = Stopwatch(target.devices[-1])
    while True:
        leased, starved = source.take()

        def carry(batch: TrainBatch = leased.batch, buffers: Buffers = leased.buffers) -> FeatureBatch:
            clock.begin()
            compute = partial(batch_features, target, features, batch)
            return lane.carry(batch, compute, watch, partial(free.put, buffers))

        # Features that are kept come from the disk: no core is needed for them.
        is_kept = features is not None and features.has(leased.batch.row_ids)
        item, waited = output.ask(carry) if shares_cores and not is_kept else (carry(), 0.0)
        clock.rest()
        blocked = waited + output.put(leased.order, item)
        clock.add(busy=watch.taken(), starved=starved, blocked=blocked)


def batch_features(target: HasFeatures, features: FeatureStore | None, batch: TrainBatch, ids: Tensor) -> Tensor:
    """The features of a pass: from the store when it has them all, else from the target, given `ids`."""
    if features is not None and features.has(batch.row_ids):
        return features.get(batch.row_ids, ids.shape[1])
    values = target.features(ids)
    if features is None:
        return values
    is_mixed = features.has_any(batch.row_ids)  # where passes have been cut anew in the middle of the first epoch
    features.put(batch.row_ids, values)
    return features.get(batch.row_ids, ids.shape[1]) if is_mixed else values


def train(
    trainer: Trains,
    steps: Iterator[Step],
    source: Reorder[FeatureBatch],
    clock: Clock,
    on_step: Callable[[PendingReport], bool],
) -> None:
    """Consume micro-batches in order; `on_step` sees each report and says whether to go on.

    A step of which this process has no rows is made all the same: the other processes wait for it.
    """
    watch = Stopwatch(trainer.device)
    for at in steps:
        starved = blocked = 0.0
        for _ in range(at.num_passes):
            item, waited, spent = source.take()
            starved, blocked = starved + waited, blocked + spent
            clock.begin()
            receive(item, trainer.device)
            with watch.measured():
                trainer.accumulate(item)
            clock.rest()
        clock.begin()
        with watch.measured():
            report = trainer.step(at)
        clock.rest()
        clock.add(busy=watch.taken(), starved=starved, blocked=blocked)
        if not on_step(report):
            return
