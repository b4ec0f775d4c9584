"""Conversations are tokenised in slices, each under its own key: how a source is cut, and which of them are there.

A slice is what some neighbouring conversations of one file are as tokens, before any rule of lengths or of the split.
So one more file, another `max_tokens` or a build that was killed costs only what is new.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cache.config import RowsConfig
from cache.key.behaviour import versions
from cache.key.code import tokenising_code
from cache.key.content import CHAT_FILES, hash_recipe, sidecar_of
from cache.key.file_hashes import State, hash_file, states_of
from cache.slices.cut import Cut, SliceSize, cuts_of_files, cuts_of_table
from cache.source.columns import Layout
from cache.source.find import SourceFiles
from cache.source.open import IN_MEMORY, Source
from cache.source.place import Place, reading


@dataclass(frozen=True, slots=True)
class Slice:
    """Some neighbouring conversations that are tokenised together, in any process."""

    key: str
    cut: Cut
    states: tuple[State, ...]  # size and time of the files when they were cut

    @property
    def first(self) -> Place:
        """Where its first row stands."""
        part, span = self.cut.part, self.cut.range
        if part is None:
            return Place(IN_MEMORY, span.start)
        if part.indices:
            return Place(str(part.files[0].path.parent), span.start)
        is_lines = part.files[0].format == "jsonl"
        first_row = span.first_line if is_lines else span.start
        return Place(str(part.files[0].path), first_row, lines=is_lines, elements=part.files[0].format == "json")


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """All slices of a source, in order, and what a process needs to make one, wherever it runs."""

    slices: tuple[Slice, ...]
    layout: Layout
    rows: RowsConfig
    tokenizer: Path | None
    directory: Path
    recipe: str  # hash of all that decides the tokens, but for the rows
    code: str  # hash of the modules that make them: a worker that runs others must not
    chat_files: dict[str, str]  # hashes of tokenizer and template, as they are in the recipe
    versions: dict[str, str]  # of the libraries that tokenise: a worker with others would make other tokens
    trust_remote_code: bool

    def path(self, one: Slice) -> Path:
        return self.directory / one.key[:2] / f"{one.key}.arrow"

    def missing(self) -> list[Slice]:
        """The slices that have no file yet; slices of equal content once."""
        return [one for one in {one.key: one for one in self.slices}.values() if not self.path(one).exists()]


def plan_slices(
    source: Source,
    rows: RowsConfig,
    tokenizer: Path | None,
    parts: dict[str, str],
    home: Path,
    *,
    trust_remote_code: bool = False,
) -> SlicePlan:
    """Cut the source; `parts` are those of its content key."""
    sidecar = sidecar_of(home)
    recipe = hash_recipe(parts, source.layout, rows)

    def named(cuts: Iterable[Cut], states: tuple[State, ...]) -> Iterator[Slice]:
        for cut in cuts:
            yield Slice(xxhash.xxh3_128_hexdigest(f"{recipe}:{cut.content}".encode()), cut, states)

    slices: list[Slice] = []
    if source.table is not None:
        whole = SliceSize.of(int(source.table.table.nbytes), source.num_rows)
        slices += named(cuts_of_table(source.table, source.layout, parts["source"], whole), ())
    # Before any content is hashed: no later change goes by the hash of what was there.
    states_of_parts = [sizes_and_times(part) for part in source.parts]
    size = SliceSize.of(sum(size_bytes for states in states_of_parts for size_bytes, *_ in states), source.num_rows)
    for part, states in zip(source.parts, states_of_parts, strict=True):
        with reading(part.files[0].path):
            slices += named(cuts_of_files(part, source.layout, lambda path: hash_file(path, sidecar), size), states)
    directory = home / "tokens" / ".slices"
    chat_files = {name: parts[name] for name in CHAT_FILES}
    return SlicePlan(
        tuple(slices),
        source.layout,
        rows,
        tokenizer,
        directory,
        recipe,
        tokenising_code(),
        chat_files,
        versions(),
        trust_remote_code,
    )


def num_rows_of(slices: Iterable[Slice]) -> int | None:
    """Number of rows of these slices in the source, blank lines included; None where only reading would tell."""
    counts = [one.cut.num_rows for one in slices]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def sizes_and_times(part: SourceFiles | None) -> tuple[State, ...]:
    """Size and time of the files: inodes and devices differ between machines that share storage."""
    return tuple(state[:2] for state in states_of([] if part is None else [part]).values())
