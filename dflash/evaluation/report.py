"""report.html: one page, no scripts, no network: curves, acceptance by slot and domain, decoded answers."""

from collections.abc import Sequence
from html import escape
from typing import Any

from cache.json_file import read_json, write_text
from dflash.run_directory import RunDirectory
from dflash.training.metrics import coverage_by_length

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 200, 64, 24

# Runs of an answer take these in turn, so that two neighbours never look alike.
_COLOURS = ("#cfe8ff", "#d6f5d0", "#ffe2c4", "#ead9ff", "#fff2b3")

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:1rem;margin:1.5rem 0 .3rem}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#59636e}
.note{color:#59636e;font-size:.9rem}.prompt{color:#59636e;font-size:.9rem;white-space:pre-wrap;margin:.2rem 0}
.answer{white-space:pre-wrap;line-height:1.8;border-left:3px solid #d1d9e0;padding-left:.8rem;margin:.4rem 0}
.run{border-radius:3px;padding:.1rem 0}.own{border-bottom:2px solid #57606a}
"""


def write_report(run: RunDirectory, evaluation: dict[str, Any]) -> None:
    """Write the run's report from its metrics and its evaluation."""
    lines = list(run.metric_lines())
    served = read_json(run.path / "served.json")
    if served is not None and served["checkpoint"] != evaluation["checkpoint"]:
        served = None  # of another drafter
    write_text(run.path / "report.html", render(run.path.name, lines, evaluation, served))


def render(
    name: str, lines: Sequence[dict[str, Any]], evaluation: dict[str, Any], served: dict[str, Any] | None = None
) -> str:
    """The page as text; `served` is what a real server said of the drafter."""
    tau, decode = evaluation["tau"], evaluation["decode"]
    slots_before = evaluation["accepted_by_slot_before"]
    steps, total = [], 0
    for line in lines:
        total += line["steps"]
        steps.append(total)
    parts = [
        f"<h1>Drafter {escape(name)}</h1>",
        _table(
            [
                *([("τ before training", _tau(tau["before"]))] if tau["before"] else []),
                ("τ after training", f"<b>{_tau(tau['after'])}</b> on {_rows(tau)}, teacher-forced"),
                ("τ in decoding", f"{_number(decode['tau'])} over {decode['prompts']} prompts"),
                ("accepted drafts a round", f"{_number(decode['accepted_per_round'])}: τ without the bonus token"),
                ("same text as the target", _lossless(decode)),
                ("speed", _speed(decode)),
                *([] if served is None else [("in a server", _served(served))]),
            ]
        ),
        f'<p class="note">Teacher-forced: {escape(tau["convention"])}.</p>',
        f'<p class="note">Decoding: {escape(decode["convention"])}.</p>',
        *([] if served is None else [f'<p class="note">Served: {escape(served["convention"])}.</p>']),
        "<h2>Acceptance by slot</h2>",
        f'<p class="note">Share of rounds that accepted slot k, on held-out rows.'
        f"{' Grey: before training. Green: after.' if slots_before else ''}</p>",
        _bars(slots_before or [0.0] * len(evaluation["accepted_by_slot"]), evaluation["accepted_by_slot"]),
        "<h2>Acceptance by domain</h2>",
        _domains(evaluation["by_group"], decode["by_group"]),
        "<h2>Decoded answers</h2>",
        '<p class="note">One colour: the tokens of one target pass. Underlined: the target\'s own token; the others '
        "are accepted drafts.</p>",
        *[_answer(sample) for sample in evaluation["samples"]],
        "<h2>Loss by step</h2>",
        _curve(steps, [line["loss"] for line in lines]),
        "<h2>Learning rate by step</h2>",
        _curve(steps, [line["lr"] for line in lines]),
        "<h2>Coverage by length of row</h2>",
        '<p class="note">Share of the supervised tokens that a block predicted, in the mean epoch. '
        "training.anchors sets it.</p>",
        _coverage(coverage_by_length(lines)),
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>\n"])


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{head}</th><td>{cell}</td></tr>" for head, cell in rows) + "</table>"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _tau(value: dict[str, Any]) -> str:
    return f"{_number(value['value'])} ± {_number(value['se'])}"


def _rows(tau: dict[str, Any]) -> str:
    drawn = f" drawn from {tau['rows_held_out']}" if tau["rows"] < tau["rows_held_out"] else ""
    return f"{tau['rows']} held-out rows{drawn}"


def _lossless(decode: dict[str, Any]) -> str:
    if decode["lossless"] is None:
        return f"not comparable at temperature {decode['temperature']}: two draws of one law need not agree"
    same = f"{decode['identical']} of {decode['prompts']} token for token"
    return f"{'yes' if decode['lossless'] else 'NO'}: {same}, {decode['near_ties']} parted at a near tie"


def _speed(decode: dict[str, Any]) -> str:
    alone, helped = decode["plain_tokens_per_s"], decode["speculative_tokens_per_s"]
    return f"{helped:.1f} tokens/s with the drafter, {alone:.1f} without: {decode['speedup']:.2f} ×"


def _served(served: dict[str, Any]) -> str:
    wrong = [case for case, is_right in served["cases"].items() if not is_right]
    return (
        f"{escape(served['server'])}: same text {_lossless(served)}; τ {_number(served['tau'])}, "
        f"{_number(served['tau_ours'])} of ours; {_speed(served)}"
        + (f"; WRONG: {escape(', '.join(wrong))}" if wrong else "")
    )


def _domains(walked: dict[str, Any], decoded: dict[str, Any]) -> str:
    """Teacher-forced and decoded, a line for each domain."""
    lines = ["<tr><th>domain</th><th>τ, teacher-forced</th><th>rows</th><th>τ in decoding</th><th>prompts</th></tr>"]
    for group in sorted(walked.keys() | decoded.keys()):
        rows, prompts = walked.get(group), decoded.get(group)
        cells = [
            escape(group),
            _tau(rows) if rows else "–",
            str(rows["rows"]) if rows else "0",
            _number(prompts["tau"]) if prompts else "–",
            str(prompts["answers"]) if prompts else "0",
        ]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _coverage(shares: dict[int, float]) -> str:
    return _table([(f"up to {longest} tokens", f"{share:.0%}") for longest, share in shares.items()])


def _axes(low: float, high: float, left: str, right: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    return (
        f'<line x1="{_LEFT}" y1="8" x2="{_LEFT}" y2="{bottom}" stroke="#d1d9e0"/>'
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH}" y2="{bottom}" stroke="#d1d9e0"/>'
        f'<text x="{_LEFT - 6}" y="14" text-anchor="end">{high:.3g}</text>'
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{left}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{right}</text>'
    )


def _curve(xs: Sequence[int], values: Sequence[float | None]) -> str:
    points = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
    if len(points) < 2:
        return '<p class="note">Too few lines of metrics for a curve.</p>'
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide, tall = (_WIDTH - _LEFT) / max(1, points[-1][0] - points[0][0]), (_HEIGHT - _BOTTOM - 8) / (high - low or 1.0)
    path = " ".join(f"{_LEFT + (x - points[0][0]) * wide:.1f},{8 + (high - y) * tall:.1f}" for x, y in points)
    axes = _axes(low, high, f"step {points[0][0]}", f"step {points[-1][0]}")
    line = f'<polyline points="{path}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{axes}{line}</svg>'


def _bars(before: Sequence[float], after: Sequence[float]) -> str:
    top = max([0.01, *before, *after])
    wide, tall = (_WIDTH - _LEFT) / max(1, len(after)), (_HEIGHT - _BOTTOM - 8) / top
    bars = []
    for index, pair in enumerate(zip(before, after, strict=True)):
        for offset, value, colour in zip((0.12, 0.5), pair, ("#b6c0ca", "#2da44e"), strict=True):
            x, height = _LEFT + (index + offset) * wide, value * tall
            y, width = _HEIGHT - _BOTTOM - height, 0.36 * wide
            bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')
        middle, label = _LEFT + (index + 0.5) * wide, f"{index + 1}: {pair[1]:.0%}"
        bars.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{_axes(0.0, top, "", "")}{"".join(bars)}</svg>'


def _answer(sample: dict[str, Any]) -> str:
    """A prompt, and its answer with each pass's tokens in one colour."""
    runs = []
    for index, run in enumerate(sample["runs"]):
        tokens = [
            escape(token) if i < run["accepted"] else f'<span class="own">{escape(token)}</span>'
            for i, token in enumerate(run["tokens"])
        ]
        title = (
            f"pass {index}: {len(tokens)} tokens, {run['accepted']} accepted drafts" if index else "the prompt's pass"
        )
        colour = _COLOURS[index % len(_COLOURS)]
        runs.append(f'<span class="run" style="background:{colour}" title="{title}">{"".join(tokens)}</span>')
    count, passes = sum(len(run["tokens"]) for run in sample["runs"]), len(sample["runs"])
    return (
        f"<h3>{escape(sample['group'])}: {count} tokens in {passes} target passes</h3>"
        f'<p class="prompt">{escape(sample["prompt"])}</p><p class="answer">{"".join(runs)}</p>'
    )
