"""stages.json, the ledger of a run: what its stages took, and what they last finished for.

Of each stage it says how many seconds it has worked, over all runs that touched this directory (a stage that had
nothing to do adds nothing; a killed run adds what it had worked until its last entry, at most 5 s ago), and the
fingerprint of what it last finished for: while that is the same and the results are there, it is not repeated.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cache.disk.removal import LEDGER as LEDGER
from cache.json_file import read_json, write_json
from cache.locks import held

SAVE_EVERY_S = 5.0


def is_finished(run: Path, stage: str, fingerprint: str) -> bool:
    """Whether the stage has finished for just this."""
    entry = (read_json(run / LEDGER) or {}).get(stage, {})
    return bool(entry.get("fingerprint") == fingerprint)


def mark_finished(run: Path, stage: str, fingerprint: str) -> None:
    _update(run, stage, fingerprint=fingerprint)


def note_tokens(run: Path, key: str) -> None:
    """Which token cache the run is trained on: `dflash-train clean` keeps it."""
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
    with held(run / ".stages.lock"):  # a training and an evaluation of one run may write at once
        ledger = read_json(run / LEDGER) or {}
        ledger[stage] = {"seconds": 0.0, **ledger.get(stage, {}), **values}
        write_json(run / LEDGER, ledger)
