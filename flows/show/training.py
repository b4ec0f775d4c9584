"""What people see of a training while it runs: curve, τ, stages and speed, from what lies in its run directory.

Sent at checkpoints and at the end, also of a run that failed or was cancelled.
"""

from pathlib import Path

from flows.runs.directory import Tree, newest_checkpoint, read_lines
from flows.show.artifacts import Reporter
from flows.show.tables import Row, curve_svg, number, pipeline_table, with_error

NEWEST_TAUS = 20


class TrainingShown:
    """Called whenever the stage is looked at; sends when there is a checkpoint that it has not seen."""

    def __init__(self, run: Path, reporter: Reporter) -> None:
        self._run, self._reporter = run, reporter
        self._seen = newest_checkpoint(run)

    def look(self) -> None:
        newest = newest_checkpoint(self._run)
        if newest != self._seen:
            self._seen = newest
            self.send()

    def send(self) -> None:
        """Of what is there."""
        run, reporter = self._run, self._reporter
        lines = read_lines(run / "metrics.jsonl")
        taus = [line for line in read_lines(run / "history.jsonl") if line["event"] == "tau"]
        if lines:
            reporter.image("loss", lambda: curve_svg(lines), f"loss of {run.name}")
            reporter.table("pipeline", lambda: pipeline_table(lines[-1]), str(lines[-1]["bottleneck"]))
            reporter.table("training", lambda: training_table(lines[-1], newest_checkpoint(run)), "where it stands")
        if taus:
            reporter.table("tau-while-training", lambda: taus_table(taus), "τ on a few held-out rows, newest first")


def training_table(line: Tree, checkpoint: Path | None) -> list[Row]:
    """The newest line of metrics.jsonl."""
    memory = {gpu: f"{taken / 1e9:.1f} GB" for gpu, taken in line.get("gpu_memory_bytes", {}).items()}
    facts = {
        "position": f"epoch {line['epoch']}, step {line['step'] + 1}",
        "newest checkpoint": "–" if checkpoint is None else checkpoint.name,
        "loss": number(line["loss"]),
        "learning rate": f"{line['lr']:.2e}",
        "tokens/s": number(line["tokens_per_s"]),
        "padding": _share(line["padding"]),
        "coverage of supervised tokens": _share(line["coverage"]),
        **{f"peak memory of {gpu}": taken for gpu, taken in memory.items()},
    }
    return [{"what": what, "value": value} for what, value in facts.items()]


def taus_table(taus: list[Tree]) -> list[Row]:
    """The newest measurements; the best of all is marked."""
    best = max(taus, key=lambda line: float(line["value"]))
    return [
        {"checkpoint": line["checkpoint"], "τ": with_error(line), "": "best so far" if line is best else ""}
        for line in reversed(taus[-NEWEST_TAUS:])
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
