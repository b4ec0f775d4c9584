"""Conversations are tokenised in slices, each stored under its own key: what is there is never made again.

A slice is what some neighbouring conversations of one file are as tokens, before any rule of lengths or of the split.
So one more file, another `max_tokens` or a build that was killed costs only what is new. Whoever makes one holds its
lock, so that several builders (processes of one machine, or workers of a cluster on shared storage) share the work.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cache.config import RowsConfig
from cache.errors import BadSource, CacheCorrupt, CacheMismatch
from cache.key.code import PACKAGE, tokenising_code
from cache.key.content import CHAT_FILES, hash_chat_files, hash_recipe, sidecar_of
from cache.key.file_hashes import State, hash_file, states_of
from cache.slices.collect import Tokenises, Told, pieces_of
from cache.slices.cut import Cut, cuts_of_part, cuts_of_table
from cache.slices.pieces import Piece, StoredPiece, read_pieces, write_pieces
from cache.source.chunks import Chunk, InMemory, part_chunks, table_chunks
from cache.source.columns import Layout
from cache.source.find import Part
from cache.source.open import IN_MEMORY, Source
from cache.source.place import Place

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some neighbouring conversations, wherever they are made into tokens."""

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
        return Place(str(part.files[0].path), span.first_line if is_lines else span.start, lines=is_lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """All slices of a source, in order, and what a process needs to make one, wherever it runs."""

    slices: tuple[Slice, ...]
    layout: Layout
    rows: RowsConfig
    tokenizer: Path | None
    directory: Path
    recipe: str  # hash of all that decides the tokens, but for the rows
    code: str  # hash of the modules that make them: a worker that runs others must not
    chat_files: dict[str, str]  # hashes of tokenizer and template, as they are in the recipe

    def path(self, one: Slice) -> Path:
        return self.directory / f"{one.key}.arrow"

    def missing(self) -> list[Slice]:
        """Those that are not there; equal ones once."""
        return [one for one in {one.key: one for one in self.slices}.values() if not self.path(one).exists()]


def plan_slices(source: Source, rows: RowsConfig, tokenizer: Path | None, parts: dict[str, str], home: Path) -> Plan:
    """Cut the source; `parts` are those of its content key."""
    sidecar = sidecar_of(home)
    recipe = hash_recipe(parts, source.layout, rows)

    def named(cuts: Iterable[Cut], states: tuple[State, ...]) -> Iterator[Slice]:
        for cut in cuts:
            yield Slice(xxhash.xxh3_128_hexdigest(f"{recipe}:{cut.content}".encode()), cut, states)

    slices: list[Slice] = []
    if source.table is not None:
        slices += named(cuts_of_table(source.table, source.layout, parts["source"]), ())
    for part in source.parts:
        states = _states(part)  # before its content is hashed: no later change goes by the hash of what was there
        slices += named(cuts_of_part(part, source.layout, lambda path: hash_file(path, sidecar)), states)
    directory = home / "tokens" / ".slices"
    chat_files = {name: parts[name] for name in CHAT_FILES}
    return Plan(tuple(slices), source.layout, rows, tokenizer, directory, recipe, tokenising_code(), chat_files)


class Tokeniser:
    """Makes slices of a plan, one after the other; the tokenizer is loaded when the first one is missing."""

    def __init__(self, plan: Plan, table: InMemory | None = None) -> None:
        self._plan, self._table = plan, table
        self._chat: Tokenises | None = None

    def make_missing(self, slices: Iterable[Slice], told: Told | None = None) -> None:
        """Those that other builders are at come last, when they are likely to be there."""
        left = list(slices)
        for wait in (False, True):
            left = [one for one in left if not self.make(one, wait=wait, told=told)]

    def make(self, one: Slice, *, wait: bool = True, told: Told | None = None) -> bool:
        """Make a slice unless it is there; False only where another builder is at it and this one does not wait."""
        path = self._plan.path(one)
        if path.exists():
            return True
        with _locked(path, wait=wait) as is_mine:
            if is_mine and not path.exists():
                self._make(one, path, told)
        return is_mine

    def pieces(self, one: Slice) -> Iterator[Piece]:
        """The rows of a slice. One that is gone is made, one that is damaged is made again, said aloud."""
        yield from self._opened(one)
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._plan.path(one))  # used: `python -m flows clean` keeps it

    def _opened(self, one: Slice) -> Iterator[Piece]:
        path = self._plan.path(one)
        self.make(one)
        try:
            return read_pieces(path)
        except FileNotFoundError:
            pass  # cleaned away since
        except CacheCorrupt as error:
            logger.warning("A slice of tokenised conversations is damaged and is made again. %s", error)
            path.unlink(missing_ok=True)
        self.make(one)
        return read_pieces(path)

    def _make(self, one: Slice, path: Path, told: Told | None) -> None:
        if self._plan.code != tokenising_code():
            raise CacheMismatch(
                f"the code in {PACKAGE} is not the one that this slice was asked with. Start the Dask "
                "workers again, from the same checkout as the flow."
            )
        if self._chat is None:
            self._chat = load_chat(self._plan)
        for left in path.parent.glob(f"{path.name}.tmp-*"):  # by a builder that was killed: its lock is held here
            left.unlink(missing_ok=True)
        partial = path.with_name(f"{path.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
        try:
            plan = self._plan
            write_pieces(
                partial, pieces_of(self._chunks(one), one.first, plan.layout, plan.rows.groups, self._chat, told)
            )
            if _states(one.cut.part) != one.states:
                raise BadSource(f"{one.first.file}: changed while it was read. Run again once nothing writes to it.")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _chunks(self, one: Slice) -> Iterator[Chunk]:
        if one.cut.part is not None:
            return part_chunks(one.cut.part, self._plan.layout, one.cut.range)
        assert self._table is not None, "a table in memory is not sent to other processes"
        return table_chunks(self._table, self._plan.layout, IN_MEMORY, one.cut.range)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The slices of a plan as a source of rows."""

    plan: Plan
    tokeniser: Tokeniser

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def num_rows(self) -> int | None:
        return num_rows_of(self.plan.slices)

    def chunks(self) -> Iterator[StoredPiece]:
        total, before = max(1, sum(one.cut.size_bytes for one in self.plan.slices)), 0
        for one in self.plan.slices:
            before += one.cut.size_bytes
            for piece in self.tokeniser.pieces(one):
                yield StoredPiece(piece, one.first, before / total)


def num_rows_of(slices: Iterable[Slice]) -> int | None:
    """Of the source; blank lines count. None where only reading would tell."""
    counts = [one.cut.num_rows for one in slices]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def load_chat(plan: Plan) -> Tokenises:
    """The target's tokenizer and template."""
    rows = plan.rows
    if plan.tokenizer is None:
        raise BadSource(f"{rows.source}: holds conversations, but no tokenizer was given. Set target.model.")
    from cache.chat.tokenizer import ChatTokenizer  # pulls torch in, which rows that came tokenised do without

    chat = ChatTokenizer(
        plan.tokenizer,
        template=rows.template,
        template_arguments=rows.template_arguments,
        supervise=rows.supervise,
    )
    found = hash_chat_files(rows, plan.tokenizer)
    changed = [name for name in CHAT_FILES if found[name] != plan.chat_files[name]]
    if changed:
        files = {"tokenizer": plan.tokenizer, "template": rows.template}
        told = ", ".join(f"the {name} {files[name]}" for name in changed)
        raise CacheMismatch(
            f"{told}: changed since the slices were planned, expected the files that their keys are of. Run again once "
            "nothing writes to them; Dask workers need the same files as the flow."
        )
    return chat


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a slice's lock, or be told that another builder does; the kernel lets go of it when a builder dies."""
    locks = path.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / path.stem).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _states(part: Part | None) -> tuple[State, ...]:
    """Size and time of the files: inodes and devices differ between machines that share storage."""
    return tuple(state[:2] for state in states_of([] if part is None else [part]).values())
