"""Chunks of conversations → pieces: rows of other groups are left out, the others go to the tokenizer many at once."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from numpy import ndarray

from cache.config import Columns
from cache.ragged import Ragged, Tokenised, offsets_of
from cache.slices.pieces import Facts, Piece
from cache.source.chunks import CONVERSATIONS, Chunk
from cache.source.columns import Layout
from cache.source.first_text import hashes_of_texts
from cache.source.groups import Groups
from cache.source.place import Place

PIECE_TOKENS = 1 << 22  # a piece is written once it has so many, so that a slice of any size costs little memory

Told = Callable[[int], None]  # of how many more rows of the source are done


@runtime_checkable
class Tokenises(Protocol):
    """What `ChatTokenizer` does; `noted` grows with every batch, `begin` forgets all else of them."""

    stop_ids: tuple[int, ...]
    turn_tokens: dict[str, int]
    noted: Counter[str]

    def begin(self) -> None: ...

    def tokenise(self, batch: pa.RecordBatch | pa.Table, columns: Columns, place: Place) -> Tokenised: ...


@dataclass(frozen=True, slots=True)
class NumberedPlace(Place):
    """Where rows stand that are no neighbours: `numbers` counts each from the first row."""

    numbers: Int64[ndarray, "R"] = field(kw_only=True)

    def __call__(self, row: int) -> str:
        return Place.__call__(self, int(self.numbers[row]))


def pieces_of(
    chunks: Iterable[Chunk],
    first: Place,
    layout: Layout,
    wanted: list[str] | None,
    chat: Tokenises,
    told: Told | None = None,
) -> Iterator[Piece]:
    """All rows of the chunks as pieces, at least one; `first` is where the slice begins, blank lines included.

    `wanted` names groups, None means all.
    """
    chat.begin()
    gathered = _Gathered(first, layout, wanted, chat)
    for chunk in chunks:
        gathered.take(chunk)
        if gathered.num_tokens >= PIECE_TOKENS:
            yield gathered.piece()
        if told is not None:
            told(chunk.num_rows)
    yield gathered.piece()


class _Gathered:
    """Rows on their way into a piece: batches that wait to be tokenised together, and rows that are tokens."""

    def __init__(self, first: Place, layout: Layout, wanted: list[str] | None, chat: Tokenises) -> None:
        self._layout, self._wanted, self._chat = layout, wanted, chat
        self._first = first
        self._begin()

    def _begin(self) -> None:
        self._groups = Groups(self._layout.group)
        self._dropped: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        self._noted = Counter(self._chat.noted)
        self._source_rows = 0
        self._waiting: list[tuple[pa.RecordBatch, ndarray, ndarray, ndarray]] = []
        self._made: list[tuple[Ragged, ndarray, ndarray, ndarray, ndarray]] = []
        self.num_tokens = 0

    def take(self, chunk: Chunk) -> None:
        group = self._groups.of(chunk.batch)
        wanted = self._groups.are_wanted(group, self._wanted)
        self._dropped["other_group"] += int(np.count_nonzero(~wanted))
        inside = np.flatnonzero(wanted)
        if inside.size:
            batch = chunk.batch if wanted.all() else chunk.batch.filter(pa.array(wanted))
            line = inside + (chunk.place.first_row - self._first.first_row)
            self._waiting.append((batch, inside + self._source_rows, line, group[inside]))
        self._source_rows += chunk.num_rows
        if sum(batch.num_rows for batch, *_ in self._waiting) >= CONVERSATIONS:
            self._tokenise()

    def _tokenise(self) -> None:
        if not self._waiting:
            return
        batches, *numbers = zip(*self._waiting, strict=True)
        self._waiting = []
        row, line, group = (np.concatenate(part) for part in numbers)
        first = self._first
        place = NumberedPlace(first.file, first.first_row, first.lines, first.elements, numbers=line)
        made = self._chat.tokenise(pa.Table.from_batches(batches), self._layout.columns(), place)
        self._dropped.update(made.dropped)
        self._messages.update(made.messages)
        hashes = hashes_of_texts(made.split_text or [])
        self._made.append((made.tokens, row[made.row], line[made.row], group[made.row], hashes))
        self.num_tokens += made.tokens.values.size

    def piece(self) -> Piece:
        """What was taken since the last one."""
        self._tokenise()
        tokens = [part[0] for part in self._made]
        row, line, group, split_hash = (
            _joined([part[i] for part in self._made], np.uint64 if i == 4 else np.int64) for i in range(1, 5)
        )
        piece = Piece(
            Ragged(
                _joined([part.values for part in tokens], np.uint32),
                _joined([part.mask for part in tokens], np.uint8),
                offsets_of(_joined([part.lengths for part in tokens], np.int64)),
            ),
            row,
            line,
            group,
            split_hash,
            Facts(
                self._source_rows,
                dict(+self._dropped),
                dict(Counter(self._chat.noted) - self._noted),
                self._groups.names,
                dict(self._messages),
                [int(identity) for identity in self._chat.stop_ids],
                self._chat.turn_tokens,
            ),
        )
        self._begin()
        return piece


def _joined(arrays: list[Any], dtype: Any) -> ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
