"""The run directory as flows see it: config.json, the results of the stages, and the checkpoints."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cache.json_file import read_json, write_json
from cache.locks import held, lock_of
from dflash.errors import ConfigMismatch, RunLocked
from flows.runs.parameters import Parameters

Tree = dict[str, Any]

_CHECKPOINT = re.compile(r"epoch-(\d+)-step-(\d+)")


def read_lines(path: Path) -> list[Tree]:
    """The lines of a JSONL file, as far as they are whole: a killed process may leave a half last one."""
    if not path.is_file():
        return []
    lines: list[Tree] = []
    with contextlib.suppress(json.JSONDecodeError), path.open() as stream:
        lines += map(json.loads, stream)
    return lines


@contextlib.contextmanager
def proposed_config(run: Path, parameters: BaseModel, stage: str) -> Iterator[str]:
    """Parameters beside config.json, in a file whose name the stage is given; only training or answering makes it that.

    So config.json holds what the run was accepted with, whatever is refused, killed or tried once.
    """
    path = run / f"proposed-{stage}.json"
    write_json(path, parameters.model_dump(mode="json"))
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def accept_config(run: Path, parameters: Parameters) -> None:
    """Parameters that change nothing of a finished training are the run's from now on, for later evaluations.

    Raises RunLocked while another process trains it.
    """
    with held(run / "lock", wait=False) as is_mine:
        if not is_mine:
            raise RunLocked(f"run directory {run} is being written by another process. Wait for it, or stop it.")
        write_json(run / "config.json", parameters.model_dump(mode="json"))


@contextlib.contextmanager
def in_use(run: Path) -> Iterator[None]:
    """Until the block ends, `flows clean` keeps the run directory. Raises RunLocked where it is just deleting it."""
    with held(lock_of(run), wait=False, shared=True) as is_kept:
        if not is_kept:
            raise RunLocked(f"{run} is being deleted now. Start it again, or choose another name.")
        yield


@contextlib.contextmanager
def stage_alone(run: Path, stage: str) -> Iterator[None]:
    """One process at a time does a stage of a run: its parameters, progress and errors have one file each."""
    with held(run / f".{stage}.lock", wait=False) as is_mine:
        if not is_mine:
            raise RunLocked(f"{stage} of {run} is under way in another process. Wait for it, or choose another name.")
        yield


def read_parameters(run: Path) -> Parameters:
    """The resolved parameters that a run was made with."""
    config = read_json(run / "config.json")
    if config is None:
        trained = sorted(path.parent.name for path in run.parent.glob("*/config.json"))
        known = f"There are: {', '.join(trained)}." if trained else "None has been trained yet."
        raise ConfigMismatch(f"name={run.name}: there is no run in {run}. {known} Train it first, or set name or home.")
    return Parameters.model_validate(config)


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the highest epoch and step, by its name; `dflash` checks whether it is whole."""
    found = [(int(match[1]), int(match[2]), match[0]) for match in map(_CHECKPOINT.fullmatch, _names(run)) if match]
    return run / "checkpoints" / max(found)[2] if found else None


def checkpoint_position(run: Path) -> tuple[int, int]:
    """Epochs done, and steps done in the next one, of the newest checkpoint: the numbers of its name."""
    newest = newest_checkpoint(run)
    match = None if newest is None else _CHECKPOINT.fullmatch(newest.name)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


def epochs_done(run: Path) -> int:
    """Whole epochs behind the newest checkpoint."""
    return checkpoint_position(run)[0]


def _names(run: Path) -> list[str]:
    directory = run / "checkpoints"
    return os.listdir(directory) if directory.is_dir() else []
