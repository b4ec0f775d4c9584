"""Tables and texts made from results, for the terminal and for Prefect's pages. Pure: results in, rows of text out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.manifest import Manifest
from flows.progress import duration
from flows.run import Tree

if TYPE_CHECKING:
    from cache.store import TokenCache

Row = dict[str, object]

SAMPLE_ROWS = 3
SAMPLE_TOKENS = 200


def tokens_table(manifest: Manifest) -> list[Row]:
    facts: dict[str, object] = {
        "rows": f"{manifest.rows:,}",
        "tokens": f"{manifest.tokens:,}",
        "supervised tokens": f"{manifest.supervised_tokens:,}",
        "rows read": f"{manifest.source_rows:,}",
        "truncated": f"{manifest.truncated:,}",
        **{f"dropped: {reason}": f"{count:,}" for reason, count in manifest.dropped.items()},
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
        blocks.append(f"**Row {row}**, {end - start} tokens\n\n<p>{''.join(pieces)}</p>")
    return "\n\n---\n\n".join(blocks)


def _runs(ids: list[int], mask: list[int]) -> list[tuple[bool, list[int]]]:
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != bool(supervised):
            runs.append((bool(supervised), []))
        runs[-1][1].append(token)
    return runs


def _marked(text: str, is_supervised: bool) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    return f"<b>{escaped}</b>" if is_supervised else escaped


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
        {"what": f"τ {when} training", "value": f"{tau[when]['value']:.3f} ± {tau[when]['se']:.3f}"}
        for when in ("before", "after")
    ]
    rows += [{"what": f"τ, domain {name}", "value": _number(value)} for name, value in _groups(evaluation)]
    rows += [
        {"what": f"accepted at slot {slot}", "value": f"{float(share):.1%}"}
        for slot, share in enumerate(evaluation.get("accepted_by_slot", []), start=1)
    ]
    return rows


def _groups(evaluation: Tree) -> list[tuple[str, Any]]:
    return list(evaluation.get("by_group", {}).items())


def _number(value: Any) -> str:
    """A domain's τ, whether it stands alone or among other facts of the domain."""
    if isinstance(value, dict):
        value = value.get("value", value.get("tau", value.get("after")))
    if isinstance(value, dict):
        value = value.get("value")
    return f"{float(value):.3f}" if isinstance(value, int | float) else str(value)


def stage_seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {duration(spent)}" for stage, spent in seconds.items() if spent >= 0.05)
