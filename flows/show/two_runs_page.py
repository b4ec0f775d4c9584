"""The page of two runs: one HTML file, no scripts, no network; tables, and pictures as SVG."""

from collections.abc import Callable, Sequence
from html import escape

from flows.show.two_runs import Measured, Point, Row, sections

_COLOURS = ("#2563eb", "#d97706")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 260, 60, 20, 14, 34
_MOST_POINTS = 400

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
tr{border-bottom:1px solid #eaeef2}td{overflow-wrap:anywhere}td:first-child{white-space:pre}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#59636e}
.one{color:#2563eb}.other{color:#d97706}.note{color:#59636e;font-size:.9rem}
"""


def page(one: Measured, other: Measured) -> str:
    tables = sections(one, other)
    names = f'<span class="one">{escape(one.name)}</span> and <span class="other">{escape(other.name)}</span>'
    parts = [
        f"<h1>{names}</h1>",
        "<h2>Loss by step</h2>",
        _curves([one.loss, other.loss]),
        *(
            ["<h2>τ on held-out rows while training</h2>", _curves([one.tau, other.tau])]
            if one.tau or other.tau
            else []
        ),
        *(["<h2>τ by domain</h2>", _bars(one, other)] if one.evaluation and other.evaluation else []),
        *(f"<h2>{escape(title)}</h2>{_table(rows, one, other)}" for title, rows in tables.items()),
        '<p class="note">± is the standard error over held-out rows. That of a difference takes the two for '
        "independent, which is too wide where both were measured on the same rows.</p>",
    ]
    title = f"{escape(one.name)} and {escape(other.name)}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join([f'<!doctype html><html lang="en"><head>{head}</head><body>', *parts, "</body></html>\n"])


def _table(rows: Sequence[Row], one: Measured, other: Measured) -> str:
    names = f'<th class="one">{escape(one.name)}</th><th class="other">{escape(other.name)}</th>'
    has_difference = any(row[3] for row in rows)
    head = f"<tr><th></th>{names}{'<th>difference</th>' if has_difference else ''}</tr>"
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in row[: 4 if has_difference else 3]) for row in rows)
    return "<table>" + head + "".join(f"<tr>{row}</tr>" for row in body) + "</table>"


def _curves(both: Sequence[list[Point]]) -> str:
    points = [point for curve in both for point in curve]
    if not points:
        return '<p class="note">Nothing was measured.</p>'
    last = max(when for when, _, _ in points) or 1
    low = min(value - (error or 0) for _, value, error in points)
    high = max(value + (error or 0) for _, value, error in points)

    def x(when: float) -> float:
        return _LEFT + when / last * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / ((high - low) or 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = _axes(low, high, y)
    parts += [f'<text x="{x(share * last):.0f}" y="{_HEIGHT - 12}">{share * last:,.0f}</text>' for share in (0, 0.5)]
    parts.append(f'<text x="{x(last):.0f}" y="{_HEIGHT - 12}" text-anchor="end">{last:,} steps</text>')
    for curve, colour in zip(both, _COLOURS, strict=True):
        kept = _thinned(curve)
        line = " ".join(f"{x(when):.1f},{y(value):.1f}" for when, value, _ in kept)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for when, value, error in kept:
            if error is not None:
                parts.append(_error_bar(x(when), y(value - error), y(value + error), colour))
                parts.append(f'<circle cx="{x(when):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>')
    return _svg(parts)


def _bars(one: Measured, other: Measured) -> str:
    """τ from 1 on, as a pass emits at least that; with its standard error."""
    runs = [{"all": run.evaluation["tau"]["after"], **run.evaluation["by_group"]} for run in (one, other)]
    names = list({**runs[0], **runs[1]})
    tops = [group["value"] + (group["se"] or 0) for run in runs for group in run.values() if group["value"] is not None]
    high: float = max([*tops, 1.05])

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    room = (_WIDTH - _LEFT - _RIGHT) / len(names)
    width = min(34.0, room / 3)
    parts = _axes(1.0, high, y)
    for place, name in enumerate(names):
        middle = _LEFT + room * (place + 0.5)
        parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(name)}</text>')
        for side, (run, colour) in enumerate(zip(runs, _COLOURS, strict=True)):
            group = run.get(name)
            if group is None or group["value"] is None:
                continue
            left, top = middle + (side - 1) * width, y(group["value"])
            size = f'width="{width - 3:.1f}" height="{max(0.0, y(1.0) - top):.1f}"'
            parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}" opacity=".75"/>')
            if group["se"] is not None:
                ends = y(group["value"] - group["se"]), y(group["value"] + group["se"])
                parts.append(_error_bar(left + (width - 3) / 2, *ends, "#1b1f24"))
    return _svg(parts)


def _axes(low: float, high: float, y: Callable[[float], float]) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * (high - low)
        place = f'y1="{y(value):.1f}" y2="{y(value):.1f}"'
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {place} stroke="#eaeef2"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    return parts


def _error_bar(x: float, low: float, high: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="1.5"/>'


def _thinned(points: list[Point]) -> list[Point]:
    """Means of neighbours where there are more points than can be seen."""
    size = -(-len(points) // _MOST_POINTS) if points else 1
    if size == 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value, _ in group) / len(group), group[-1][2]) for group in groups]


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
