"""Devices that work behind the host's back: a launch returns at once, the work is done later, on a clock of their own.

Put in the place of CUDA's streams and events, so that the pipeline's own ones are what is tested.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.batch import FeatureBatch, Step
from dflash.pipeline import device as real
from dflash.step_sums import PendingReport

SKEW = 1.0005  # a device's clock is so much faster than the host's


@dataclass(eq=False)
class Stream:
    """Does one thing after another."""

    device: torch.device
    free_at: float = 0.0  # host's time

    def launch(self, seconds: float) -> tuple[float, float]:
        """When the work begins and ends."""
        began = max(time.perf_counter(), self.free_at)
        self.free_at = began + seconds
        return began, self.free_at


class Event:
    at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = max(time.perf_counter(), stream.free_at)

    def wait(self, stream: Stream) -> None:
        stream.free_at = max(stream.free_at, self.at)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * SKEW * (end.at - self.at)


class Devices:
    """In the place of what `dflash/pipeline/device.py` needs of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default: dict[torch.device, Stream] = {}
        self.since: dict[torch.device, float] = {}  # when a stage first looked at its device's clock
        self.entered = threading.local()
        patches = {
            "_event": self.event,
            "_stream": Stream,
            "_current": self.current,
            "_on": self.on,
            "_moved": lambda tensor, device: tensor,
            "_keep": lambda tensor, stream: None,
            "pinned": lambda batch, device: batch,
        }
        for name, patch in patches.items():
            monkeypatch.setattr(real, name, patch)
        monkeypatch.setattr("dflash.pipeline.stages.pinned", patches["pinned"])
        monkeypatch.setattr("dflash.pipeline.pipeline.new_buffers", lambda tokens, device: real.Buffers(tokens))

    def event(self, device: torch.device) -> Any:
        self.since.setdefault(device, time.perf_counter())
        return Event() if device.type == "cuda" else real._HostEvent()

    def current(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        streams: dict[torch.device, Stream] = getattr(self.entered, "streams", {})
        return streams.get(device) or self.default.setdefault(device, Stream(device))

    @contextmanager
    def on(self, *streams: Stream) -> Iterator[None]:
        before = getattr(self.entered, "streams", {})
        self.entered.streams = before | {stream.device: stream for stream in streams}
        try:
            yield
        finally:
            self.entered.streams = before


@dataclass
class Worker:
    """A target or a trainer: the seconds of a pass, and when its device worked."""

    simulated: Devices
    index: int
    seconds: float
    worked: list[tuple[float, float]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self.device,)

    def work(self, seconds: float) -> None:
        self.worked.append(self.simulated.current(self.device).launch(seconds))

    def busy(self, under_way: int) -> float:
        """Share of the time until the end of its last work but so many, which the pipeline has not waited for."""
        worked = self.worked[:-under_way]
        return sum(ended - began for began, ended in worked) / (worked[-1][1] - self.simulated.since[self.device])


class SimulatedTarget(Worker):
    """Its features are the time when they were asked for."""

    def features(self, ids: Tensor) -> Tensor:
        self.work(self.seconds)
        return torch.tensor([time.perf_counter()], dtype=torch.float64)


@dataclass
class SimulatedTrainer(Worker):
    """Notes from when to when the features of each pass were alive."""

    alive: list[tuple[float, float]] = field(default_factory=list)

    def accumulate(self, item: FeatureBatch) -> None:
        self.work(self.seconds)
        self.alive.append((item.features.item(), self.worked[-1][1]))

    def step(self, at: Step) -> PendingReport:
        self.work(self.seconds / 20)
        return PendingReport(at, 0.0, 4, torch.zeros(17))


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """How many of these there are at a time, at most."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes))
