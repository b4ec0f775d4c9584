"""Where conversations are cut into slices: ranges of neighbouring rows of one file, each named by its content.

Lines are cut at line ends, Parquet at row groups, Arrow files at record batches, tables and mappings anywhere. A slice
of lines is named by its own bytes, so that lines which are added to a file leave the slices before them as they are;
others are named by the file and by the rows in it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import xxhash

from cache.errors import BadSource
from cache.source.chunks import InMemory, RowRange, arrow_batches, composed, open_arrow, present
from cache.source.columns import Layout
from cache.source.find import SourceFiles
from cache.source.formats import DataFile, codec_of
from cache.source.lines import MAX_LINE_BYTES
from cache.source.mapped import MappedFile

SLICE_BYTES = 1 << 24  # of text; a longer line ends with the block of so many that holds its end
SLICE_ROWS = 20_000
MOST_SLICES = 2_000  # about: of a larger source the slices are larger, twice as large or four times
MOST_OF_A_GROUP = 8  # slices of one Parquet row group: each reads the group up to its own last row

HashFile = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a slice begins and ends; it has no name yet."""

    part: SourceFiles | None  # None: of the table in memory
    range: RowRange
    num_rows: int | None  # or lines, blank ones too; None where only reading would tell
    size_bytes: int  # about so much text
    content: str  # equal for equal rows in an equal order


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """The rows that a file stores together: a row group or a record batch."""

    rows: int
    size_bytes: int
    most_slices: int = 1 << 62


@dataclass(frozen=True, slots=True)
class SliceSize:
    """How large slices are at most, unless what is stored together is larger."""

    size_bytes: int
    rows: int

    @classmethod
    def of(cls, source_bytes: int, source_rows: int | None) -> "SliceSize":
        """For a source of this size, its rows known or not.

        It grows in doublings, so that a source that grows seldom changes all its slices.
        """
        times = 1
        while max(source_bytes / SLICE_BYTES, (source_rows or 0) / SLICE_ROWS) > MOST_SLICES * times:
            times *= 2
        return cls(SLICE_BYTES * times, SLICE_ROWS * times)


def cuts_of_files(part: SourceFiles, layout: Layout, hash_file: HashFile, size: SliceSize) -> Iterator[Cut]:
    """The slices of one file or mapping, in order; `hash_file` gives the hash of a file's content."""
    if part.indices:
        content = "|".join(hash_file(file.path) for file in (*part.files, *part.indices))
        yield from cuts_of_table(composed(part), layout, content, size, part)
        return
    (file,) = part.files
    if file.format == "jsonl" and codec_of(file.path) is None:
        yield from _cuts_of_lines(part, file.path, size)
    elif file.format in ("jsonl", "json"):  # what is compressed or no lines can only be read from the beginning
        yield Cut(part, RowRange(), None, file.path.stat().st_size, hash_file(file.path))
    else:
        units = _row_groups(file.path, layout) if file.format == "parquet" else _record_batches(file, layout)
        yield from _cuts_of_units(part, units, hash_file(file.path), size, are_batches=file.format != "parquet")


def cuts_of_table(
    memory: InMemory, layout: Layout, content: str, size: SliceSize, part: SourceFiles | None = None
) -> Iterator[Cut]:
    """The slices of a table in memory, or of a part with a mapping."""
    table = memory.table.select(present(memory.table.schema.names, layout))
    size_bytes = int(table.nbytes / max(1, table.num_rows) * memory.num_rows)
    yield from _cuts_of_units(part, [_StoredRows(memory.num_rows, size_bytes)], content, size, are_batches=False)


def _cuts_of_lines(part: SourceFiles, path: Path, size: SliceSize) -> Iterator[Cut]:
    start = first_line = 0
    with path.open("rb") as file:
        while text := _whole_lines(file, start, size.size_bytes):
            lines = text.count(b"\n")
            if lines > size.rows:
                ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
                text, lines = text[: int(ends[size.rows - 1]) + 1], SLICE_ROWS
            stop = start + len(text)
            rows = lines + (not text.endswith(b"\n"))
            yield Cut(part, RowRange(start, stop, first_line), rows, len(text), xxhash.xxh3_128_hexdigest(text))
            start, first_line = stop, first_line + lines


def _whole_lines(file: BinaryIO, start: int, size_bytes: int) -> bytes:
    """About `size_bytes` from `start` on, up to a line's end; a longer line as a whole. Empty at the file's end."""
    file.seek(start)
    text = b""
    while True:
        read = file.read(size_bytes)
        text += read
        if len(read) < size_bytes:  # the end of the file, which may lack its last line end
            return text
        if end := text.rfind(b"\n") + 1:
            return text[:end]
        if len(text) > MAX_LINE_BYTES:
            raise BadSource(
                f"{file.name}: a line of more than {MAX_LINE_BYTES >> 20} MiB at byte {start}, expected one row a "
                "line. Take it out."
            )


def _row_groups(path: Path, layout: Layout) -> Iterator[_StoredRows]:
    metadata = pa.parquet.read_metadata(path)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        columns = [group.column(i) for i in range(group.num_columns)]
        used = [column for column in columns if column.path_in_schema.split(".")[0] in layout.names]
        yield _StoredRows(group.num_rows, sum(column.total_uncompressed_size for column in used), MOST_OF_A_GROUP)


def _record_batches(file: DataFile, layout: Layout) -> Iterator[_StoredRows]:
    with MappedFile(file.path) as mapped:
        names = present(open_arrow(mapped, file).schema.names, layout)
        for batch in arrow_batches(open_arrow(mapped, file, names)):
            yield _StoredRows(batch.num_rows, batch.select(names).nbytes)


def _cuts_of_units(
    part: SourceFiles | None, units: Iterable[_StoredRows], content: str, most: SliceSize, *, are_batches: bool
) -> Iterator[Cut]:
    """Small units together, large ones cut evenly."""

    def cut(start: int, stop: int, size: int) -> Cut:
        span = RowRange(start, stop, 0, *((first, first_row) if are_batches else (0, 0)))
        return Cut(part, span, stop - start, size, f"{content}:{start}:{stop}")

    row = begin = size = 0  # where the unit, and where the slice that is being filled, begins; bytes in it
    first = first_row = 0  # the unit in which that slice begins, and its first row
    for index, unit in enumerate(units):
        if row > begin and (size + unit.size_bytes > most.size_bytes or row + unit.rows - begin > most.rows):
            yield cut(begin, row, size)
            begin, size = row, 0
        if row == begin:
            first, first_row = index, row
        parts = max(-(-unit.size_bytes // most.size_bytes), -(-unit.rows // most.rows), 1)
        row, size = row + unit.rows, size + unit.size_bytes
        if parts > 1:
            parts = min(parts, unit.most_slices)
            edges = [begin + unit.rows * i // parts for i in range(parts + 1)]
            yield from (cut(low, high, unit.size_bytes // parts) for low, high in pairwise(edges) if high > low)
            begin, size = row, 0
    if row > begin:
        yield cut(begin, row, size)
