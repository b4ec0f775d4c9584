"""Pieces of a slice on disk: conversations that are tokens already, before any rule of lengths, as an Arrow stream.

One record batch a piece, with its counts in the batch's metadata. Behind the stream, where its readers do not look,
stands the xxh3 of all of it: a byte that was flipped or cut off is noticed before anything is read (Arrow believes the
sizes that a file gives, and a wrong one ends the process).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from jaxtyping import Int64, UInt64
from numpy import ndarray

from cache.canonical import canonical
from cache.errors import CacheCorrupt
from cache.ragged import Ragged
from cache.source.place import Place

DIGEST_BYTES = 16
SCHEMA = pa.schema(
    [
        ("ids", pa.large_list(pa.field("item", pa.uint32(), nullable=False))),
        ("mask", pa.large_list(pa.field("item", pa.uint8(), nullable=False))),
        *((name, pa.int64()) for name in ("row", "line", "group")),
        ("split_hash", pa.uint64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was counted while the piece was made."""

    source_rows: int  # rows of the source that the piece stands for
    dropped: dict[str, int] = field(default_factory=dict)  # reason → conversations
    noted: dict[str, int] = field(default_factory=dict)
    group_names: list[str] = field(default_factory=list)  # in the order in which they were met, unwanted ones too
    messages: dict[str, int] = field(default_factory=dict)  # `role: what became of it` → messages
    stop_ids: list[int] = field(default_factory=list)  # of the tokenizer
    turn_tokens: dict[str, int] = field(default_factory=dict)  # that the template writes around any answer: text → id


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of neighbouring conversations."""

    tokens: Ragged
    row: Int64[ndarray, "R"]  # which row of the piece's source rows each came from; not decreasing
    line: Int64[ndarray, "R"]  # the same as people count, blank lines and all, from the first of the slice
    group: Int64[ndarray, "R"]  # index into `facts.group_names`
    split_hash: UInt64[ndarray, "R"]
    facts: Facts


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece of a slice, and where it stands in the source."""

    piece: Piece
    first: Place  # the first row of its slice
    read: float  # share of the source that is converted with this piece, 0..1

    @property
    def num_rows(self) -> int:
        return self.piece.facts.source_rows

    def place(self, row: int) -> str:
        """Names one of its rows in an error."""
        return self.first(int(self.piece.line[np.searchsorted(self.piece.row, row)]))


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write them one by one."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
        for piece in pieces:
            _write(stream, piece)
    digest = _digest(pa.memory_map(str(path)).read_buffer())
    with path.open("ab") as file:
        file.write(digest)


def read_pieces(path: Path) -> Iterator[Piece]:
    """The pieces as views of the mapped file; raises `CacheCorrupt` at once where it is not what was written."""
    content = pa.memory_map(str(path)).read_buffer()
    size = content.size - DIGEST_BYTES
    if size < 0 or _digest(content.slice(0, size)) != content.slice(size).to_pybytes():
        raise CacheCorrupt(f"{path}: its {content.size} bytes do not have the checksum that stands behind them.")
    return _batches(pa.ipc.open_stream(content.slice(0, size)))


def _batches(stream: pa.RecordBatchStreamReader) -> Iterator[Piece]:
    while True:
        try:
            batch, metadata = stream.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield _read(batch, json.loads(metadata[b"facts"]))


def _write(stream: pa.RecordBatchStreamWriter, piece: Piece) -> None:
    tokens = piece.tokens
    offsets = pa.array(tokens.offsets)
    values = (tokens.values.astype(np.uint32, copy=False), tokens.mask)
    lists = [
        pa.LargeListArray.from_arrays(offsets, pa.array(part), type=field.type)
        for part, field in zip(values, SCHEMA, strict=False)
    ]
    numbers = [pa.array(part) for part in (piece.row, piece.line, piece.group, piece.split_hash)]
    batch = pa.record_batch([*lists, *numbers], schema=SCHEMA)
    stream.write_batch(batch, {"facts": canonical(asdict(piece.facts))})


def _read(batch: pa.RecordBatch, facts: dict[str, Any]) -> Piece:
    ids, mask = batch.column("ids"), batch.column("mask")
    row, line, group, split_hash = (np.asarray(batch.column(name)) for name in SCHEMA.names[2:])
    tokens = Ragged(np.asarray(ids.values), np.asarray(mask.values), np.asarray(ids.offsets))
    return Piece(tokens, row, line, group, split_hash, Facts(**facts))


def _digest(content: pa.Buffer) -> bytes:
    return xxhash.xxh3_128_digest(memoryview(content))
