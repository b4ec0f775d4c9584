"""Tables and texts made from results, for the terminal and for Prefect's pages. Pure: results in, rows of text out."""

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cache.disk.manifest import Manifest
from flows.runs.directory import Tree
from flows.show.progress import duration

if TYPE_CHECKING:
    from cache.disk.store import TokenCache

Row = dict[str, object]

_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~&$]")

SAMPLE_ROWS = 3
SAMPLE_TOKENS = 200
CURVE_POINTS = 1000


def tokens_table(manifest: Manifest) -> list[Row]:
    facts: dict[str, object] = {
        "rows": f"{manifest.rows:,}",
        "tokens": f"{manifest.tokens:,}",
        "supervised tokens": f"{manifest.supervised_tokens:,}, {manifest.supervised_tokens / manifest.tokens:.1%}",
        "answers": f"{manifest.answers:,}, {manifest.answers / manifest.rows:.2f} a row",
        "rows read": f"{manifest.source_rows:,}",
        "cut at max_tokens": f"{manifest.truncated:,} rows, {manifest.truncated_tokens:,} tokens",
        **{f"dropped: {reason}": f"{count:,}" for reason, count in manifest.dropped.items()},
        **{f"noted: {what}": f"{count:,}" for what, count in manifest.noted.items()},
        **{f"messages of {what}": f"{count:,}" for what, count in manifest.messages.items()},
        **{
            f"rows over {10 * tenth - 10} % up to {10 * tenth} % supervised": f"{rows:,}"
            for tenth, rows in manifest.supervised_shares
        },
        "dtype of ids": manifest.dtype,
        "vocabulary": f"{manifest.vocabulary:,}" if manifest.vocabulary else "",
        "domains": ", ".join(manifest.group_names),
        "key": manifest.key,
    }
    return [{"what": what, "value": value} for what, value in facts.items()]


def sample_rows(tokens: "TokenCache", tokenizer: Path) -> str:
    """The first rows as text, supervised stretches in bold, as markdown."""
    file = tokenizer / "tokenizer.json"
    if not file.is_file():
        return "The tokenizer has no tokenizer.json, so the rows cannot be shown as text."
    from tokenizers import Tokenizer  # imported here: a cached run does not need it

    decode = Tokenizer.from_file(str(file)).decode
    blocks = []
    for row in range(min(SAMPLE_ROWS, len(tokens.offsets) - 1)):
        start, end = int(tokens.offsets[row]), int(tokens.offsets[row + 1])
        ids = tokens.ids[start : min(end, start + SAMPLE_TOKENS)].tolist()
        mask = tokens.mask[start : min(end, start + SAMPLE_TOKENS)].tolist()
        pieces = [
            _marked(decode(part, skip_special_tokens=False), is_supervised) for is_supervised, part in _runs(ids, mask)
        ]
        blocks.append(f"Row {row}, {end - start} tokens\n\n> {''.join(pieces)}")
    return "\n\n---\n\n".join(blocks)


def _runs(ids: list[int], mask: list[int]) -> list[tuple[bool, list[int]]]:
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != bool(supervised):
            runs.append((bool(supervised), []))
        runs[-1][1].append(token)
    return runs


def _marked(text: str, is_bold: bool) -> str:
    """Text as markdown that shows it as it is; Prefect's pages drop HTML. Bold may not begin or end with a blank."""
    shown = _MARKUP.sub(r"\\\g<0>", text).replace("\n", " ⏎ ")
    core = shown.strip()
    if not (is_bold and core):
        return shown
    start = shown.index(core)
    return f"{shown[:start]}**{core}**{shown[start + len(core) :]}"


def busy_by_stage(trained: Tree) -> dict[str, float]:
    """The share of its time in which each pipeline stage worked, 0 to 1."""
    shares = {}
    for stage, times in trained.get("stages", {}).items():
        total = sum(float(times[kind]) for kind in ("busy", "starved", "blocked"))
        shares[stage] = round(float(times["busy"]) / total, 4) if total > 0 else 0.0
    return shares


def pipeline_table(trained: Tree) -> list[Row]:
    rows: list[Row] = []
    for stage, times in trained.get("stages", {}).items():
        total = sum(float(times[kind]) for kind in ("busy", "starved", "blocked")) or 1.0
        rows.append({"stage": stage, **{k: f"{float(times[k]) / total:.1%}" for k in ("busy", "starved", "blocked")}})
    return rows


def tau_table(evaluation: Tree) -> list[Row]:
    tau = evaluation["tau"]
    rows: list[Row] = [
        {"what": f"τ {when} training", "value": with_error(tau[when])} for when in ("before", "after") if tau[when]
    ]
    rows += [
        {"what": f"τ, domain {name}", "value": f"{with_error(group)}, {group['rows']} rows"}
        for name, group in evaluation["by_group"].items()
    ]
    rows += [
        {"what": f"drafts accepted at slot {slot}", "value": f"{share:.1%}"}
        for slot, share in enumerate(evaluation["accepted_by_slot"], start=1)
    ]
    return rows


def tau_change(before: float | None, after: float | None) -> str:
    """`τ 1.312`, or `τ 1.008 → 1.312` where both were measured."""
    return f"τ {number(after)}" if before is None else f"τ {number(before)} → {number(after)}"


def served_line(served: Tree) -> str:
    """`8 of 8 texts equal, τ 1.188 in llama.cpp, 1.175 of ours`, and what went wrong."""
    near_ties = f" and {served['near_ties']} up to a near tie" if served["near_ties"] else ""
    wrong = [] if served["lossless"] else ["texts"]
    wrong += [case for case, is_right in served["cases"].items() if not is_right]
    return (
        f"{served['identical']} of {served['prompts']} texts equal{near_ties}; τ {number(served['tau'])} in "
        f"{served['server'].split(' (')[0]}, {number(served['tau_ours'])} of ours; "
        f"{served['plain_tokens_per_s']:.1f} tokens/s plain, {served['speculative_tokens_per_s']:.1f} speculative "
        f"({served['speedup']:.2f}×)" + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    )


def served_table(served: Tree) -> list[Row]:
    rows: list[Row] = [{"what": "all", "server": served_line(served), "ours": ""}]
    rows.append({"what": "τ", "server": number(served["tau"]), "ours": number(served["tau_ours"])})
    pairs = zip(served["accepted_by_slot"], served["accepted_by_slot_ours"], strict=True)
    rows += [
        {"what": f"drafts accepted at slot {slot}", "server": f"{there:.1%}", "ours": f"{here:.1%}"}
        for slot, (there, here) in enumerate(pairs, start=1)
    ]
    return rows + [
        {"what": case, "server": "same" if is_same else "NOT the same", "ours": ""}
        for case, is_same in served["cases"].items()
    ]


def with_error(measured: Tree) -> str:
    """A measured value and its standard error; of one row there is none."""
    value, error = measured["value"], measured["se"]
    return number(value) if error is None else f"{number(value)} ± {error:.3f}"


def number(value: float | None) -> str:
    """Three digits behind the point where they count; a dash for what could not be said."""
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def curve_svg(lines: list[Tree], width: int = 640, height: int = 240) -> str:
    """The loss over the steps, as an SVG image; lines are those of metrics.jsonl."""
    losses = thinned([float(line["loss"]) for line in lines if line.get("loss") is not None])
    top, low = max(losses, default=0.0), min(losses, default=0.0)
    scale = (height - 40) / (top - low or 1.0)
    points = " ".join(
        f"{50 + i * (width - 60) / max(1, len(losses) - 1):.1f},{20 + (top - loss) * scale:.1f}"
        for i, loss in enumerate(losses)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="5" y="24">{top:.2f}</text><text x="5" y="{height - 16}">{low:.2f}</text>'
        f'<text x="{width // 2 - 60}" y="{height - 4}">loss, {len(lines)} windows of steps</text>'
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="2"/></svg>'
    )


def thinned(values: list[float]) -> list[float]:
    """At most CURVE_POINTS means of neighbouring values, as many to each as the next, give or take one."""
    count = min(len(values), CURVE_POINTS)
    cuts = [number * len(values) // count for number in range(count + 1)] if count else []
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(cuts)]


def report_markdown(rows: dict[str, str], samples: list[Tree]) -> str:
    """The table that ends a run, and decoded text in which the drafter's accepted tokens are bold."""
    table = "\n".join(f"| {what} | {value.replace('|', '/')} |" for what, value in rows.items())
    decoded = "\n\n".join("> " + "".join(map(_emission, sample["runs"])) for sample in samples[:1])
    return f"| | |\n|---|---|\n{table}\n\n**A decoded sample**, accepted drafts in bold\n\n{decoded}\n"


def _emission(run: Tree) -> str:
    """The tokens of one target pass: accepted drafts in bold, then the target's own."""
    accepted, own = run["tokens"][: run["accepted"]], run["tokens"][run["accepted"] :]
    return (_marked("".join(accepted), True) if accepted else "") + _marked("".join(own), False)


def stage_seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {duration(spent)}" for stage, spent in seconds.items() if spent >= 0.05)
