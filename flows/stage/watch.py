"""One stage of a run, watched: its time goes to the ledger, its progress to the terminal and to Prefect."""

from collections.abc import Sequence
from pathlib import Path

from dflash.config import GRACE_S
from flows.runs.ledger import measured
from flows.show.artifacts import reporting
from flows.show.progress import StageProgress, progress_line
from flows.show.training import TrainingShown
from flows.stage.process import run_stage


def watch_stage(stage: str, arguments: Sequence[str], run: Path, processes: int = 1, grace_s: float = GRACE_S) -> None:
    """Runs `python -m dflash ARGUMENTS` for a run directory; raises what it failed with."""
    with measured(run, stage) as tick, reporting(run.name, stage) as reporter, progress_line(stage) as line:
        shown = TrainingShown(run, reporter) if stage == "train" else None

        def on_progress(progress: StageProgress) -> None:
            tick()
            line.show(progress)
            reporter.show(progress)
            if shown is not None:
                shown.look()

        try:
            run_stage(stage, arguments, run, on_progress, processes, grace_s)
        finally:
            if shown is not None:
                shown.send()
