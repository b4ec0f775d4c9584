"""Any accepted source, opened: which parts it has, what its columns mean, and its rows as chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from cache.columns import Layout, resolve
from cache.config import RowsConfig
from cache.errors import BadSource
from cache.files import DataFile, Part
from cache.jsonl import first_object
from cache.readahead import MappedFile
from cache.reading import Chunk, InMemory, open_arrow, part_chunks, table_chunks

IN_MEMORY = "the table in memory"


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be read: parts of one file each, or with a mapping over several, or a table in memory."""

    parts: tuple[Part, ...]
    table: InMemory | None
    layout: Layout
    num_rows: int | None  # where it is known without reading

    def chunks(self) -> Iterator[Chunk]:
        if self.table is not None:
            yield from table_chunks(self.table, self.layout, IN_MEMORY)
            return
        sizes = [sum(file.path.stat().st_size for file in part.files) for part in self.parts]
        total, before = max(1, sum(sizes)), 0
        for part, size in zip(self.parts, sizes, strict=True):
            for chunk in part_chunks(part, self.layout):
                yield Chunk(chunk.batch, chunk.place, (before + chunk.read * size) / total)
            before += size


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
        return Source((), table, resolve(table.table.column_names, rows, IN_MEMORY), table.num_rows)
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
    single = [one for part in parts for one in ([part] if part.indices else [Part((file,)) for file in part.files])]
    return Source(tuple(single), None, layout, known)


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
            return list(open_arrow(mapped, file).schema.names), None
    except pa.ArrowInvalid as error:
        raise BadSource(f"{file.path}: not a readable {file.format} ({error}). Write or download it again.") from None
