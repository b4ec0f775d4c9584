"""Any accepted source, opened: which parts it has, what its columns mean, and its rows as chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from cache.config import RowsConfig
from cache.errors import BadSource
from cache.source.chunks import Chunk, InMemory, file_chunks, open_arrow, table_chunks
from cache.source.columns import Layout, common, resolve
from cache.source.find import SourceFiles
from cache.source.first_text import tells_first_text
from cache.source.formats import DataFile
from cache.source.jsonl import first_values, type_of
from cache.source.mapped import MappedFile
from cache.source.place import reading

IN_MEMORY = "the table in memory"


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be read: parts of one file each, or with a mapping over several, or a table in memory."""

    parts: tuple[SourceFiles, ...]
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
            for chunk in file_chunks(part, self.layout):
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


def open_source(parts: Sequence[SourceFiles], rows: RowsConfig, data: Any = None) -> Source:
    """Resolve the columns: those that make a row must be the same in every file, any other may be missing in some."""
    if data is not None:
        table = in_memory(data)
        layout = _resolved(table.table.schema, rows, IN_MEMORY)
        return Source((), table, layout, table.num_rows)
    found: list[tuple[str, Layout]] = []
    count = 0
    for file in (file for part in parts for file in part.files):
        with reading(file.path):
            schema, num_rows = _describe(file)
        found.append(
            (str(file.path), _resolved(schema, rows, str(file.path), are_lines=file.format in ("jsonl", "json")))
        )
        count = -1 if num_rows is None or count < 0 else count + num_rows
    layout = common(found)
    known = count if count >= 0 and not any(part.indices for part in parts) else None
    single = [
        one for part in parts for one in ([part] if part.indices else [SourceFiles((file,)) for file in part.files])
    ]
    return Source(tuple(single), None, layout, known)


def column_names(parts: Sequence[SourceFiles]) -> list[str]:
    """The columns of the first file; `open_source` refuses others that differ in what is read."""
    return list(_describe(parts[0].files[0])[0].names)


def _resolved(schema: pa.Schema, rows: RowsConfig, file: str, *, are_lines: bool = False) -> Layout:
    layout = resolve(schema.names, rows, file, are_lines=are_lines)
    is_told = layout.said is not None and tells_first_text(schema.field(layout.said).type)
    return layout if is_told else replace(layout, said=None)


def _describe(file: DataFile) -> tuple[pa.Schema, int | None]:
    """Columns, and the number of rows where the file tells. Of lines, the types that the first ones show."""
    try:
        if file.format == "parquet":
            metadata = pa.parquet.read_metadata(file.path)
            return metadata.schema.to_arrow_schema(), int(metadata.num_rows)
        if file.format in ("jsonl", "json"):
            return pa.schema([(name, type_of(value)) for name, value in first_values(file).items()]), None
        with MappedFile(file.path) as mapped:
            return open_arrow(mapped, file).schema, None
    except pa.ArrowInvalid as error:
        raise BadSource(f"{file.path}: not a readable {file.format} ({error}). Write or download it again.") from None
