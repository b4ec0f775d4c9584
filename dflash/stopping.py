"""When a training process ends before its plan: a limit that it was given, or a signal."""

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from dflash.config import TrainingConfig

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """A signal asked the run to end: the step is finished and a checkpoint written. Not an error."""


@dataclass(frozen=True, slots=True)
class Until:
    """Where this process stops at the latest. Absolute, so that one that is started again does not get more."""

    epoch: int | None = None  # epochs done
    time: float | None = None  # seconds since 1970

    def within(self, training: TrainingConfig, epochs_done: int) -> "Until":
        """No later than training.epochs_per_run and training.stop_after_s allow, counted from now."""
        epoch, late = self.epoch, self.time
        if training.epochs_per_run is not None:
            epoch = min(epochs_done + training.epochs_per_run, training.epochs if epoch is None else epoch)
        if training.stop_after_s is not None:
            late = min(time.time() + training.stop_after_s, math.inf if late is None else late)
        return Until(epoch, late)


NO_LIMIT = Until()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that a step can be finished; a second signal acts as usual."""
    event = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: FrameType | None) -> None:
        log.warning("%s: finishing the step, then a checkpoint", signal.Signals(number).name)
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
