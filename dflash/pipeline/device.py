"""Time and copies on a device: CUDA works behind the host's back, so both go through events on streams of their own.

Nothing here waits for the device, except for the item before the one that was just launched: a stage is never more than
one item ahead of its device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cache.batches.gather import Buffers
from dflash.batch import FeatureBatch, TrainBatch
from dflash.pipeline.telemetry import Spent, Wait, spent

_MOVED = ("anchor", "labels", "weights", "counted")  # what the trainer reads


class Stopwatch:
    """When a device worked on the items of one stage, and what the stage waited for before each.

    Ends of work are put on the host's clock by chains of differences, which are short, so that nothing is lost to
    float32. Two clocks drift; no work begins before it is launched, nor ends after it has been seen to be done.
    """

    def __init__(self, device: torch.device, *, takes_turns: bool = False) -> None:
        self._device, self._takes_turns = device, takes_turns
        self._waits: list[Wait] = []
        self._items: deque[_Item] = deque()
        self._last = _event(device)
        self._last.record(_current(device))
        self._last.synchronize()
        self._idle_since = time.perf_counter()  # when the last of the items that have been taken was done

    def waited(self, *, blocked: float = 0.0, starved: float = 0.0) -> None:
        """The host has just waited so long for room or its turn, then for the next item's input."""
        end = time.perf_counter()
        for kind, seconds in (("starved", starved), ("blocked", blocked)):
            if seconds:
                self._waits.append(Wait(kind, end - seconds, end))
                end -= seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The work of one item, on the current stream; it may wait there for its input before the first of it."""
        waits, self._waits = self._waits, []
        began, ended = _event(self._device), _event(self._device)
        launched = time.perf_counter()
        began.record(_current(self._device))
        yield
        ended.record(_current(self._device))
        self._items.append(_Item(launched, began, ended, waits))

    @property
    def under_way(self) -> int:
        """Items that are not known to be done."""
        return len(self._items)

    def taken(self, newest: int = 1) -> Spent:
        """The time of the items that are done since the last call; waits for all but the newest few.

        On the CPU all are done.
        """
        total = Spent()
        while len(self._items) > (0 if self._device.type == "cpu" else newest):
            item = self._items.popleft()
            item.ended.synchronize()
            began = max(item.launched, self._idle_since + self._last.elapsed_time(item.began) / 1e3)
            ended = min(time.perf_counter(), began + item.began.elapsed_time(item.ended) / 1e3)
            turns = self._takes_turns
            total += spent(self._idle_since, item.launched, began, ended, item.waits, takes_turns=turns)
            self._last, self._idle_since = item.ended, ended
        return total


@dataclass(frozen=True, slots=True)
class _Item:
    launched: float  # by the host
    began: "Event"
    ended: "Event"
    waits: list[Wait]


class Event(Protocol):
    """A moment on a device's clock: torch.cuda.Event, as far as it is used here."""

    def record(self, stream: Any) -> None: ...

    def wait(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class _HostEvent:
    """The same on the CPU, whose work is done when the call returns."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "_HostEvent") -> float:
        """Milliseconds until another one."""
        return 1e3 * (end_event.at - self.at)


def new_buffers(capacity_tokens: int, device: torch.device) -> Buffers:
    """Buffers to lease; ids are page-locked where a CUDA device copies from them, so that the copy is asynchronous."""
    if device.type == "cpu":
        return Buffers(capacity_tokens)
    return Buffers(capacity_tokens, torch.empty(capacity_tokens, dtype=torch.int32, pin_memory=True).numpy())


def pinned(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch with what the trainer reads in page-locked memory; the allocator keeps it until its copy is done."""
    if device.type == "cpu":
        return batch
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in _MOVED})


class Lane:
    """The way of a pass from the host over one target to the drafter's device.

    On CUDA: ids go in on one stream, the target computes on a second, features leave on a third of each device. Each
    waits for the one before it by an event on the device; the host waits for the copy of the ids alone. A target over
    several devices takes ids on the first and gives features on the last; what travels between them waits for the
    streams of both. While one works on a pass, those before it begin the next. A target that takes turns with the
    drafter on one device computes on the drafter's stream: neither slows the other down, and each has its own time.
    """

    def __init__(self, target: Sequence[torch.device], drafter: torch.device) -> None:
        self._target, self._drafter = target[0], drafter
        if self._target.type != "cpu":
            self._in, self._send, self._receive = _stream(target[0]), _stream(target[-1]), _stream(drafter)
            takes_turns = tuple(target) == (drafter,)
            self._compute = [_current(drafter)] if takes_turns else [_stream(device) for device in target]

    def carry(
        self, batch: TrainBatch, features: Callable[[Tensor], Tensor], watch: Stopwatch, release: Callable[[], object]
    ) -> FeatureBatch:
        """Run `features` on the ids; `release` is called when the leased memory has had its last reader."""
        if self._target.type == "cpu":
            with watch.measured():
                values = features(batch.ids)
            release()
            return FeatureBatch(replace(batch, ids=batch.ids[:0]), values)
        copied, computed, ready = _event(self._target), _event(self._target), _event(self._drafter)
        with _on(self._in):
            ids = _moved(batch.ids, self._target)
            copied.record(self._in)
        copied.wait(self._compute[0])
        _keep(ids, self._compute[0])
        with _on(*self._compute):  # the last device's is then the current one: it is timed, and waited for
            with watch.measured():
                values = features(ids)
            computed.record(self._compute[-1])
        # A copy between devices uses the current stream of both.
        with _on(self._send, self._receive):
            computed.wait(self._send)
            computed.wait(self._receive)
            moved: dict[str, Any] = {name: _moved(getattr(batch, name), self._drafter) for name in _MOVED}
            _keep(values, self._send)
            values = _moved(values, self._drafter)
            ready.record(self._receive)
        copied.synchronize()
        release()
        return FeatureBatch(replace(batch, ids=batch.ids[:0], **moved), values, ready)


def receive(item: FeatureBatch, device: torch.device) -> None:
    """Let the trainer's stream wait for an item, and keep the item's memory until that stream is done with it."""
    if item.ready is None:
        return
    stream = _current(device)
    item.ready.wait(stream)
    for tensor in (item.features, *(getattr(item.batch, name) for name in _MOVED)):
        _keep(tensor, stream)


# All that CUDA is used for here; tests put simulated devices in their place.


def _event(device: torch.device) -> Event:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostEvent()  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def _on(*streams: Any) -> Iterator[None]:
    """Make these the current streams of their devices, and the last one's device the current one."""
    with ExitStack() as entered:
        for stream in streams:
            entered.enter_context(torch.cuda.stream(stream))
        yield


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _keep(tensor: Tensor, stream: Any) -> None:
    """Leave a tensor's memory alone until `stream` has done what was asked of it so far."""
    if tensor.device.type == "cuda":
        tensor.record_stream(stream)
