"""A range of rows of one file (or mapping, or table) → chunks: small Arrow batches that know where they came from.

Arrow files are mapped, so a chunk is a view; the kernel is told what will be read next and what is done, so that a
source of any size costs little memory. A row-number mapping (`_indices` of shuffle, select, filter) is composed chunk
by chunk, never flattened to a copy of the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from jaxtyping import Int64
from numpy import ndarray

from cache.errors import BadSource
from cache.source.columns import UNREAD, Layout
from cache.source.find import SourceFiles
from cache.source.formats import DataFile
from cache.source.jsonl import conversation_batch, first_values, schema_of, token_batch
from cache.source.lines import BLOCK_BYTES, place_of, read_rows
from cache.source.mapped import MappedFile
from cache.source.place import Place, reading

CHUNK_TOKENS = 1 << 21  # tokens of a chunk; a longer row is its own chunk
CHUNK_ROWS = 1 << 14
TEXT_BYTES = 1 << 19  # of JSON with conversations, read at once
CONVERSATIONS = 256  # rows of a chunk of conversations
TAKE_BYTES = 1 << 24  # of rows that are put in the order of a mapping at once
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
ALL = 1 << 62  # no range ends there


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some neighbouring rows of the source."""

    batch: pa.RecordBatch
    place: Place  # of the first row
    read: float  # share of the range's file that was read with this chunk, 0..1

    @property
    def num_rows(self) -> int:
        return int(self.batch.num_rows)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Neighbouring rows of one part: by row, or by byte where the rows are lines."""

    start: int = 0
    stop: int = ALL
    first_line: int = 0  # number of the line at `start`
    batch: int = 0  # record batch of an Arrow file that holds `start`, so that those before it are not opened,
    batch_row: int = 0  # and its first row


WHOLE = RowRange()


@dataclass(frozen=True, slots=True)
class InMemory:
    """A table, and the row numbers that select from it."""

    table: pa.Table
    indices: pa.ChunkedArray | None

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows) if self.indices is None else len(self.indices)


def present(names: Sequence[str], layout: Layout) -> list[str]:
    """The columns to read of a file that has these."""
    return [name for name in dict.fromkeys((*layout.names, *layout.groups)) if name in names]


class Filled:
    """Batches of one file with all columns of the layout: optional ones that it lacks as nulls."""

    def __init__(self, names: Sequence[str], layout: Layout) -> None:
        self._layout, self._unread = layout, layout.unread(names)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        layout, names = self._layout, batch.schema.names
        columns = {}
        for name in layout.names:
            others = layout.groups if name == layout.group else (name,)
            found = next((other for other in others if other in names), None)
            columns[name] = pa.nulls(batch.num_rows, pa.string()) if found is None else batch.column(found)
        if self._unread is not None:
            columns[UNREAD] = pa.array([self._unread], pa.string()).take(pa.array(np.zeros(batch.num_rows, np.int64)))
        return pa.RecordBatch.from_pydict(columns)


def file_chunks(part: SourceFiles, layout: Layout, span: RowRange = WHOLE) -> Iterator[Chunk]:
    """Chunks of one file, or of several files in the order of a mapping."""
    try:
        yield from _chunks(part, layout, span)
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the system, not of what the file holds
            raise
        names = ", ".join(str(file.path) for file in part.files[:2])
        raise BadSource(
            f"{names}: cannot be read ({error}): damaged, or cut off. Write or download it again."
        ) from error


def _chunks(part: SourceFiles, layout: Layout, span: RowRange) -> Iterator[Chunk]:
    if part.indices:
        yield from table_chunks(composed(part), layout, str(part.files[0].path.parent), span)
        return
    (file,) = part.files
    with reading(file.path):
        if file.format in ("jsonl", "json"):
            yield from _json_chunks(file, layout, span)
        elif file.format == "parquet":
            yield from _parquet_chunks(file.path, layout, span)
        else:
            yield from _arrow_chunks(file, layout, span)


def composed(part: SourceFiles) -> InMemory:
    """Mapped files, and the mapped row numbers that select from them."""
    files = (*part.files, *part.indices)
    tables = [open_arrow(MappedFile(file.path), file).read_all() for file in files]
    count = len(part.files)
    return InMemory(pa.concat_tables(tables[:count]), pa.concat_tables(tables[count:]).column(0))


def open_arrow(mapped: MappedFile, file: DataFile, columns: list[str] | None = None) -> Any:
    """The reader of an Arrow file or stream, of these columns only."""
    opened = pa.ipc.open_file if file.format == "arrow file" else pa.ipc.open_stream
    if file.format == "arrow stream" and mapped.buffer.slice(max(0, mapped.buffer.size - 8)).to_pybytes() != END_MARK:
        raise BadSource(
            f"{file.path}: an Arrow stream without its end mark: it was cut off. Write or download it again."
        )
    reader = opened(mapped.buffer)
    if columns is None or len(columns) == len(reader.schema.names):
        return reader
    fields = sorted(reader.schema.get_field_index(name) for name in columns)
    return opened(mapped.buffer, options=pa.ipc.IpcReadOptions(included_fields=fields))


def arrow_batches(reader: Any, first: int = 0) -> Iterator[pa.RecordBatch]:
    """The record batches from number `first` on."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(index) for index in range(first, reader.num_record_batches))
        return
    for index, batch in enumerate(reader):
        if index >= first:
            yield batch


def table_chunks(memory: InMemory, layout: Layout, name: str, span: RowRange = WHOLE) -> Iterator[Chunk]:
    """Chunks of a table in memory, in the order of its row numbers where it has some."""
    table = memory.table.select(present(memory.table.schema.names, layout))
    filled = Filled(memory.table.schema.names, layout)
    total = max(1, memory.num_rows)
    row, stop = span.start, min(span.stop, memory.num_rows)
    if memory.indices is None:
        for batch in table.slice(row, stop - row).to_batches():
            for start, part in _cut(filled(batch), layout):
                yield Chunk(part, Place(name, row + start), (row + start + part.num_rows) / total)
            row += batch.num_rows
        return
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
    row_bytes = max(1.0, table.nbytes / max(1, table.num_rows))
    step = int(min(CHUNK_ROWS, max(1, TAKE_BYTES / row_bytes)))
    for begin in range(row, stop, step):
        numbers = np.asarray(memory.indices.slice(begin, min(step, stop - begin))).astype(np.int64, copy=False)
        batch = filled(_take(batches, ends, numbers))
        for start, part in _cut(batch, layout):
            yield Chunk(part, Place(name, begin + start), (begin + start + part.num_rows) / total)


def _json_chunks(file: DataFile, layout: Layout, span: RowRange) -> Iterator[Chunk]:
    size = max(1, file.path.stat().st_size)
    tokens = layout.kind == "tokens"
    place = place_of(file)
    schema = schema_of(first_values(file), layout, place) if tokens else None
    block_bytes = BLOCK_BYTES if tokens else TEXT_BYTES
    for lines in read_rows(file, block_bytes, start=span.start, stop=span.stop, first_line=span.first_line):
        batch = token_batch(lines, layout, schema, place) if tokens else conversation_batch(lines, layout, place)
        for start, part in _cut(batch, layout):
            yield Chunk(part, replace(place, first_row=lines.first + start), min(1.0, lines.position / size))


def _parquet_chunks(path: Path, layout: Layout, span: RowRange) -> Iterator[Chunk]:
    with pa.parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20) as file:
        num_rows = max(1, file.metadata.num_rows)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        size = int(min(CHUNK_ROWS, max(1, (1 << 24) * num_rows / max(1, sum(g.total_byte_size for g in groups)))))
        ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        wanted = np.flatnonzero((ends > span.start) & (ends < span.stop + np.diff(ends, prepend=0))).tolist()
        row = int(ends[wanted[0]]) - groups[wanted[0]].num_rows if wanted else 0
        filled, columns = Filled(file.schema_arrow.names, layout), present(file.schema_arrow.names, layout)
        for batch in file.iter_batches(batch_size=size, row_groups=wanted, columns=columns, use_threads=False):
            for start, part in _cut_within(filled(batch), layout, row, span):
                yield Chunk(part, Place(str(path), start), (start + part.num_rows) / num_rows)
            row += batch.num_rows
            if row >= span.stop:
                return


def _arrow_chunks(file: DataFile, layout: Layout, span: RowRange) -> Iterator[Chunk]:
    with MappedFile(file.path) as mapped:
        row = span.batch_row
        names = open_arrow(mapped, file).schema.names
        filled = Filled(names, layout)
        for batch in arrow_batches(open_arrow(mapped, file, present(names, layout)), span.batch):
            for start, part in _cut_within(filled(batch), layout, row, span):
                used = [found for column in part.columns if (found := used_bytes(column)) is not None]
                mapped.will_read(used)
                yield Chunk(part, Place(str(file.path), start), mapped.share(used))
                mapped.done(used)
            row += batch.num_rows
            if row >= span.stop:
                return


def _cut_within(
    batch: pa.RecordBatch, layout: Layout, row: int, span: RowRange
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """As `_cut`, for the rows of the batch that lie in the range; rows are numbered as in the file."""
    low, high = max(span.start - row, 0), min(span.stop - row, batch.num_rows)
    if high > low:
        for start, part in _cut(batch.slice(low, high - low), layout):
            yield row + low + start, part


def _cut(batch: pa.RecordBatch, layout: Layout) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Slices of a batch of at most `CHUNK_TOKENS` tokens (but at least a row), with their first row."""
    if layout.kind == "conversations":
        edges = [*range(0, batch.num_rows, CONVERSATIONS), batch.num_rows]
    else:
        edges = _edges(batch.column(layout.ids))
    for start, stop in pairwise(edges):
        if stop > start:
            yield start, batch.slice(start, stop - start)


def _edges(column: pa.Array) -> list[int]:
    """Rows at which to cut: a loop over chunks, each found by bisection."""
    ends = _ends(column)
    total = int(ends[-1]) if ends.size else 0
    size = -(-total // -(-total // CHUNK_TOKENS)) if total else 1  # equal parts, no small rest
    edges = [0]
    while edges[-1] < ends.size:
        begin = edges[-1]
        before = int(ends[begin - 1]) if begin else 0
        stop = int(np.searchsorted(ends, before + size, side="right"))
        edges.append(min(max(stop, begin + 1), begin + CHUNK_ROWS))
    return edges


def _ends(column: pa.Array) -> Int64[ndarray, "R"]:
    """End of each row in tokens, from the batch's start; a null row may count what it hides."""
    while isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        offsets = np.asarray(column.offsets).astype(np.int64, copy=False)
        return offsets[1:] - offsets[:1]
    size = column.type.list_size if pa.types.is_fixed_size_list(column.type) else 1
    return np.arange(1, len(column) + 1, dtype=np.int64) * size


def used_bytes(column: pa.Array) -> tuple[int, int] | None:
    """Addresses of the values that a slice of a list column uses, where they are plain numbers."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or not len(column):
        return None
    child, offsets = column.values, column.offsets
    if not pa.types.is_integer(child.type) or child.buffers()[1] is None:
        return None
    width = child.type.bit_width // 8
    base = child.buffers()[1].address + child.offset * width
    return base + offsets[0].as_py() * width, base + offsets[len(column)].as_py() * width


def _take(batches: list[pa.RecordBatch], ends: Int64[ndarray, "b"], rows: Int64[ndarray, "n"]) -> pa.RecordBatch:
    """Rows by number, in the order given: one take from each batch that holds some, then one to order them."""
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    holder = np.searchsorted(ends, ascending, side="right")
    cuts = [0, *(np.flatnonzero(np.diff(holder)) + 1).tolist(), rows.size]
    taken = []
    for low, high in pairwise(cuts):
        batch = batches[int(holder[low])]
        first = int(ends[holder[low]]) - batch.num_rows
        taken.append(batch.take(pa.array(ascending[low:high] - first)))
    back = np.empty(rows.size, dtype=np.int64)
    back[order] = np.arange(rows.size)
    table = pa.Table.from_batches(taken).combine_chunks()
    return table.to_batches()[0].take(pa.array(back))
