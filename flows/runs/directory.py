"""The run directory as flows see it: config.json, the results of the stages, and the checkpoints."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def proposed_config(run: Path, parameters: Parameters) -> Iterator[None]:
    """Writes config.json for a stage; the one that was there comes back when the stage refuses the new one."""
    path = run / "config.json"
    before = read_json(path)
    write_json(path, parameters.model_dump(mode="json"))
    try:
        yield
    except (ConfigMismatch, RunLocked):
        if before is not None:
            write_json(path, before)
        raise


@contextlib.contextmanager
def in_use(run: Path) -> Iterator[None]:
    """Until the block ends, `flows clean` keeps the run directory. Raises RunLocked where it is just deleting it."""
    with held(lock_of(run), wait=False, shared=True) as is_kept:
        if not is_kept:
            raise RunLocked(f"{run} is being deleted now. Start it again, or choose another name.")
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


def epochs_done(run: Path) -> int:
    """Whole epochs behind the newest checkpoint: the first number of its name."""
    newest = newest_checkpoint(run)
    match = None if newest is None else _CHECKPOINT.fullmatch(newest.name)
    return 0 if match is None else int(match[1])


def _names(run: Path) -> list[str]:
    directory = run / "checkpoints"
    return os.listdir(directory) if directory.is_dir() else []
