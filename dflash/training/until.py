"""Where a training process stops before its plan ends: after an epoch, or at a time."""

import math
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as time_of_day
from zoneinfo import ZoneInfo

from dflash.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class Until:
    """Where this process stops at the latest. Absolute, so that one that is started again does not get more."""

    epoch: int | None = None  # epochs done
    time: float | None = None  # seconds since 1970

    def within(self, training: TrainingConfig, epochs_done: int) -> "Until":
        """No later than training.epochs_per_run, training.stop_after_s and training.until allow, counted from now."""
        epoch = self.epoch
        if training.epochs_per_run is not None:
            epoch = min(epochs_done + training.epochs_per_run, training.epochs if epoch is None else epoch)
        late = min(end_of_window(training, time.time()), math.inf if self.time is None else self.time)
        return Until(epoch, None if math.isinf(late) else late)


NO_LIMIT = Until()


def end_of_window(training: TrainingConfig, start: float) -> float:
    """When a run that starts then has to end, by training.stop_after_s and training.until; infinite: never."""
    after = math.inf if training.stop_after_s is None else start + training.stop_after_s
    return after if training.until is None else min(after, next_time(training.until, start))


def next_time(text: str, start: float) -> float:
    """When, after the start, clocks first show a time of day such as `06:00` or `06:00 Europe/Berlin`.

    A day on which clocks are turned back may show it twice, and one on which they are put forward may leave it out:
    then it counts as the time that it would be by the clock before, so that every day has an end.
    """
    clock, _, name = text.partition(" ")
    zone = ZoneInfo(name) if name else None  # None: this machine's
    today = datetime.fromtimestamp(start, zone).date()
    moments = [
        datetime.combine(today + timedelta(days=days), time_of_day.fromisoformat(clock), zone).replace(fold=fold)
        for days in range(3)
        for fold in (0, 1)
    ]
    shown = [moment.timestamp() for moment in moments if moment.fold == 0 or _is_shown(moment)]
    return min(moment for moment in shown if moment > start)


def _is_shown(moment: datetime) -> bool:
    there = datetime.fromtimestamp(moment.timestamp(), moment.tzinfo)
    return there.time() == moment.time()
