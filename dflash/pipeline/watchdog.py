"""Ends a run whose stages have stopped moving: a hang looks like slow work until somebody asks for how long already."""

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

from dflash.errors import StageFailed
from dflash.pipeline.channel import Stop
from dflash.pipeline.telemetry import Clock

log = logging.getLogger(__name__)

_GRACE_S = 20.0  # what a stage then has to notice that the run has ended


class Watchdog:
    """Watches the clocks from a thread of its own between `start` and `end`."""

    def __init__(
        self, clocks: dict[str, list[Clock]], stop: Stop, limit_s: float, last_resort: Callable[[BaseException], None]
    ) -> None:
        self._clocks, self._stop, self._limit_s, self._last_resort = clocks, stop, limit_s, last_resort
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """The run is over; returns when the watchdog has gone."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        done, since = -1, time.monotonic()
        while not self._ended.wait(self._limit_s / 10):
            now, items = time.monotonic(), sum(c.items for clocks in self._clocks.values() for c in clocks)
            if items != done:
                done, since = items, now
            elif now - since >= self._limit_s:
                self._bite(now)
                return

    def _bite(self, now: float) -> None:
        working = {
            name: max(now - c.working_since for c in clocks if c.working_since is not None)
            for name, clocks in self._clocks.items()
            if any(c.working_since is not None for c in clocks)
        }
        stage = max(working, key=lambda name: working[name], default="train")
        error = StageFailed(
            f"stage {stage} hangs: no stage has finished anything for {self._limit_s:.0f} s, "
            f"{stage} has worked on one item for {working.get(stage, self._limit_s):.0f} s. What every thread was "
            "doing is in the log. The last checkpoint counts; run again to go on from it."
        )
        log.error("%s", error)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._stop.fail(stage, error)
        if not self._ended.wait(min(_GRACE_S, self._limit_s)):  # a thread in a call that never returns cannot be ended
            self._last_resort(error)
