"""A live line for a build: rows, rows/s, GB/s and the time left."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cache.build import BuildProgress

STEPS = 1000  # the bar moves by share of the source, whose number of rows may not be known


def describe(progress: BuildProgress) -> str:
    """The numbers of a progress report, as people want to read them."""
    total = "" if progress.total_rows is None else f" of {progress.total_rows:,}"
    seconds = max(progress.seconds, 1e-9)
    speed = f"{progress.rows / seconds:,.0f} rows/s  {progress.bytes / seconds / 1e9:.2f} GB/s"
    return f"{progress.rows:,}{total} rows  {speed}"


@contextlib.contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[BuildProgress], None]]:
    """Show what the yielded callback is told: `with progress_bar() as progress: build(…, progress=progress)`."""
    columns = (TextColumn("token cache"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=STEPS)

        def report(progress: BuildProgress) -> None:
            bar.update(task, completed=progress.share * STEPS, description=describe(progress))

        yield report
