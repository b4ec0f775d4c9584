"""Checkpoints: written whole or not at all, verified when read, the newest good one is the one that counts.

    checkpoints/epoch-002-step-000120/
        drafter.safetensors     weights, float32
        optimizer.safetensors   AdamW's moments and step counts, float32
        state.json              position, settings (seed and key of the token cache among them), checksums

The position is where the run goes on from: epochs done, steps done in the next one. Training waits only for the copy of
its tensors; the files are written by a thread, one checkpoint at a time.
"""

import json
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cache.json_file import write_json
from cache.locks import try_lock
from dflash.errors import CheckpointCorrupt, RunLocked, StageFailed
from dflash.files import checksum, durable_directory, write_tensors

log = logging.getLogger(__name__)

_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")
_FIRST = "epoch-000-step-000000"
_FILES = ("drafter.safetensors", "optimizer.safetensors")


@dataclass(frozen=True, slots=True)
class State:
    """What besides tensors a run goes on from."""

    epoch: int  # epochs done
    step: int  # steps done in the next epoch
    steps_total: int
    settings: dict[str, Any]  # what the curve depends on, by field name
    threads: int  # of each CPU stage: bit-equality holds for the same number
    bad_steps: int = 0  # skipped steps in a row
    weight: float = 0.0  # Σ w so far
    tokens: int = 0
    seconds: float = 0.0
    window: dict[str, Any] = field(default_factory=dict)  # sums since the last line of metrics.jsonl
    best: dict[str, Any] | None = None  # τ and checkpoint of the best evaluation so far


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been verified."""

    path: Path
    state: State

    def drafter(self) -> dict[str, Tensor]:
        """Weights by name, float32, on the CPU."""
        return load_file(self.path / "drafter.safetensors")

    def optimizer(self) -> dict[str, Tensor]:
        """Moments and step counts by name, float32, on the CPU."""
        return load_file(self.path / "optimizer.safetensors")


def name_of(state: State) -> str:
    """The directory of a checkpoint, named by its position."""
    return f"epoch-{state.epoch:03d}-step-{state.step:06d}"


def save(directory: Path, state: State, drafter: dict[str, Tensor], optimizer: dict[str, Tensor]) -> Checkpoint:
    """Write a checkpoint durably below `directory`: state.json last, then one rename. A good one stays as it is."""
    final = directory / name_of(state)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return verify(final)
    except CheckpointCorrupt:
        pass  # absent, or damaged and written anew
    with durable_directory(final) as partial:
        files = {}
        for name, tensors in zip(_FILES, (drafter, optimizer), strict=True):
            content = write_tensors(partial / name, tensors)
            files[name] = {"size_bytes": (partial / name).stat().st_size, "xxh3": content}
        write_json(partial / "state.json", asdict(state) | {"files": files})
    return Checkpoint(final, state)


class Writer:
    """Writes checkpoints in the background, one at a time, each from a snapshot of the tensors.

    `before` is called in the background before each: what a checkpoint relies on becomes durable there.
    """

    def __init__(self, directory: Path, keep: int, before: Callable[[], None] = lambda: None) -> None:
        self._directory, self._keep, self._before = directory, keep, before
        self._snapshots: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._thread: threading.Thread | None = None
        self._saved: Checkpoint | None = None
        self._error: BaseException | None = None

    def save(self, state: State, drafter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Copy the tensors and begin to write. Waits for the checkpoint before; raises what that one failed with."""
        self.finish()
        for snapshot, tensors in zip(self._snapshots, (drafter, optimizer), strict=True):
            _copy(snapshot, tensors)
        self._thread = threading.Thread(target=self._write, args=(state,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, so that the next one would have to wait."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Checkpoint | None:
        """Wait until nothing is being written; the newest checkpoint. Raises what its writing failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        return self._saved

    def check(self) -> None:
        """Raise what the last checkpoint failed with, if it has; waits for nothing."""
        if self._error is not None:
            error, self._error = self._error, None
            raise StageFailed(
                f"a checkpoint could not be written to {self._directory}: {error}. The checkpoints that are there are "
                f"whole, {shutil.disk_usage(self._directory).free / 1e9:.2f} GB are free. Free some or lower "
                "training.keep, then run again to go on from the newest one."
            ) from error

    def _write(self, state: State) -> None:
        try:
            self._before()
            self._saved = save(self._directory, state, *self._snapshots)
            prune(self._directory, self._keep, state.best["checkpoint"] if state.best else None)
        except BaseException as error:
            self._error = error


def _copy(snapshot: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the snapshot's own memory on the host, which is used again for the next one."""
    on_device = False
    for name, tensor in tensors.items():
        if name not in snapshot:
            snapshot[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        snapshot[name].copy_(tensor.detach(), non_blocking=True)
        on_device |= tensor.device.type == "cuda"
    if on_device:
        torch.cuda.synchronize()


def verify(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointCorrupt when a file is not what state.json says."""
    try:
        value = json.loads((path / "state.json").read_text())
        files = value.pop("files")
        state = State(**value)
        expected = {name: (files[name]["size_bytes"], files[name]["xxh3"]) for name in _FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path}: state.json is missing or unreadable: {error}") from error
    for name in _FILES:
        file, (size, content) = path / name, expected[name]
        found_size = file.stat().st_size if file.is_file() else None
        if found_size != size:
            raise CheckpointCorrupt(f"{file}: has {found_size} bytes, expected {size}")
        if (got := checksum(file)) != content:
            raise CheckpointCorrupt(f"{file}: content has xxh3 {got}, expected {content}")
    return Checkpoint(path, state)


def found(directory: Path) -> list[Path]:
    """Directories named like checkpoints, newest position first; numbers are compared as numbers."""
    if not directory.is_dir():
        return []
    named = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for match, path in sorted(named, key=lambda m: (int(m[0][1]), int(m[0][2])), reverse=True)]


def newest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies; those skipped are logged with the reason. None when there is none at all.

    Raises CheckpointCorrupt when there are some and none verifies: starting anew would throw a run away silently.
    """
    paths = found(directory)
    reasons = []
    for path in paths:
        try:
            return verify(path)
        except CheckpointCorrupt as error:
            log.warning("skipped a damaged checkpoint: %s", error)
            reasons.append(str(error))
    if reasons:
        raise CheckpointCorrupt(
            f"none of the {len(paths)} checkpoints in {directory} verifies: {'; '.join(reasons)}. "
            "Restore one from a backup, or remove the directory to start from the beginning."
        )
    return None


def best(directory: Path) -> Checkpoint | None:
    """The checkpoint to evaluate and to serve: the one with the best τ where training measures it, else the newest.

    None and CheckpointCorrupt as `newest`.
    """
    last = newest(directory)
    if last is None or last.state.best is None:
        return last
    try:
        return verify(directory / last.state.best["checkpoint"])
    except CheckpointCorrupt as error:
        log.warning("the newest checkpoint takes the place of the best one, which is damaged: %s", error)
        return last


def first(directory: Path) -> Checkpoint:
    """The checkpoint before the first step. Raises CheckpointCorrupt when it is missing or damaged."""
    return verify(directory / _FIRST)


def prune(directory: Path, keep: int, best: str | None = None) -> None:
    """Remove all but the first, the best and the newest `keep` checkpoints, and what killed writers left."""
    for path in found(directory)[keep:]:
        if path.name not in (_FIRST, best):
            shutil.rmtree(path)
    for path in directory.glob("*.tmp-*"):
        shutil.rmtree(path)


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """One writer per run directory. Raises RunLocked, by host and process of the other one, or CannotLock.

    The lock is the operating system's, so it ends with its process, however that ends.
    """
    run.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(descriptor, run / "lock"):
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise RunLocked(
                f"run directory {run} is being written by {owner}. Wait for it, stop it, or choose another name."
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
