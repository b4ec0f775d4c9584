"""Where a training process stops before its plan ends: after an epoch, or at a time."""

import math
import time
from dataclasses import dataclass

from dflash.config import TrainingConfig


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
