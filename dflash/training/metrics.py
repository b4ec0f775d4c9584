"""metrics.jsonl: sums over a window of steps, one line when the window ends.

The sums of a window that a checkpoint cuts are part of the checkpoint, so a resumed run writes the same lines.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash.batch import StepReport
from dflash.run_directory import RunDirectory


@dataclass(slots=True)
class Window:
    """Sums over the steps since the last line."""

    steps: int = 0
    skipped: int = 0
    loss_sum: float = 0.0
    weight_sum: float = 0.0
    tokens: int = 0
    padded: int = 0
    slots: int = 0
    padded_slots: int = 0
    correct: list[float] = field(default_factory=list)
    counted: list[float] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)
    supervised: list[float] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Add one step; a skipped one is counted and adds nothing else."""
        self.steps += 1
        self.tokens += report.tokens
        self.padded += report.padded
        self.slots += report.slots
        self.padded_slots += report.padded_slots
        if report.skipped:
            self.skipped += 1
            return
        self.loss_sum += report.loss_sum
        self.weight_sum += report.weight_sum
        self.correct = _sum(self.correct, report.correct_by_slot)
        self.counted = _sum(self.counted, report.counted_by_slot)
        self.covered = _sum(self.covered, report.covered_by_length)
        self.supervised = _sum(self.supervised, report.supervised_by_length)

    @property
    def loss(self) -> float | None:
        """Σ w·CE / Σ w; None when no slot counted."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else None

    def accuracy(self) -> list[float | None]:
        """Share of counted slots whose largest logit was right, slot 1 first."""
        return [c / n if n else None for c, n in zip(self.correct[1:], self.counted[1:], strict=True)]

    @property
    def coverage(self) -> float | None:
        """Share of supervised tokens that some block covered."""
        supervised = sum(self.supervised)
        return sum(self.covered) / supervised if supervised else None

    def coverage_by_length(self) -> list[list[int]]:
        """[longest row of the bin, covered tokens, supervised tokens] of every bin that has any."""
        bins = enumerate(zip(self.covered, self.supervised, strict=True))
        return [[1 << i, int(covered), int(supervised)] for i, (covered, supervised) in bins if supervised]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, exact."""
        return asdict(self)


def write_line(
    run: RunDirectory, window: Window, last: StepReport, seconds: float, facts: dict[str, Any]
) -> dict[str, Any]:
    """Append the window's line, and return it; `last` is its last step, `seconds` those since the line before."""
    line = {
        "epoch": last.epoch,
        "step": last.step,
        "loss": window.loss,
        "loss_sum": window.loss_sum,
        "weight_sum": window.weight_sum,
        "accuracy_by_slot": window.accuracy(),
        "coverage": window.coverage,
        "coverage_by_length": window.coverage_by_length(),
        "lr": last.lr,
        "grad_norm": last.grad_norm if math.isfinite(last.grad_norm) else None,
        "steps": window.steps,
        "skipped": window.skipped,
        "tokens": window.tokens,
        "slots": window.slots,
        "padding": 1 - window.tokens / window.padded if window.padded else None,
        "padding_of_slots": 1 - window.slots / window.padded_slots if window.padded_slots else None,
        "tokens_per_s": window.tokens / seconds if seconds > 0 else None,
        **facts,
    }
    with run.metrics.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    return line


def recent_loss(run: RunDirectory, share: float = 0.1) -> float | None:
    """Σ w·CE / Σ w over the last `share` of the run's lines: less noisy than the last one alone."""
    lines = list(run.metric_lines())
    tail = lines[-max(1, round(len(lines) * share)) :] if lines else []
    weight = sum(line["weight_sum"] for line in tail)
    return sum(line["loss_sum"] for line in tail) / weight if weight else None


def coverage_by_length(lines: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Longest row of a bin → share of the supervised tokens of such rows that some block covered, over all lines."""
    covered: Counter[int] = Counter()
    supervised: Counter[int] = Counter()
    for line in lines:
        for longest, part, whole in line["coverage_by_length"]:
            covered[longest] += part
            supervised[longest] += whole
    return {longest: covered[longest] / supervised[longest] for longest in sorted(supervised)}


def _sum(left: list[float], right: tuple[float, ...]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)
