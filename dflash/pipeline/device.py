"""Time and copies on a device: CUDA works behind the host's back, so both go through events on streams of their own.

Nothing here waits for the device, except for the item before the one that was just launched: a stage is never more than
one item ahead of its device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cache.batches.gather import Buffers
from dflash.batch import FeatureBatch, TrainBatch

_MOVED = ("anchor", "labels", "weights", "counted")  # what the trainer reads


class Stopwatch:
    """Seconds that a device worked on the items of one stage."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The work of one item, on the current stream."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        began, ended = _event(timing=True), _event(timing=True)
        began.record()
        yield
        ended.record()
        self._events.append((began, ended))

    def taken(self) -> float:
        """Seconds of the items that are done since the last call; waits for all but the newest."""
        seconds, self._seconds = self._seconds, 0.0
        while len(self._events) > 1:
            began, ended = self._events.popleft()
            ended.synchronize()
            seconds += began.elapsed_time(ended) / 1e3
        return seconds


def new_buffers(capacity_tokens: int, device: torch.device) -> Buffers:
    """Buffers to lease; page-locked where a CUDA device copies from them, so that the copy is asynchronous."""
    buffers = Buffers(capacity_tokens)
    if device.type == "cuda":
        for array in (buffers.ids, buffers.mask):
            _check(_runtime().cudaHostRegister(array.ctypes.data, array.nbytes, 0))
    return buffers


def free_buffers(buffers: Buffers, device: torch.device) -> None:
    """Unlock the pages before the memory goes."""
    if device.type == "cuda":
        for array in (buffers.ids, buffers.mask):
            _check(_runtime().cudaHostUnregister(array.ctypes.data))


def pinned(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch with what the trainer reads in page-locked memory; the allocator keeps it until its copy is done."""
    if device.type != "cuda":
        return batch
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in _MOVED})


class Lane:
    """The way of a micro-batch from the host over one target to the drafter's device.

    On CUDA: ids go in on one stream, the target computes on a second, features leave on a third of each device. Each
    waits for the one before it by an event on the device; the host waits for the copy of the ids alone. A target over
    several devices takes ids on the first and gives features on the last; what travels between them waits for the
    streams of both. While one works on a micro-batch, those before it begin the next.
    """

    def __init__(self, target: Sequence[torch.device], drafter: torch.device) -> None:
        self._target, self._drafter = target[0], drafter
        if self._target.type == "cuda":
            self._in, self._send, self._receive = _stream(target[0]), _stream(target[-1]), _stream(drafter)
            self._compute = [_stream(device) for device in target]

    def carry(
        self, batch: TrainBatch, features: Callable[[Tensor], Tensor], watch: Stopwatch, release: Callable[[], object]
    ) -> FeatureBatch:
        """Run `features` on the ids; `release` is called when the leased memory has had its last reader."""
        if self._target.type != "cuda":
            with watch.measured():
                values = features(batch.ids)
            release()
            return FeatureBatch(replace(batch, ids=batch.ids[:0]), values)
        copied, computed, ready = _event(), _event(), _event()
        with torch.cuda.stream(self._in):
            ids = batch.ids.to(self._target, non_blocking=True)
            copied.record()
        copied.wait(self._compute[0])
        ids.record_stream(self._compute[0])
        with ExitStack() as streams:
            for stream in self._compute:  # the last device's is then the current one: it is timed, and waited for
                streams.enter_context(torch.cuda.stream(stream))
            with watch.measured():
                values = features(ids)
            computed.record()
        # A copy between devices uses the current stream of both.
        with torch.cuda.stream(self._send), torch.cuda.stream(self._receive):
            computed.wait(self._send)
            computed.wait(self._receive)
            moved = {name: getattr(batch, name).to(self._drafter, non_blocking=True) for name in _MOVED}
            if values.device.type == "cuda":
                values.record_stream(self._send)
            values = values.to(self._drafter, non_blocking=True)
            ready.record(self._receive)
        copied.synchronize()
        release()
        return FeatureBatch(replace(batch, ids=batch.ids[:0], **moved), values, ready)


def receive(item: FeatureBatch, device: torch.device) -> None:
    """Let the trainer's stream wait for an item, and keep the item's memory until that stream is done with it."""
    if item.ready is None:
        return
    stream = torch.cuda.current_stream(device)
    item.ready.wait(stream)
    for tensor in (item.features, *(getattr(item.batch, name) for name in _MOVED)):
        tensor.record_stream(stream)


def _event(*, timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: object) -> None:
    torch.cuda.check_error(code)  # type: ignore[arg-type]
