"""Which devices run the target and which the drafter, of those that this process may use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash.config import TargetConfig
from dflash.distributed import ALONE, Ranks
from dflash.errors import ConfigMismatch

Replica = tuple[torch.device, ...]  # the devices that hold one copy of the target, in the order of its layers

_WORTH = 1.1  # a target beside the drafter makes both irregular; so much faster it must be


@dataclass(frozen=True, slots=True)
class Devices:
    """Where the drafter and each replica of the target go."""

    drafter: torch.device
    targets: tuple[Replica, ...]
    undecided: bool = False  # whether the drafter's device is worth a target, too: measured times decide

    def enter(self) -> None:
        """Make the drafter's device the one that events and streams of this thread mean."""
        if self.drafter.type == "cuda":
            torch.cuda.set_device(self.drafter)

    @property
    def apart(self) -> bool:
        """Whether no target works on the drafter's device."""
        return all(self.drafter not in replica for replica in self.targets)

    def to_json(self) -> dict[str, Any]:
        """Names of the devices; a target over several devices is written as in `target.devices`."""
        return {"drafter": str(self.drafter), "targets": ["+".join(map(str, replica)) for replica in self.targets]}

    def decided(self, target_s: float, drafter_s: float) -> "Devices":
        """With one target more, on the drafter's device, where these seconds of a micro-batch say so."""
        together = self.undecided and split(len(self.targets) + 1, target_s, drafter_s).together
        return replace(self, targets=(*self.targets, (self.drafter,)) if together else self.targets, undecided=False)


@dataclass(frozen=True, slots=True)
class Split:
    """What a process makes of its devices: one runs the drafter, the others the target; `together`, all run it."""

    together: bool
    seconds: float  # a micro-batch, when nothing waits


def split(devices: int, target_s: float, drafter_s: float) -> Split:
    """The faster way to cut one process's devices, from the seconds of a micro-batch on one device."""
    together = max(drafter_s, (target_s + drafter_s) / devices)
    if devices == 1:
        return Split(True, together)
    apart = max(drafter_s, target_s / (devices - 1))
    return Split(True, together) if apart > _WORTH * together else Split(False, apart)


def best_processes(devices: int, target_s: float, drafter_s: float) -> int:
    """The fewest processes, of equally many devices each, that make about the most of one machine."""
    rates = {
        count: count / split(devices // count, target_s, drafter_s).seconds
        for count in range(1, devices + 1)
        if devices % count == 0
    }
    return min(count for count, rate in rates.items() if rate * _WORTH >= max(rates.values()))


def place(config: TargetConfig, ranks: Ranks = ALONE) -> Devices:
    """Named devices are the targets'; `auto` leaves the last GPU to the drafter, or shares what there is.

    Several processes of one machine deal its devices among them. Raises ConfigMismatch for a device that is not there.
    """
    if config.devices == "auto":
        mine = visible(ranks)
        return Devices(mine[-1], tuple((device,) for device in mine[:-1] or mine), undecided=len(mine) > 1)
    named = replicas(config.devices)
    targets = named[ranks.local_rank :: ranks.local_size] if named[0][0].type == "cuda" else named
    if not targets:
        raise ConfigMismatch(
            f"target.devices names {len(named)} replicas for {ranks.local_size} processes on this machine. "
            "Name one a process or more, start fewer processes, or set target.devices=auto."
        )
    taken = {device for replica in named for device in replica}
    free = [device for device in _gpus() if device not in taken] if named[0][0].type == "cuda" else []
    # One drafter a device: where there are too few free ones, each shares the last device of its own target.
    return Devices(free[ranks.local_rank] if len(free) >= ranks.local_size else targets[-1][-1], tuple(targets))


def replicas(names: Sequence[str]) -> list[Replica]:
    """The devices of each replica: `cuda:0` is one device, `cuda:0+cuda:1` are two that hold one target together.

    Raises ConfigMismatch for a device that is not there, or is named for several replicas.
    """
    found = [tuple(_device(part.strip()) for part in name.split("+")) for name in names]
    if len({device.type for replica in found for device in replica}) > 1:
        raise ConfigMismatch(f"target.devices={list(names)}: expected devices of one kind, all GPUs or all cpu.")
    taken = [device for replica in found for device in replica if device.type == "cuda"]
    if len(taken) != len(set(taken)) or not found:
        raise ConfigMismatch(
            f"target.devices={list(names)}: expected every device once, and at least one. Join devices that hold one "
            "target with +, such as [cuda:0+cuda:1, cuda:2+cuda:3]."
        )
    return found


def visible(ranks: Ranks = ALONE) -> list[torch.device]:
    """This process's part of the machine's GPUs, or the CPU."""
    gpus = _gpus()
    if gpus and len(gpus) < ranks.local_size:
        raise ConfigMismatch(
            f"{ranks.local_size} processes on this machine see {len(gpus)} GPUs; expected one a process or more. "
            "Start fewer processes."
        )
    each = len(gpus) // ranks.local_size
    return gpus[ranks.local_rank * each : (ranks.local_rank + 1) * each] or [torch.device("cpu")]


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigMismatch(f"target.devices names {name!r}; expected devices such as cuda:0 or cpu.") from error
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device not in _gpus():
            raise ConfigMismatch(
                f"target.devices: {device} is not there; this machine has {len(_gpus())} GPUs. "
                "Name those that are there, or set target.devices=auto."
            )
    return device
