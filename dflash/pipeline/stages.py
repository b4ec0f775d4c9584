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
    """A pass and the buffers that its ids lie in."""

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
    """Fill leased buffers with one pass after another, for targets on `device`; how many there were."""
    order, watch = -1, Stopwatch(torch.device("cpu"))
    for order, (position, row_ids) in enumerate(work):
        prefetch(plan.store, row_ids)
        buffers, blocked = free.take()
        watch.waited(blocked=blocked)
        clock.begin()
        with watch.measured():
            batch = pinned(plan.make_batch(position, row_ids, buffers), device)
        clock.rest()
        clock.add(watch.taken())
        watch.waited(blocked=output.put(Leased(order, batch, buffers)))
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
    takes_turns: bool,
) -> None:
    """Take passes as they come, put their features under their index; returns by raising Closed.

    Room for the features is reserved before they are computed. A target on the trainer's own device computes in the
    trainer's thread. On the CPU, OpenMP keeps a pool for each thread that computes; two pools have more threads than
    there are cores, and then it puts those that wait to sleep at once. To wake them again and again costs a sixth of
    the time. On a GPU, the kernels of two streams would take its time from each other, and nobody could say whose was
    whose.
    """
    watch = Stopwatch(target.devices[-1], takes_turns=takes_turns)
    while True:
        leased, starved = source.take()
        watch.waited(starved=starved)
        watch.waited(blocked=output.reserve(leased.order))
        asked = time.perf_counter()

        def carry(
            batch: TrainBatch = leased.batch, buffers: Buffers = leased.buffers, since: float = asked
        ) -> FeatureBatch:
            watch.waited(blocked=time.perf_counter() - since)
            clock.begin()
            compute = partial(batch_features, target, features, batch)
            return lane.carry(batch, compute, watch, partial(free.put, buffers))

        # Features that are kept come from the disk: no device is needed for them.
        is_kept = features is not None and features.has(leased.batch.row_ids)
        output.put(leased.order, output.ask(carry) if takes_turns and not is_kept else carry())
        clock.add(watch.taken())
        clock.rest()


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
    *,
    takes_turns: bool,
) -> None:
    """Consume passes in order; `on_step` sees each report and says whether to go on.

    A step of which this process has no rows is made all the same: the other processes wait for it.
    """
    watch, unreleased = Stopwatch(trainer.device, takes_turns=takes_turns), 0
    for at in steps:
        for _ in range(at.num_passes):
            item, starved, spent = source.take()
            watch.waited(blocked=spent, starved=starved)
            clock.begin()
            receive(item, trainer.device)
            with watch.measured():
                trainer.accumulate(item)
            del item  # its memory is free as soon as the device is done with it
            unreleased += 1
            time_spent = watch.taken()  # the host is never more than one pass ahead of the device
            while unreleased > watch.under_way:
                source.release()
                unreleased -= 1
            clock.add(time_spent, items=0)
            clock.rest()
        clock.begin()
        with watch.measured():
            report = trainer.step(at)
        clock.add(watch.taken(newest=2))
        clock.rest()
        if not on_step(report):
            return
