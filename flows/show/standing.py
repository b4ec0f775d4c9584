"""How runs stand, read from their directories: without a server, Prefect or torch, and without taking a lock.

Files are read from their ends, so that a run of a week is read as fast as one of a minute.
"""

import json
import math
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.json_file import read_json
from cache.locks import holders, lock_of
from dflash.run_directory import report_name
from flows.runs.directory import Tree, newest_checkpoint
from flows.show.progress import StageProgress

STAGES = ("target", "prepare", "check", "train", "evaluate", "export", "serve-check")
SILENT_S = 120.0  # a run of another machine that has written nothing for so long is not said to be at work
TAIL_BYTES = 262_144
_RECENT_LINES = 10  # of metrics.jsonl; the loss of one line alone is noisy


@dataclass(frozen=True, slots=True)
class Standing:
    """What a person wants to know of a run first."""

    path: Path
    state: str  # a stage that is at work or "in use", else new, stopped, failed, died, finished
    holder: str | None  # who is at work
    epoch: float
    epochs: int | None
    loss: float | None
    tau: Tree | None  # value and se, newest first of what training and evaluation measured
    seen: float  # the last sign of life, in seconds since 1970

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_at_work(self) -> bool:
        return self.holder is not None


def standings(home: Path) -> list[Standing]:
    """All runs of a home, the one with the newest sign of life first."""
    runs = home / "runs"
    found = [path for path in runs.iterdir() if _is_run(path)] if runs.is_dir() else []
    return sorted(map(standing, found), key=lambda one: one.seen, reverse=True)


def _is_run(path: Path) -> bool:
    """Also one that is only being prepared; not what a dry run or a deletion has left."""
    return path.is_dir() and not path.name.startswith(".") and ".tmp-" not in path.name


def standing(run: Path) -> Standing:
    seen = _seen(run)
    stage, holder = _at_work(run, seen)
    config = read_json(run / "config.json") or {}
    epochs = config.get("training", {}).get("epochs")
    return Standing(
        path=run,
        state=stage or _at_rest(run),
        holder=holder,
        epoch=_epoch(run, epochs),
        epochs=epochs,
        loss=recent_loss(tail(run / "metrics.jsonl")),
        tau=measured_tau(run),
        seen=seen,
    )


def tail(path: Path, size_bytes: int = TAIL_BYTES) -> list[Tree]:
    """The last whole lines of a JSONL file."""
    lines = []
    for line in text_tail(path, size_bytes):
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # half a line: being written, or left by a process that was killed
    return [line for line in lines if isinstance(line, dict)]


def text_tail(path: Path, size_bytes: int = TAIL_BYTES) -> list[str]:
    """The last lines of a text file; the first of them may lack its beginning, and is left out then."""
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        start = max(0, path.stat().st_size - size_bytes)
        stream.seek(start)
        lines = stream.read().decode(errors="replace").splitlines()
    return lines[1:] if start else lines


def recent_loss(lines: list[Tree]) -> float | None:
    """Σ w·CE / Σ w over the last lines of metrics.jsonl."""
    recent = lines[-_RECENT_LINES:]
    weight = sum(float(line.get("weight_sum") or 0) for line in recent)
    return sum(float(line.get("loss_sum") or 0) for line in recent) / weight if weight else None


def measured_tau(run: Path) -> Tree | None:
    """What was measured last, while training or by the evaluation; None: nothing yet."""
    while_training = [event for event in tail(run / "history.jsonl") if event.get("event") == "tau"]
    candidates: list[tuple[float, Tree]] = [(float(event["time"]), event) for event in while_training[-1:]]
    evaluation = read_json(run / "evaluation.json")
    if evaluation is not None:
        candidates.append(((run / "evaluation.json").stat().st_mtime, evaluation["tau"]["after"]))
    said = [one for one in candidates if one[1]["value"] is not None and math.isfinite(one[1]["value"])]
    return max(said, key=lambda one: one[0])[1] if said else None


def warnings(run: Path, count: int = 5) -> list[str]:
    """The last warnings and errors of the stages' logs, oldest first."""
    found = [
        (line[:23], f"{log.stem}: {line}")
        for log in (run / "logs").glob("*.log")
        for line in text_tail(log)
        if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (WARNING|ERROR|CRITICAL) ", line)
    ]
    return [line for _, line in sorted(found)[-count:]]


def errors(run: Path) -> Iterator[tuple[str, str]]:
    """Stages that failed when they were last tried, and what with."""
    for stage in STAGES:
        error = read_json(run / report_name("error", stage))
        if error is not None:
            yield stage, f"{error['type']}: {error['message']}"


def seconds_left(run: Path, stage: str) -> float | None:
    """Of a stage that is at work, as it last said; None: it has not."""
    file = run / report_name("progress", stage)
    progress = StageProgress.read(file)
    if progress is None or progress.eta_s is None:
        return None
    return max(0.0, progress.eta_s - (time.time() - file.stat().st_mtime))


def _at_work(run: Path, seen: float) -> tuple[str | None, str | None]:
    """The stage that is at work and the process that does it; None, None: nobody is."""
    host = socket.gethostname()
    locks = {stage: run / f".{stage}.lock" for stage in STAGES}
    for stage, lock in [("train", run / "lock"), *reversed(locks.items()), ("in use", lock_of(run))]:
        at_work = holders(lock)
        if at_work:
            return stage, f"process {at_work[0]} on {host}"
    said = _read(run / "lock").strip()
    elsewhere = said and not said.endswith(f" on {host}")
    is_open = last_event(run, ("start", "end")).get("event") == "start"
    if elsewhere and is_open and time.time() - seen < SILENT_S:
        return "train", said
    return None, None


def _at_rest(run: Path) -> str:
    trained = read_json(run / "train.json")
    if any(errors(run)):
        return "failed"
    if trained is not None and trained["finished"]:
        return "finished"
    event = last_event(run, ("start", "end")).get("event")
    return "new" if event is None and newest_checkpoint(run) is None else "died" if event == "start" else "stopped"


def last_event(run: Path, names: tuple[str, ...]) -> Tree:
    """The last line of history.jsonl with one of these events; empty: there is none."""
    events = [event for event in tail(run / "history.jsonl") if event.get("event") in names]
    return events[-1] if events else {}


def _epoch(run: Path, epochs: int | None) -> float:
    """Epochs done, with the share of the one that is under way where the training says it."""
    progress = StageProgress.read(run / report_name("progress", "train"))
    if progress is not None and progress.stage == "train" and progress.total and epochs:
        return epochs * progress.done / progress.total
    newest = newest_checkpoint(run)
    return 0.0 if newest is None else float(newest.name.split("-")[1])


def _seen(run: Path) -> float:
    files = [run, run / "metrics.jsonl", run / "history.jsonl", run / "train.json", run / "evaluation.json"]
    files += [run / report_name("progress", stage) for stage in STAGES]
    newest = newest_checkpoint(run)
    files += [newest] if newest is not None else []
    return max(_modified(file) for file in files)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def busy(line: Tree) -> dict[str, float]:
    """The share of its time in which each pipeline stage worked, by the last line of metrics.jsonl."""
    return {name: float(shares["busy"]) for name, shares in line.get("stages", {}).items()}
