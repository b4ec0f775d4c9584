"""What a person wants to know of a token cache, as tables and a row in colour."""

import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cache.disk.manifest import Manifest
from cache.disk.removal import Entry, SliceFile
from cache.disk.store import TokenCache

BAR = 40  # columns of the longest bar of the histogram
MOST_ANSWERS = 12  # lines of the table of answers
SUPERVISED, CONTEXT = "bold green", "dim"


def summary(cache: TokenCache) -> RenderableType:
    """Everything in the manifest that a person asks for."""
    manifest = cache.manifest
    facts = _table()
    facts.add_row("path", str(cache.path))
    facts.add_row("key", cache.key)
    held_out = int(cache.rows(1).size)
    facts.add_row("rows", f"{manifest.rows:,} ({held_out:,} held out) of {manifest.source_rows:,} in the source")
    if manifest.files:
        left_out = f"; {manifest.files_left_out:,} left out" if manifest.files_left_out else ""
        facts.add_row("files", f"{manifest.files:,} read{left_out}")
    facts.add_row("tokens", f"{manifest.tokens:,} as {manifest.dtype}, vocabulary {manifest.vocabulary:,}")
    share = manifest.supervised_tokens / manifest.tokens
    facts.add_row("supervised", f"{manifest.supervised_tokens:,} ({share:.1%}) in {manifest.answers:,} answers")
    mean, longest = manifest.tokens / manifest.rows, int(cache.lengths.max())
    facts.add_row("row length", f"mean {mean:,.0f}, longest {longest:,} tokens")
    cut = f"{manifest.truncated:,} rows, {manifest.truncated_tokens:,} tokens"
    facts.add_row("cut", cut if manifest.truncated else "none")
    facts.add_row("dropped", f"{sum(manifest.dropped.values()):,} ({manifest.dropped_share:.1%})")
    size = sum(array.size_bytes for array in manifest.arrays.values())
    facts.add_row("on disk", size_of(size))
    audit = [_roles(manifest), "", _shares(manifest), "", _answers(manifest), ""] if manifest.messages else []
    reasons = [_reasons(manifest), ""] if manifest.dropped or manifest.noted else []
    return Group(facts, "", *reasons, *audit, _lengths(manifest), "", _groups(cache), "", _key_parts(manifest))


def row(cache: TokenCache, index: int, tokenizer: Path | None) -> RenderableType:
    """One row with its mask: supervised tokens stand out; as text where a tokenizer is given, else as ids."""
    start, stop = cache.offsets[index : index + 2].tolist()
    ids, mask = cache.ids[start:stop], cache.mask[start:stop]
    decode = _decoder(tokenizer)
    text = Text()
    # Runs of equal mask, so that text is not cut inside a character more often than the mask cuts it.
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for low, high in pairwise(edges):
        text.append(decode(ids[low:high].tolist()), style=SUPERVISED if mask[low] else CONTEXT)
    side = "held out" if cache.split[index] else "train"
    name = cache.manifest.group_names[int(cache.group[index])]
    title = f"row {index}: source row {cache.source_row[index]}, {side}, group {name}, {stop - start} tokens; "
    return Group(Text(title).append("supervised", style=SUPERVISED).append(" context", style=CONTEXT), text)


def listing(entries: list[Entry], slices: list[SliceFile], users: dict[str, list[str]]) -> RenderableType:
    """Each cache with its size and, below, what it is of and who uses it; then all slices of conversations."""
    of_slices = sum(one.size_bytes for one in slices)
    told: list[RenderableType] = []
    for entry in entries:
        manifest = entry.manifest
        numbers = f"{manifest.rows:,} rows  {manifest.tokens:,} tokens  " if manifest else ""
        line = Text(f"{entry.path.name}  ", style="bold").append(numbers + size_of(entry.size_bytes), style="not bold")
        about = entry.problem or f"{_day(entry.path)}  {_told(entry, users)}"
        told += [line, Padding(Text(about, overflow="fold", style=CONTEXT), (0, 0, 0, 2))]
    told.append(Text(f"slices  {len(slices):,} of conversations  {size_of(of_slices)}"))
    told.append(Text(f"in all  {size_of(of_slices + sum(entry.size_bytes for entry in entries))}"))
    return Group(*told)


def _told(entry: Entry, users: dict[str, list[str]]) -> str:
    """What a key is, as people named it."""
    assert entry.manifest is not None
    runs = users.get(entry.path.name, [])
    parts = [", ".join(entry.manifest.sources) or "a table in memory"]
    if tokenizer := entry.manifest.tokenizer.get("directory"):
        parts.append(f"tokenizer {_model_of(str(tokenizer))}")
    return "; ".join([*parts, f"used by {', '.join(runs)}" if runs else "no run uses it"])


def _model_of(directory: str) -> str:
    """The name of a hub model that lies in this directory; any other directory is itself."""
    found = re.search(r"models--(.+?)--(.+?)/snapshots/", f"{directory}/")
    return f"{found[1]}/{found[2]}" if found else directory


def _day(cache: Path) -> str:
    """When the manifest was written."""
    file = cache / "zarr.json"
    return datetime.fromtimestamp(file.stat().st_mtime).strftime("%Y-%m-%d %H:%M") if file.is_file() else ""


def size_of(size_bytes: int) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size_bytes >= 10**power:
            return f"{size_bytes / 10**power:.1f} {unit}"
    return f"{size_bytes} bytes"


def _reasons(manifest: Manifest) -> RenderableType:
    """Why rows are not there, and what was changed or not read in those that are; the most frequent first."""
    table = Table(title="dropped and noted", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "", "rows"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for what, counts in (("dropped", manifest.dropped), ("noted", manifest.noted)):
        for reason, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            table.add_row(what, reason, f"{number:,}")
    return table


def _lengths(manifest: Manifest) -> RenderableType:
    table = _table("length histogram")
    _bars(table, [(f"≤ {longest:,}", rows) for longest, rows in manifest.length_histogram])
    return table


def _roles(manifest: Manifest) -> RenderableType:
    """Messages by role: read, then cut off, in dropped conversations, or supervised."""
    fates = ("read", "supervised", "cut", "dropped")
    table = Table(title="messages by role", title_justify="left", box=None, pad_edge=False)
    for heading in ("", *fates):
        table.add_column(heading, justify="right" if heading else "left", style=None if heading else "bold")
    for role in sorted({key.split(": ")[0] for key in manifest.messages}):
        table.add_row(role, *(f"{manifest.messages.get(f'{role}: {fate}', 0):,}" for fate in fates))
    return table


def _shares(manifest: Manifest) -> RenderableType:
    table = _table("rows by supervised share")
    _bars(table, [(f"≤ {10 * tenth} %", rows) for tenth, rows in manifest.supervised_shares])
    return table


def _answers(manifest: Manifest) -> RenderableType:
    """One line for each number of answers; large numbers share the last line."""
    table = _table("rows by answers")
    few, many = manifest.answers_a_row[:MOST_ANSWERS], manifest.answers_a_row[MOST_ANSWERS:]
    rest = [(f"{many[0][0]} or more", sum(rows for _, rows in many))] if many else []
    _bars(table, [*((str(answers), rows) for answers, rows in few), *rest])
    return table


def _bars(table: Table, counts: list[tuple[str, int]]) -> None:
    most = max((rows for _, rows in counts), default=1)
    for label, rows in counts:
        if rows:
            table.add_row(label, f"{'█' * max(1, round(BAR * rows / most))} {rows:,}")


def _groups(cache: TokenCache) -> RenderableType:
    table = _table("groups")
    counts = np.bincount(cache.group, minlength=len(cache.manifest.group_names))
    for name, rows in zip(cache.manifest.group_names, counts.tolist(), strict=True):
        if rows:
            table.add_row(name, f"{rows:,}")
    return table


def _key_parts(manifest: Manifest) -> RenderableType:
    table = _table("what the key is made of")
    for name, part in manifest.key_parts.items():
        table.add_row(name, part)
    return table


def _table(title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _decoder(tokenizer: Path | None) -> Any:
    if tokenizer is None:
        return lambda ids: " ".join(str(i) for i in ids) + " "
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return lambda ids: backend.decode(ids, skip_special_tokens=False)
