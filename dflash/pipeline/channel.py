"""What stages hand work through: bounded, closable, and a failure on one end is seen on every other.

Waiting is on a condition, never a poll. Every wait is measured, which is all that telemetry needs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Closed(Exception):
    """Nothing more will come, or nobody will take more. Not an error."""


class Stop:
    """The end of a pipeline: it keeps the first failure and wakes every stage that waits.

    All channels share its lock; each has conditions of its own, so that a hand-over wakes only who waits for it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: tuple[str, BaseException] | None = None
        self.stopped = False
        self._conditions: list[threading.Condition] = []

    def new_condition(self) -> threading.Condition:
        """A condition that the switch wakes, too."""
        condition = threading.Condition(self.lock)
        self._conditions.append(condition)
        return condition

    def fail(self, stage: str, error: BaseException) -> None:
        """Keep the first failure and wake all; later ones are its echo."""
        with self.lock:
            if self.failure is None and not self.stopped:
                self.failure = (stage, error)
        self.stop()

    def stop(self) -> None:
        """End the pipeline; without an error unless one has been kept."""
        with self.lock:
            self.stopped = True
            for condition in self._conditions:
                condition.notify_all()

    def wait(self, condition: threading.Condition, ready: Callable[[], bool]) -> float:
        """Seconds waited until `ready()`. Raises Closed when the pipeline stops. Call it with the lock held."""
        if self.stopped:
            raise Closed
        if ready():
            return 0.0
        start = time.perf_counter()
        while not ready():
            condition.wait()
            if self.stopped:
                raise Closed
        return time.perf_counter() - start


class Channel(Generic[T]):
    """First in, first out, at most `capacity` items; several may take from it."""

    def __init__(self, capacity: int, stop: Stop) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._stop = stop
        self._filled, self._freed = stop.new_condition(), stop.new_condition()
        self._closed = False

    def put(self, item: T) -> float:
        """Add an item when there is room; seconds blocked."""
        with self._stop.lock:
            blocked = self._stop.wait(self._freed, lambda: len(self._items) < self._capacity)
            self._items.append(item)
            self._filled.notify()
            return blocked

    def take(self) -> tuple[T, float]:
        """The oldest item and the seconds starved for it. Raises Closed when there will be none."""
        with self._stop.lock:
            starved = self._stop.wait(self._filled, lambda: bool(self._items) or self._closed)
            if not self._items:
                raise Closed
            item = self._items.popleft()
            self._freed.notify()
            return item, starved

    def close(self) -> None:
        """Nothing more will be put; what is there can still be taken."""
        with self._stop.lock:
            self._closed = True
            self._filled.notify_all()

    def __len__(self) -> int:
        return len(self._items)


class Reorder(Generic[T]):
    """Items come in any order under their index and leave in index order: results do not depend on timing.

    At most `capacity` are alive, from `reserve`, before one is made, until `release`, when nobody needs its memory. The
    thread that takes can be asked to do others' work while it has nothing to take.
    """

    def __init__(self, capacity: int, stop: Stop) -> None:
        self._items: dict[int, T] = {}
        self._next = self._released = 0
        self._capacity = capacity
        self._stop = stop
        self._filled, self._freed, self._answered = (stop.new_condition() for _ in range(3))
        self._end: int | None = None
        self._errands: deque[Callable[[], None]] = deque()

    def reserve(self, index: int) -> float:
        """Return when the item of an index may be made; seconds blocked. The next one to take waits for no other."""
        with self._stop.lock:
            return self._stop.wait(self._freed, lambda: index < self._released + self._capacity)

    def put(self, index: int, item: T) -> None:
        """Add the item of a reserved index."""
        with self._stop.lock:
            self._items[index] = item
            self._filled.notify_all()

    def release(self) -> None:
        """The oldest item that has been taken is no longer needed."""
        with self._stop.lock:
            self._released += 1
            self._freed.notify_all()

    def take(self) -> tuple[T, float, float]:
        """The next item in order, the seconds starved for it, and those spent on others' work until it came.

        What there is to take comes before what others ask for. Raises Closed past the end.
        """
        starved = spent = 0.0
        while True:
            with self._stop.lock:
                starved += self._stop.wait(self._filled, lambda: self._is_next() or bool(self._errands))
                if self._next == self._end:
                    raise Closed
                if self._is_next():
                    item = self._items.pop(self._next)
                    self._next += 1
                    return item, starved, spent
                errand = self._errands.popleft()
            start = time.perf_counter()
            errand()
            del errand  # what it made is alive only as long as it is needed
            spent += time.perf_counter() - start

    def ask(self, work: Callable[[], R]) -> R:
        """Let the thread that takes do `work`; returns what it returned, raises what it raised."""
        done: Future[R] = Future()  # waited for under `Stop`, which must be able to end the wait

        def errand() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
            with self._stop.lock:
                self._answered.notify_all()

        with self._stop.lock:
            self._errands.append(errand)
            self._filled.notify_all()
            self._stop.wait(self._answered, done.done)
        return done.result()

    def _is_next(self) -> bool:
        return self._next in self._items or self._next == self._end

    def end(self, index: int) -> None:
        """`index` and later ones will not come."""
        with self._stop.lock:
            self._end = index
            self._filled.notify_all()

    def __len__(self) -> int:
        return len(self._items)
