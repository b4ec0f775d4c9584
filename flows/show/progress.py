"""How far a stage is, and the one line that shows it: live on a terminal, a plain line now and then elsewhere."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

console = Console(highlight=False)
logger = logging.getLogger("flows.show.progress")

# Between plain lines, which are also the log lines of the UI: a stage of days writes one a minute.
FIRST_LINE_S, LINE_EVERY_S, LINES_APART = 10.0, 60.0, 1.5


@dataclass(frozen=True, slots=True)
class StageProgress:
    """What progress.json of a run directory holds."""

    stage: str
    done: float
    total: float | None
    unit: str
    rate: float
    seconds: float
    eta_s: float | None
    message: str
    share: float | None = None  # of the work that is done, 0 to 1

    @classmethod
    def read(cls, path: Path) -> "StageProgress | None":
        """The newest state; None before the first one. Its writer replaces the file, so it is never half there."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        done = float(raw.get("done") or 0)
        total = None if raw.get("total") is None else float(raw["total"])
        return cls(
            stage=str(raw.get("stage", "")),
            done=done,
            total=total,
            unit=str(raw.get("unit", "")),
            rate=float(raw.get("rate") or 0),
            seconds=float(raw.get("seconds") or 0),
            eta_s=None if raw.get("eta_s") is None else float(raw["eta_s"]),
            message=str(raw.get("message") or ""),
            share=done / total if total else None,
        )

    @property
    def counts(self) -> str:
        """`12/480 steps  2.1/s  3 min left`."""
        total = "" if self.total is None else f"/{self.total:,.0f}"
        rate = f"  {self.rate:,.3g}/s" if 0 < self.rate < 1000 else f"  {self.rate:,.0f}/s" if self.rate else ""
        left = "" if self.eta_s is None else f"  {duration(self.eta_s)} left"
        return f"{self.done:,.0f}{total} {self.unit}{rate}{left}"

    def __str__(self) -> str:
        return f"{self.stage}: {self.counts}" + (f"  {self.message}" if self.message else "")


def duration(seconds: float) -> str:
    """A time a person reads: 3.2 s, 4 min 05 s, 2 h 10 min, 8 d 3 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    if seconds < 86_400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds // 86_400:.0f} d {seconds % 86_400 // 3600:.0f} h"


class ProgressLine:
    """Shows one stage. Where there is a live line, the plain ones go to the log only."""

    def __init__(self, stage: str, live: Progress | None) -> None:
        self._stage = stage
        self._live = live
        self._task: TaskID | None = (
            None if live is None else live.add_task(stage, total=None, counts="starting", message="")
        )
        self._last_line = time.monotonic()
        self._line_every_s = FIRST_LINE_S
        self._last_shown: StageProgress | None = None

    def show(self, progress: StageProgress) -> None:
        if progress == self._last_shown:
            return
        self._last_shown = progress
        if self._live is not None and self._task is not None:
            self._live.update(
                self._task,
                completed=progress.share or 0.0,
                total=None if progress.share is None else 1.0,
                counts=progress.counts,
                message=progress.message,
            )
        now = time.monotonic()
        if now - self._last_line >= self._line_every_s:
            self._last_line = now
            self._line_every_s = min(LINE_EVERY_S, LINES_APART * self._line_every_s)
            logger.info("%s", progress)


@contextmanager
def progress_line(stage: str) -> Iterator[ProgressLine]:
    """The line of one stage, taken away when the stage ends."""
    if not console.is_terminal:
        yield ProgressLine(stage, None)
        return
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}", markup=False),
        TextColumn("{task.fields[message]}", markup=False, style="dim", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as live:
        yield ProgressLine(stage, live)
