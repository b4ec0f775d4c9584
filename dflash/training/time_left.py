"""How long a training still takes, by the pace of the newest steps: the first ones load and warm up.

Where features are kept, only the first epoch runs the target. What a later step takes is then what the drafter was at
work in a step so far.
"""

import time
from collections import deque

PACE_S = 120.0  # the pace is that of so long a time


class TimeLeft:
    """Told when a step is done, and what the drafter was at work so far in this process."""

    def __init__(self, total: int, first_epoch: int, done: int, *, reuse: bool) -> None:
        """`total` steps in all, `first_epoch` of them in the first epoch, `done` before this process."""
        self._total = total
        self._first_epoch = first_epoch if reuse else total
        self._start = done
        self._newest: deque[tuple[float, int]] = deque()

    def after(self, done: int, drafter_s: float) -> float | None:
        """Seconds left after so many steps; None: nothing can be said yet."""
        now = time.monotonic()
        self._newest.append((now, done))
        while len(self._newest) > 2 and self._newest[0][0] < now - PACE_S:
            self._newest.popleft()
        since, before = self._newest[0]
        if done == before:
            return None
        pace = (now - since) / (done - before)
        with_target = max(0, self._first_epoch - done)
        if not with_target:
            return pace * (self._total - done)
        return pace * with_target + min(pace, drafter_s / (done - self._start)) * (self._total - done - with_target)
