"""The run directory as flows see it: config.json, the results of the stages, and the ledger of what they took.

`stages.json` says for each stage how many seconds it has worked, over all runs that touched this directory (a stage
that had nothing to do adds nothing; a killed run adds what it had worked until its last entry, at most 5 s ago), and
the fingerprint of what it last finished for: while that is the same and the results are there, it is not repeated.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash.errors import ConfigMismatch, RunLocked
from flows.runs.parameters import Parameters

Tree = dict[str, Any]

LEDGER = "stages.json"
_CHECKPOINT = re.compile(r"epoch-(\d+)-step-(\d+)")
SAVE_EVERY_S = 5.0


def read_json(path: Path) -> Tree | None:
    """The file's content; None when there is no such file. Results are replaced atomically, so never half there."""
    try:
        content: Tree = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


def read_lines(path: Path) -> list[Tree]:
    """The lines of a JSONL file, as far as they are whole: a killed process may leave a half last one."""
    if not path.is_file():
        return []
    lines: list[Tree] = []
    with contextlib.suppress(json.JSONDecodeError), path.open() as stream:
        lines += map(json.loads, stream)
    return lines


def write_json(path: Path, content: Tree) -> None:
    """Atomic: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with partial.open("w") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


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


def read_parameters(run: Path) -> Parameters:
    """The resolved parameters that a run was made with."""
    config = read_json(run / "config.json")
    if config is None:
        trained = sorted(path.parent.name for path in run.parent.glob("*/config.json"))
        known = f"There are: {', '.join(trained)}." if trained else "None has been trained yet."
        raise ConfigMismatch(f"name={run.name}: there is no run in {run}. {known} Train it first, or set name or home.")
    return Parameters.model_validate(config)


def newest_checkpoint(run: Path) -> Path | None:
    """The one that is furthest, its numbers compared as numbers. Whether it is whole is for `dflash` to say."""
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


def is_finished(run: Path, stage: str, fingerprint: str) -> bool:
    """Whether the stage has finished for just this."""
    entry = (read_json(run / LEDGER) or {}).get(stage, {})
    return bool(entry.get("fingerprint") == fingerprint)


def mark_finished(run: Path, stage: str, fingerprint: str) -> None:
    _update(run, stage, fingerprint=fingerprint)


def note_tokens(run: Path, key: str) -> None:
    """Which token cache the run is trained on: `python -m flows clean` keeps it."""
    _update(run, "prepare", key=key)


def seconds_by_stage(run: Path) -> dict[str, float]:
    return {stage: round(entry["seconds"], 2) for stage, entry in (read_json(run / LEDGER) or {}).items()}


@contextlib.contextmanager
def measured(run: Path | None, stage: str) -> Iterator[Callable[[], None]]:
    """Adds the time inside to the stage's seconds. The watcher calls what it gets, so that a hard death loses little.

    None: work that belongs to no run, such as a token cache made on its own; nobody counts it.
    """
    if run is None:
        yield lambda: None
        return
    before = float((read_json(run / LEDGER) or {}).get(stage, {}).get("seconds", 0.0))
    start = last_saved = time.monotonic()

    def tick() -> None:
        nonlocal last_saved
        now = time.monotonic()
        if now - last_saved >= SAVE_EVERY_S:
            last_saved = now
            _update(run, stage, seconds=before + now - start)

    try:
        yield tick
    finally:
        _update(run, stage, seconds=before + time.monotonic() - start)


def _update(run: Path, stage: str, **values: float | str) -> None:
    ledger = read_json(run / LEDGER) or {}
    ledger[stage] = {"seconds": 0.0, **ledger.get(stage, {}), **values}
    write_json(run / LEDGER, ledger)
