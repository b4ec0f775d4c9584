"""Any accepted source → chunks: small Arrow record batches that know where they came from.

Arrow files are mapped, so a chunk is a view; the kernel is told what will be read next and what is done, so that a
source of any size costs little memory. A row-number mapping (`_indices` of shuffle, select, filter) is composed chunk
by chunk, never flattened to a copy of the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from jaxtyping import Int64
from numpy import ndarray

from cache.columns import Layout, resolve
from cache.config import RowsConfig
from cache.errors import BadSource
from cache.files import DataFile, Part
from cache.jsonl import conversation_batch, first_object, read_lines, schema_of, token_batch
from cache.lists import Place
from cache.readahead import MappedFile

CHUNK_TOKENS = 1 << 21  # tokens of a chunk; a longer row is its own chunk
CHUNK_ROWS = 1 << 14
CONVERSATIONS = 256  # rows of a chunk of conversations
TAKE_BYTES = 1 << 24  # of rows that are put in the order of a mapping at once


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some neighbouring rows of the source."""

    batch: pa.RecordBatch
    place: Place  # of the first row
    read: float  # share of the source that was read with this chunk, 0..1


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be read: parts of files, or a table in memory."""

    parts: tuple[Part, ...]
    table: "InMemory | None"
    layout: Layout
    num_rows: int | None  # where it is known without reading

    def chunks(self) -> Iterator[Chunk]:
        if self.table is not None:
            yield from _composed(self.table, self.layout, "the table in memory")
            return
        sizes = [sum(file.path.stat().st_size for file in part.files) for part in self.parts]
        total, before = max(1, sum(sizes)), 0
        for part, size in zip(self.parts, sizes, strict=True):
            for chunk in _part_chunks(part, self.layout):
                yield Chunk(chunk.batch, chunk.place, (before + chunk.read * size) / total)
            before += size


@dataclass(frozen=True, slots=True)
class InMemory:
    """A table, and the row numbers that select from it."""

    table: pa.Table
    indices: pa.ChunkedArray | None


def in_memory(data: Any) -> InMemory:
    """A `pyarrow.Table`, or a `datasets.Dataset` (known by its attributes: the library is not imported)."""
    if isinstance(data, pa.Table):
        return InMemory(data, None)
    inner = getattr(getattr(data, "data", None), "table", None)
    if isinstance(inner, pa.Table):
        indices = getattr(data, "_indices", None)
        return InMemory(inner, None if indices is None else indices.column(0))
    raise BadSource(f"rows in memory: {type(data).__name__}, expected a pyarrow.Table or a datasets.Dataset.")


def open_source(parts: Sequence[Part], rows: RowsConfig, data: Any = None) -> Source:
    """Resolve the columns, which must be the same in every file."""
    if data is not None:
        table = in_memory(data)
        columns = resolve(table.table.column_names, rows, "the table in memory")
        return Source((), table, columns, len(table.indices) if table.indices is not None else table.table.num_rows)
    layout: Layout | None = None
    first, count = None, 0
    for file in (file for part in parts for file in part.files):
        names, num_rows = _describe(file)
        found = resolve(names, rows, str(file.path))
        if layout is not None and found != layout:
            raise BadSource(
                f"{file.path}: columns {', '.join(found.names)}, but {first} has {', '.join(layout.names)}. Prepare "
                "files with other columns apart."
            )
        layout, first = layout or found, first or file.path
        count = -1 if num_rows is None or count < 0 else count + num_rows
    assert layout is not None
    known = count if count >= 0 and not any(part.indices for part in parts) else None
    return Source(tuple(parts), None, layout, known)


def column_names(parts: Sequence[Part]) -> list[str]:
    """The columns of the first file; `open_source` refuses others that differ in what is read."""
    return _describe(parts[0].files[0])[0]


def _describe(file: DataFile) -> tuple[list[str], int | None]:
    """Column names, and the number of rows where the file tells."""
    try:
        if file.format == "parquet":
            metadata = pa.parquet.read_metadata(file.path)
            return list(metadata.schema.to_arrow_schema().names), int(metadata.num_rows)
        if file.format == "jsonl":
            return list(first_object(file.path)), None
        with MappedFile(file.path) as mapped:
            return list(_reader(mapped, file.format).schema.names), None
    except pa.ArrowInvalid as error:
        raise BadSource(f"{file.path}: not a readable {file.format} ({error}). Write or download it again.") from None


def _part_chunks(part: Part, layout: Layout) -> Iterator[Chunk]:
    if not part.indices:
        sizes = [file.path.stat().st_size for file in part.files]
        total, before = max(1, sum(sizes)), 0
        for file, size in zip(part.files, sizes, strict=True):
            for chunk in _file_chunks(file, layout):
                yield Chunk(chunk.batch, chunk.place, (before + chunk.read * size) / total)
            before += size
        return
    maps = [MappedFile(file.path) for file in (*part.files, *part.indices)]
    formats = [file.format for file in (*part.files, *part.indices)]
    tables = [_reader(mapped, form).read_all() for mapped, form in zip(maps, formats, strict=True)]
    count = len(part.files)
    table = InMemory(pa.concat_tables(tables[:count]), pa.concat_tables(tables[count:]).column(0))
    yield from _composed(table, layout, str(part.files[0].path.parent))


def _file_chunks(file: DataFile, layout: Layout) -> Iterator[Chunk]:
    if file.format == "jsonl":
        yield from _jsonl_chunks(file.path, layout)
    elif file.format == "parquet":
        yield from _parquet_chunks(file.path, layout)
    else:
        yield from _arrow_chunks(file, layout)


def _jsonl_chunks(path: Path, layout: Layout) -> Iterator[Chunk]:
    size = max(1, path.stat().st_size)
    tokens = layout.kind == "tokens"
    schema = schema_of(first_object(path), layout, path) if tokens else None
    for lines in read_lines(path) if tokens else read_lines(path, block_bytes=1 << 19):
        batch = token_batch(lines, layout, schema, path) if tokens else conversation_batch(lines, layout, path)
        for start, part in _cut(batch, layout):
            yield Chunk(part, Place(str(path), lines.first + start, lines=True), min(1.0, lines.position / size))


def _parquet_chunks(path: Path, layout: Layout) -> Iterator[Chunk]:
    with pa.parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20) as file:
        num_rows = max(1, file.metadata.num_rows)
        row_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)) / num_rows
        size = int(min(CHUNK_ROWS, max(1, (1 << 24) / max(1.0, row_bytes))))
        row = 0
        for batch in file.iter_batches(batch_size=size, columns=layout.names, use_threads=False):
            for start, part in _cut(batch, layout):
                yield Chunk(part, Place(str(path), row + start), (row + start + part.num_rows) / num_rows)
            row += batch.num_rows


def _arrow_chunks(file: DataFile, layout: Layout) -> Iterator[Chunk]:
    with MappedFile(file.path) as mapped:
        reader = _reader(mapped, file.format, layout.names)
        row = 0
        for batch in _batches(reader):
            chosen = batch.select(layout.names)
            for start, part in _cut(chosen, layout):
                used = [found for column in part.columns if (found := used_bytes(column)) is not None]
                mapped.will_read(used)
                yield Chunk(part, Place(str(file.path), row + start), mapped.share(used))
                mapped.done(used)
            row += batch.num_rows


def _reader(mapped: MappedFile, form: str, columns: list[str] | None = None) -> Any:
    opened = pa.ipc.open_file if form == "arrow file" else pa.ipc.open_stream
    reader = opened(mapped.buffer)
    if columns is None or len(columns) == len(reader.schema.names):
        return reader
    fields = sorted(reader.schema.get_field_index(name) for name in columns)
    return opened(mapped.buffer, options=pa.ipc.IpcReadOptions(included_fields=fields))


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


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


def _composed(memory: InMemory, layout: Layout, name: str) -> Iterator[Chunk]:
    """Chunks of a table in memory, in the order of its row numbers where it has some."""
    table = memory.table.select(layout.names)
    row, total = 0, max(1, table.num_rows if memory.indices is None else len(memory.indices))
    if memory.indices is None:
        for batch in table.to_batches():
            for start, part in _cut(batch, layout):
                yield Chunk(part, Place(name, row + start), (row + start + part.num_rows) / total)
            row += batch.num_rows
        return
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
    row_bytes = max(1.0, table.nbytes / max(1, table.num_rows))
    step = int(min(CHUNK_ROWS, max(1, TAKE_BYTES / row_bytes)))
    for begin in range(0, len(memory.indices), step):
        numbers = np.asarray(memory.indices.slice(begin, step)).astype(np.int64, copy=False)
        batch = _take(batches, ends, numbers)
        for start, part in _cut(batch, layout):
            yield Chunk(part, Place(name, begin + start), (begin + start + part.num_rows) / total)


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
