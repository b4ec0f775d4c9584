"""What every command needs of a run before it begins: parameters, rows, shape, devices, and that they fit together."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from cache.store import TokenCache
from dflash.config import RunConfig, TargetConfig
from dflash.drafter import DrafterShape
from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.run import RunDirectory
from dflash.target import drafter_shape, text_config

# Fields of the training parameters that do not change the curve: when to stop, save and speak, and where features lie.
_FREE = {"features", "epochs_per_run", "stop_after_s", "checkpoint_every_steps", "log_every_steps", "keep"}
_SAMPLE = 1 << 16


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose parts have been checked against each other."""

    run: RunDirectory
    config: RunConfig
    store: TokenCache
    shape: DrafterShape

    def settings(self) -> dict[str, Any]:
        """Everything that the curve depends on, by field name."""
        training = self.config.training.model_dump(mode="json", exclude=_FREE)
        return {
            "token cache": self.store.key,
            "target.model": fingerprint(self.config.target),
            "target.dtype": self.config.target.dtype,
            "drafter.init": self.config.drafter.init,
            **{f"drafter.{name}": value for name, value in self.shape.to_json().items()},
            **{f"training.{name}": value for name, value in training.items()},
        }


def open_run(path: Path, tokens: Path) -> OpenRun:
    """Read and check. Raises ConfigMismatch, TargetMismatch or a CacheError before any weight is loaded."""
    run = RunDirectory(path)
    config = run.config()
    store = TokenCache.open(tokens)
    shape = drafter_shape(config.drafter, text_config(config.target))
    if store.manifest.vocabulary and store.manifest.vocabulary > shape.vocab_size:
        raise TargetMismatch(
            f"token cache {tokens.name} was made for a vocabulary of {store.manifest.vocabulary} ids, the target's "
            f"embedding has {shape.vocab_size} rows. Prepare the rows again with target.model={config.target.model}."
        )
    if not store.rows(0).size:
        raise ConfigMismatch(f"token cache {tokens.name} has no training rows: all are held out. Lower rows.held_out.")
    return OpenRun(run, config, store, shape)


def refuse_changed(stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ConfigMismatch by the names of the fields that differ from those a run was started with."""
    changed = [
        f"{name}: started with {stored.get(name)!r}, now {current.get(name)!r}"
        for name in sorted(stored.keys() | current.keys())
        if stored.get(name) != current.get(name)
    ]
    if changed:
        raise ConfigMismatch(
            f"settings that change the curve differ from those this run was started with: {'; '.join(changed)}. "
            "Set them back, or start a run of another name."
        )


def fingerprint(target: TargetConfig) -> str:
    """Identity of the target's content: its config, and of each weight file the size and samples of its bytes.

    A hub name is identified by name and revision: the hub's own names for content.
    """
    directory = Path(target.model)
    if not directory.is_dir():
        return f"{target.model}@{target.revision or 'main'}"
    digest = xxhash.xxh3_128()
    for file in sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for offset in sorted({0, *range(0, size, max(1, size // 16)), max(0, size - _SAMPLE)}):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE))
    digest.update((directory / "config.json").read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Devices:
    """Where the drafter and each replica of the target go."""

    drafter: torch.device
    targets: tuple[torch.device, ...]


def place(config: TargetConfig) -> Devices:
    """Named devices are the targets'; `auto` leaves the last GPU to the drafter, or shares what there is.

    Raises ConfigMismatch for a device that is not there.
    """
    gpus = torch.cuda.device_count()
    if config.devices == "auto":
        names = [f"cuda:{i}" for i in range(max(1, gpus - 1))] if gpus else ["cpu"]
    else:
        names = list(config.devices)
    targets = tuple(torch.device(name) for name in names)
    for device in targets:
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigMismatch(f"target.devices names {device}, this machine has {gpus} GPUs.")
    if targets[0].type == "cpu":
        return Devices(torch.device("cpu"), targets)
    return Devices(torch.device(f"cuda:{gpus - 1}"), targets)


def cpu_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
