"""Two runs side by side: settings that differ, results, τ with its error, by domain. Pure but for reading the runs."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.json_file import read_json
from flows.runs.directory import Tree, read_lines
from flows.runs.ledger import LEDGER, seconds_by_stage
from flows.show.progress import duration
from flows.show.standing import recent_loss
from flows.show.tables import number, with_error

_PLACES = ("name", "home", "export.path")  # where a run lies says nothing of what it is
_NOTHING = "–"

Point = tuple[int, float, float | None]  # steps, value, standard error


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run's directory says of it."""

    name: str
    settings: dict[str, Any]
    loss: list[Point]
    tau: list[Point]  # measured while training
    lines: list[Tree]
    trained: Tree
    evaluation: Tree
    seconds: dict[str, float]

    @classmethod
    def read(cls, run: Path) -> "Measured":
        lines, steps = read_lines(run / "metrics.jsonl"), 0
        loss: list[Point] = []
        for line in lines:
            steps += line["steps"]
            if line["loss"] is not None:
                loss.append((steps, float(line["loss"]), None))
        history = read_lines(run / "history.jsonl")
        tau = [(int(one["steps"]), one["value"], one["se"]) for one in history if one["event"] == "tau"]
        settings = _flat(read_json(run / "config.json") or {})
        settings["rows, by content"] = ((read_json(run / LEDGER) or {}).get("prepare") or {}).get("key")
        starts = [one for one in history if one["event"] == "start"]
        settings |= {
            "code, by commit": starts[-1].get("commit") if starts else None,
            **{f"version of {name}": one for name, one in (starts[-1].get("versions", {}) if starts else {}).items()},
        }
        return cls(
            name=run.name,
            settings=settings,
            loss=loss,
            tau=[(when, value, se) for when, value, se in tau if math.isfinite(value)],
            lines=lines,
            trained=read_json(run / "train.json") or {},
            evaluation=read_json(run / "evaluation.json") or {},
            seconds=seconds_by_stage(run),
        )


Row = tuple[str, str, str, str]  # what, of the one, of the other, the difference


def sections(one: Measured, other: Measured) -> dict[str, list[Row]]:
    """All tables, by their titles; those with nothing to say are left out."""
    found = {
        "Settings that differ": _settings(one, other),
        "Results": _results(one, other),
        "τ": _taus(one, other),
        "Loss on the way": _on_the_way(one, other),
    }
    return {title: rows for title, rows in found.items() if rows}


def _settings(one: Measured, other: Measured) -> list[Row]:
    names = [name for name in {**one.settings, **other.settings} if name not in _PLACES]
    pairs = [(name, one.settings.get(name), other.settings.get(name)) for name in names]
    return [(name, _spelled(a), _spelled(b), "") for name, a, b in pairs if a != b]


def _results(one: Measured, other: Measured) -> list[Row]:
    def both(what: str, *values: str) -> Row:
        return (what, values[0], values[1], "")

    runs = (one, other)
    rows = [
        both("steps", *(f"{run.loss[-1][0]:,}" if run.loss else _NOTHING for run in runs)),
        both("epochs", *(f"{run.trained['epochs_done']}" if run.trained else _NOTHING for run in runs)),
        _difference("loss", *({"value": recent_loss(run.lines), "se": None} for run in runs)),
        both("tokens/s", *(number(run.lines[-1].get("tokens_per_s")) if run.lines else _NOTHING for run in runs)),
    ]
    stages = [stage for stage in {**one.seconds, **other.seconds} if stage in ("prepare", "train", "evaluate")]
    return rows + [
        both(f"time of {stage}", *(duration(run.seconds[stage]) if stage in run.seconds else _NOTHING for run in runs))
        for stage in stages
    ]


def _taus(one: Measured, other: Measured) -> list[Row]:
    values = [_tau_by_what(run.evaluation) for run in (one, other)]
    missing = {"value": None, "se": None}
    return [_difference(what, *(value.get(what, missing) for value in values)) for what in {**values[0], **values[1]}]


def _tau_by_what(evaluation: Tree) -> dict[str, Tree]:
    if not evaluation:
        return {}
    taus: dict[str, Tree] = {"held out, teacher-forced": evaluation["tau"]["after"]}
    taus |= {f"  domain {name}": group for name, group in evaluation["by_group"].items()}
    decode = evaluation["decode"]
    taus["decoding"] = {"value": decode["tau"], "se": None}
    groups = decode.get("by_group", {})
    return taus | {f"  prompts of {name}": {"value": group["tau"], "se": None} for name, group in groups.items()}


def _difference(what: str, one: Tree, other: Tree) -> Row:
    """With the standard error of a difference of two that know nothing of each other, where both have one."""
    values, errors = (one["value"], other["value"]), (one["se"], other["se"])
    said = ""
    if values[0] is not None and values[1] is not None:
        said = f"{values[1] - values[0]:+.3f}"
        if errors[0] is not None and errors[1] is not None:
            said += f" ± {math.hypot(*errors):.3f}"
    return (what, with_error(one), with_error(other), said)


def _on_the_way(one: Measured, other: Measured) -> list[Row]:
    """The loss after tenths of the longer run's steps."""
    end = max((run.loss[-1][0] for run in (one, other) if run.loss), default=0)
    rows = []
    for tenth in range(1, 11):
        steps = round(end * tenth / 10)
        values = [{"value": _at(run.loss, steps), "se": None} for run in (one, other)]
        if any(one["value"] is not None for one in values):
            rows.append(_difference(f"step {steps:,}", *values))
    return rows


def _at(points: list[Point], steps: int) -> float | None:
    """The last value until then; None behind a run's end."""
    before = [value for when, value, _ in points if when <= steps]
    return before[-1] if before and steps <= points[-1][0] else None


def _flat(tree: Tree, before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) and value else {f"{before}{name}": value}
    return flat


def _spelled(value: object) -> str:
    return _NOTHING if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
