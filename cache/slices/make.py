"""Slices that are missing are made, each by one builder, and read back; a damaged one is made again.

Whoever makes one holds its lock, so that several builders (processes of one machine, or workers of a cluster on shared
storage) share the work.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.errors import BadSource, CacheCorrupt, CacheMismatch
from cache.key.behaviour import versions
from cache.key.code import PACKAGE, tokenising_code
from cache.key.content import CHAT_FILES, hash_chat_files, sidecar_of
from cache.locks import beside, held, lock_of
from cache.slices.collect import Tokenises, Told, pieces_of
from cache.slices.pieces import Piece, PlacedPiece, read_pieces, write_pieces
from cache.slices.plan import Slice, SlicePlan, num_rows_of, sizes_and_times
from cache.source.chunks import Chunk, InMemory, file_chunks, table_chunks
from cache.source.columns import Layout
from cache.source.open import IN_MEMORY

logger = logging.getLogger(__name__)


class Tokeniser:
    """Makes slices of a plan, one after the other; the tokenizer is loaded when the first one is missing."""

    def __init__(self, plan: SlicePlan, table: InMemory | None = None) -> None:
        self._plan, self._table = plan, table
        self._chat: Tokenises | None = None

    def make_missing(self, slices: Iterable[Slice], told: Told | None = None) -> None:
        """Make what is missing. Slices that another builder holds come last: by then they are probably there."""
        left = list(slices)
        for wait in (False, True):
            left = [one for one in left if not self.make(one, wait=wait, told=told)]

    def make(self, one: Slice, *, wait: bool = True, told: Told | None = None) -> bool:
        """Make a slice unless it is there; False only where another builder is at it and this one does not wait."""
        path = self._plan.path(one)
        if path.exists():
            return True
        with held(lock_of(path), wait=wait) as is_mine:
            if is_mine and not path.exists():
                self._make(one, path, told)
        return is_mine

    def pieces(self, one: Slice) -> Iterator[Piece]:
        """The rows of a slice. One that is gone is made, one that is damaged is made again, said aloud."""
        yield from self._opened(one)
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._plan.path(one))  # used: `dflash-train clean` keeps it

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
        if self._plan.versions != versions():
            raise CacheMismatch(
                f"{socket.gethostname()} has {_spelled(versions())}, expected {_spelled(self._plan.versions)} as "
                "where the flow runs: other versions make other tokens. Install the same there."
            )
        if self._chat is None:
            self._chat = load_chat(self._plan)
        for left in path.parent.glob(f"{path.name}.tmp-*"):  # by a builder that was killed: its lock is held here
            left.unlink(missing_ok=True)
        partial = beside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            plan = self._plan
            write_pieces(
                partial, pieces_of(self._chunks(one), one.first, plan.layout, plan.rows.groups, self._chat, told)
            )
            if sizes_and_times(one.cut.part) != one.states:
                raise BadSource(f"{one.first.file}: changed while it was read. Run again once nothing writes to it.")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _chunks(self, one: Slice) -> Iterator[Chunk]:
        if one.cut.part is not None:
            return file_chunks(one.cut.part, self._plan.layout, one.cut.range)
        assert self._table is not None, "a table in memory is not sent to other processes"
        return table_chunks(self._table, self._plan.layout, IN_MEMORY, one.cut.range)


def _spelled(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


@dataclass(frozen=True, slots=True)
class Assembly:
    """The slices of a plan as a source of rows."""

    plan: SlicePlan
    tokeniser: Tokeniser

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def num_rows(self) -> int | None:
        return num_rows_of(self.plan.slices)

    def chunks(self) -> Iterator[PlacedPiece]:
        total, before = max(1, sum(one.cut.size_bytes for one in self.plan.slices)), 0
        for one in self.plan.slices:
            before += one.cut.size_bytes
            for piece in self.tokeniser.pieces(one):
                yield PlacedPiece(piece, one.first, before / total)


def load_chat(plan: SlicePlan) -> Tokenises:
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
        trust_remote_code=plan.trust_remote_code,
    )
    found = hash_chat_files(rows, plan.tokenizer, sidecar_of(plan.directory.parent.parent))
    changed = [name for name in CHAT_FILES if found[name] != plan.chat_files[name]]
    if changed:
        files = {"tokenizer": plan.tokenizer, "template": rows.template}
        told = ", ".join(f"the {name} {files[name]}" for name in changed)
        raise CacheMismatch(
            f"{told}: changed since the slices were planned, expected the files that their keys are of. Run again once "
            "nothing writes to them; Dask workers need the same files as the flow."
        )
    return chat
