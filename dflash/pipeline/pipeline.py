"""The pipeline: one thread reads, one runs each target, the trainer runs where `run` is called."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from cache.batches.gather import Buffers
from dflash.batch import FeatureBatch, Position
from dflash.distributed import ALONE, HANG_S, Ranks
from dflash.errors import DflashError, StageFailed
from dflash.pipeline.channel import Channel, Closed, Reorder, Stop
from dflash.pipeline.device import Lane, new_buffers
from dflash.pipeline.feature_store import FeatureStore
from dflash.pipeline.stages import HasFeatures, Leased, Trains, read, run_target, train
from dflash.pipeline.telemetry import Clock, merge
from dflash.pipeline.train_plan import TrainPlan
from dflash.pipeline.watchdog import Watchdog
from dflash.step_sums import PendingReport

log = logging.getLogger(__name__)

# Passes of features that are alive: under way, waiting for the trainer, or in its hands. More that wait ride out longer
# outliers: at 2, three targets of one speed are 90 % busy, at 16 they are 99 % (benchmarks/pipeline.py).
_MOST = 24
_JOIN_S = 60.0  # a stage that has not ended by then hangs in a call


def capacity(item_bytes: int, room_bytes: int, targets: int = 1) -> int:
    """Passes of features to hold in `room_bytes`: at least one for each target, one that waits and one in use."""
    return max(targets + 2, min(_MOST, room_bytes // max(1, item_bytes)))


class Pipeline:
    """The stages of one run. Every thread ends before `run` returns or raises.

    `ahead` is the number of passes whose features are alive: in a target, waiting, or in the trainer. `last_resort` is
    called when a stage hangs in a call that never returns, so that no thread of this process can be relied on; it
    should end the process.
    """

    def __init__(
        self,
        plan: TrainPlan,
        trainer: Trains,
        targets: Sequence[HasFeatures],
        features: FeatureStore | None = None,
        *,
        ranks: Ranks = ALONE,
        threads: int = 1,
        ahead: int = _MOST,
        hang_s: float = HANG_S,
        last_resort: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._plan, self._trainer, self._targets, self._features = plan, trainer, targets, features
        self._ranks, self._threads = ranks, threads
        self._stop = Stop()
        self._first_epoch_over, self._over = False, self._stop.new_condition()
        self._clocks = {"read": [Clock()], "target": [Clock() for _ in targets], "train": [Clock()]}
        self._watchdog = Watchdog(self._clocks, self._stop, hang_s, last_resort)
        self._leases = 2 * len(targets) + 2
        self._free: Channel[Buffers] = Channel(self._leases, self._stop)
        self._to_target: Channel[Leased] = Channel(len(targets) + 1, self._stop)
        self._to_train: Reorder[FeatureBatch] = Reorder(ahead, self._stop)

    def takes_turns(self, target: HasFeatures) -> bool:
        """Whether a target runs on the drafter's own device, and so in its thread, when it has nothing to do."""
        return tuple(target.devices) == (self._trainer.device,)

    @property
    def shares_device(self) -> bool:
        """Whether target and drafter have one device together."""
        return all(self.takes_turns(target) for target in self._targets)

    def stages(self) -> dict[str, dict[str, float]]:
        """Shares of time by stage so far."""
        return {name: merge(clocks).shares() for name, clocks in self._clocks.items()}

    def busy_s(self, stage: str) -> float:
        """Seconds that a stage has been at work so far."""
        return merge(self._clocks[stage]).busy

    def queues(self) -> dict[str, int]:
        """Micro-batches that wait for a stage now."""
        return {"target": len(self._to_target), "train": len(self._to_train)}

    def run(self, epoch: int, step: int, end: int, on_step: Callable[[PendingReport], bool]) -> None:
        """Train from a position to the end of epoch `end - 1`, or until `on_step` says to stop.

        Raises what a stage raised: errors of this project as they are, others as StageFailed with their cause.
        """
        stop, clocks, device = self._stop, self._clocks, self._targets[0].devices[0]
        for _ in range(self._leases):
            self._free.put(new_buffers(self._plan.buffer_tokens, device))

        def reader() -> None:
            work = self._plan.passes(epoch, step, end)
            if self._features is not None and epoch == 0:
                work = self._after_first_epoch(work)
            count = read(self._plan, work, device, self._free, self._to_target, clocks["read"][0])
            self._to_train.end(count)
            self._to_target.close()

        def worker(target: HasFeatures, clock: Clock) -> None:
            lane = Lane(target.devices, self._trainer.device)
            run_target(
                target,
                self._features,
                lane,
                self._to_target,
                self._free,
                self._to_train,
                clock,
                takes_turns=self.takes_turns(target),
            )

        def stepped(report: PendingReport) -> bool:
            go_on = on_step(report)
            if go_on and (report.at.epoch, report.at.step + 1) == (0, report.at.steps_in_epoch):
                self._end_first_epoch()
            return go_on

        threads = [self._thread("read", reader)]
        for target, clock in zip(self._targets, clocks["target"], strict=True):
            threads.append(self._thread("target", worker, target, clock))
        self._watchdog.start()
        try:
            steps = self._plan.work(epoch, step, end)
            turns = any(self.takes_turns(target) for target in self._targets)
            train(self._trainer, steps, self._to_train, clocks["train"][0], stepped, takes_turns=turns)
        except Closed:
            pass
        except BaseException as error:
            stop.fail("train", error)
        finally:
            stop.stop()
            for thread in threads:
                thread.join(_JOIN_S)
            self._watchdog.end()
        if stop.failure is not None:
            stage, cause = stop.failure
            if isinstance(cause, DflashError) or not isinstance(cause, Exception):
                raise cause
            at = f"epoch {epoch}, step {step} on, {clocks['train'][0].items} steps done"
            raise StageFailed(f"stage {stage} failed in the run from {at}: {cause!r}") from cause

    def _after_first_epoch(self, work: Iterator[tuple[Position, np.ndarray]]) -> Iterator[tuple[Position, np.ndarray]]:
        """Where features are reused, let the second epoch begin when all features of the first one are kept.

        Otherwise timing would decide whether a row is read from the store or computed in another grouping.
        """
        for position, row_ids in work:
            if position.epoch == 1:
                with self._stop.lock:
                    self._stop.wait(self._over, lambda: self._first_epoch_over)
            yield position, row_ids

    def _end_first_epoch(self) -> None:
        """All passes of the first epoch are trained here; wait for the other processes, then go on."""
        if self._features is not None:
            self._ranks.wait()
        with self._stop.lock:
            self._first_epoch_over = True
            self._over.notify_all()

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
