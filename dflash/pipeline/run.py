"""The pipeline: one thread reads, one runs each target, the trainer runs where `run` is called."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cache.gather import Buffers
from cache.plan import EpochPlan, plan_epoch
from cache.store import TokenCache
from dflash.anchors import default_gamma
from dflash.batch import FeatureBatch, Position, StepReport
from dflash.config import RunConfig
from dflash.errors import DflashError, StageFailed
from dflash.features import FeatureStore
from dflash.pipeline.channel import Channel, Closed, Reorder, Stop
from dflash.pipeline.stages import Blocks, Leased, positions, read, run_target, train
from dflash.pipeline.telemetry import Clock, merge
from dflash.target import Target
from dflash.trainer import Trainer

# Micro-batches that wait between two stages: enough to hide one slow one, few enough to be small.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole plan: any epoch's micro-batches, from nothing but rows and parameters."""

    store: TokenCache
    config: RunConfig

    @property
    def blocks(self) -> Blocks:
        """How blocks are drawn."""
        training, size = self.config.training, self.config.drafter.block_size
        return Blocks(training.anchors, size, training.gamma or default_gamma(size), training.seed)

    @property
    def buffer_tokens(self) -> int:
        """B·S of the largest micro-batch: a row longer than tokens_per_batch is one of its own."""
        return max(self.config.training.tokens_per_batch, int(self.store.lengths.max(initial=0)))

    def epoch(self, epoch: int) -> EpochPlan:
        """Micro-batches of one epoch."""
        training = self.config.training
        return plan_epoch(
            self.store.lengths,
            self.store.rows(0),
            tokens_per_batch=training.tokens_per_batch,
            seed=training.seed,
            epoch=epoch,
        )

    def steps(self, epoch: int) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.epoch(epoch).num_batches // self.config.training.batches_per_step)

    def work(self, epoch: int, step: int, end: int) -> Iterator[tuple[Position, np.ndarray]]:
        """Micro-batches with their rows, from a position up to the end of epoch `end - 1`."""
        for e in range(epoch, end):
            yield from positions(self.epoch(e), self.config.training.batches_per_step, step if e == epoch else 0)


class Pipeline:
    """The stages of one run. Every thread ends before `run` returns or raises."""

    def __init__(
        self, plan: Plan, trainer: Trainer, targets: list[Target], features: FeatureStore | None, threads: int
    ) -> None:
        self._plan, self._trainer, self._targets, self._features = plan, trainer, targets, features
        self._threads = threads
        self._clocks = {"read": [Clock()], "target": [Clock() for _ in targets], "train": [Clock()]}
        self._stop = Stop()

    def stages(self) -> dict[str, dict[str, float]]:
        """Shares of time by stage so far."""
        return {name: merge(clocks).shares() for name, clocks in self._clocks.items()}

    def run(self, epoch: int, step: int, end: int, on_step: Callable[[StepReport], bool]) -> None:
        """Train from a position to the end of epoch `end - 1`, or until `on_step` says to stop.

        Raises what a stage raised: errors of this project as they are, others as StageFailed with their cause.
        """
        stop, targets, clocks = self._stop, self._targets, self._clocks
        free: Channel[Buffers] = Channel(2 * _AHEAD + 2 * len(targets), stop)
        for _ in range(2 * _AHEAD + 2 * len(targets)):
            free.put(Buffers(self._plan.buffer_tokens))
        to_target: Channel[Leased] = Channel(_AHEAD, stop)
        to_train: Reorder[FeatureBatch] = Reorder(_AHEAD + len(targets), stop)

        def reader() -> None:
            work = self._epoch_by_epoch(self._plan.work(epoch, step, end), to_train)
            to_train.end(read(self._plan.store, work, self._plan.blocks, free, to_target, clocks["read"][0]))
            to_target.close()

        def worker(target: Target, clock: Clock) -> None:
            run_target(target, self._features, self._trainer.device, to_target, free, to_train, clock)

        threads = [self._thread("read", reader)]
        for target, clock in zip(targets, clocks["target"], strict=True):
            threads.append(self._thread("target", worker, target, clock))
        try:
            train(self._trainer, to_train, clocks["train"][0], on_step)
        except Closed:
            pass
        except BaseException as error:
            stop.fail("train", error)
        finally:
            stop.stop()
            for thread in threads:
                thread.join()
        if stop.failure is not None:
            stage, cause = stop.failure
            if isinstance(cause, DflashError) or not isinstance(cause, Exception):
                raise cause
            raise StageFailed(f"stage {stage} failed in the run from epoch {epoch}, step {step}: {cause!r}") from cause

    def _epoch_by_epoch(
        self, work: Iterator[tuple[Position, np.ndarray]], to_train: Reorder[FeatureBatch]
    ) -> Iterator[tuple[Position, np.ndarray]]:
        """Where features are reused, let an epoch begin when all features of the one before are kept.

        Otherwise timing would decide whether a row is read from the store or computed in another grouping.
        """
        for order, (position, row_ids) in enumerate(work):
            if self._features is not None and position.index == 0:
                to_train.wait_until_put(order)
            yield position, row_ids

    def _thread(self, name: str, body: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                torch.set_num_threads(self._threads)
                body(*arguments)
            except Closed:
                pass
            except BaseException as error:
                self._stop.fail(name, error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
