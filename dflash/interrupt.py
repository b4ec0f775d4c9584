"""SIGTERM and SIGINT: work in progress is finished and kept, then the process ends."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """A signal asked the run to end: the step is finished and a checkpoint written. Not an error."""


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
