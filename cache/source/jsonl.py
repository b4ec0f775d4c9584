"""Lines of JSON → Arrow record batches.

Token rows are parsed by Arrow, many lines at once, with the schema that the first line shows. Conversations keep
their JSON text: one schema for all lines would fill a key that one line lacks with a null of another line. A block
that Arrow refuses is read again line by line, so that an error names the line, and a line that is only odd is kept.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json

from cache.errors import BadRow, BadSource
from cache.source.columns import UNREAD, USUAL, Layout
from cache.source.formats import DataFile
from cache.source.json_text import decoded, is_missing
from cache.source.lines import Lines, place_of, read_rows
from cache.source.message_keys import ROLE_AND_TEXT
from cache.source.place import Place


def first_objects(file: DataFile) -> list[dict[str, Any]]:
    """The rows of the first block: they show which columns there are, and which types these have."""
    place = place_of(file)
    for lines in read_rows(file, block_bytes=1 << 16):
        return [row for _, row in _objects(lines, place)]
    raise BadSource(f"{file.path}: no row in it, expected one JSON object a line, or an array of them.")


def first_values(file: DataFile) -> dict[str, Any]:
    """The keys of these rows, each with the first value that says more than null."""
    found: dict[str, Any] = {}
    for row in first_objects(file):
        for name, value in row.items():
            if found.get(name) in (None, [], "") or is_missing(found[name]):
                found[name] = value
    return found


def token_batch(lines: Lines, layout: Layout, schema: pa.Schema, place: Place) -> pa.RecordBatch:
    """One record batch of the layout's columns, typed by `schema`."""
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = pa.json.read_json(
            pa.BufferReader(lines.text),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(lines.text) + 1),
            parse_options=options,
        )
    except pa.ArrowInvalid:
        table = None
    # Other names of a domain or a mask are only looked for, so any value in them is a matter for the slow way.
    odd = [name for name in schema.names if name not in layout.names]
    if table is not None and table.num_rows == lines.count and all(table[n].null_count == lines.count for n in odd):
        batches = table.combine_chunks().to_batches()
        return batches[0].select(layout.names)
    columns: dict[str, list[Any]] = {name: [] for name in layout.names}
    for number, row in _objects(lines, place):
        for name, values in columns.items():
            value = group_of(row, layout, place, number) if name == layout.group else row.get(name)
            values.append(_checked(value, name, schema.field(name).type, place, number))
        if layout.mask is None and (told := next((name for name in USUAL["mask"] if row.get(name) is not None), None)):
            raise BadRow(
                f"{place(number)}: a loss mask in {told}, though lines before it have none. Set "
                f"rows.columns.mask={told} and give every line one, or take it out of this one."
            )
    arrays = {
        name: _text_array(values) if name == layout.group else pa.array(values, schema.field(name).type)
        for name, values in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def conversation_batch(lines: Lines, layout: Layout, place: Place) -> pa.RecordBatch:
    """One record batch with what is read of each conversation as JSON text; half a surrogate pair becomes U+FFFD.

    A key that a line lacks is null, whatever other lines have; those that nothing reads are named beside the row.
    """
    rows = []
    others = USUAL["messages"] if layout.messages in USUAL["messages"] else ()
    names = list(dict.fromkeys(name for name in (layout.messages, *others) if name is not None))
    for number, row in _objects(lines, place):
        name = next((name for name in names if name in row), None)
        is_there = row.keys() >= set(layout.pair) if layout.pair else name is not None
        if not is_there:
            raise BadRow(
                f"{place(number)}: keys {', '.join(row)}, expected {layout.rows} among them. Repair "
                "the line, or set rows.columns.messages."
            )
        rows.append((number, row, name))
    columns = {}
    for name in layout.names:
        if name == layout.group:
            columns[name] = _text_array([group_of(row, layout, place, number) for number, row, _ in rows])
            continue
        found = [row.get(own if own is not None and name == layout.messages else name) for _, row, own in rows]
        texts = [None if is_missing(value) else json.dumps(value, ensure_ascii=False) for value in found]
        columns[name] = _text_array(texts)
    columns[UNREAD] = _text_array([layout.unread([key for key in row if key != name]) for _, row, name in rows])
    return pa.RecordBatch.from_pydict(columns)


def group_of(row: dict[str, Any], layout: Layout, place: Place, number: int) -> str | None:
    """A line's domain as text."""
    value = next((row[name] for name in layout.groups if not is_missing(row.get(name))), None)
    if isinstance(value, list | dict):
        raise BadRow(
            f"{place(number)}, column {layout.group}: {json.dumps(value)[:80]}, expected the domain of a "
            'row as text. Name another in rows.columns.group, or set rows.columns.group="" to read none.'
        )
    return None if value is None else str(value)


def schema_of(row: dict[str, Any], layout: Layout, place: Place) -> pa.Schema:
    """Types of token columns, as the first line shows them: JSON's integers are 64 bits wide."""
    fields = []
    for name in layout.names:
        value = row.get(name)
        if name == layout.group:
            fields.append(pa.field(name, pa.string()))
            continue
        if name != layout.said and value is not None and not isinstance(value, list):
            raise BadSource(
                f"{place.file}: column {name} holds {type(value).__name__}, expected lists. Set rows.columns."
            )
        kind = pa.list_(pa.int64()) if value is None else type_of(value)
        fields.append(pa.field(name, kind))
    fields += [pa.field(name, pa.string()) for name in layout.groups if name != layout.group]
    fields += [pa.field(name, pa.list_(pa.int64())) for name in USUAL["mask"] if layout.mask is None]
    return pa.schema(fields)


def type_of(value: Any) -> pa.DataType:
    """What a value of the first line says of its column: text, booleans, messages, else integers."""
    if isinstance(value, str):
        return pa.string()
    first = next((item for item in value if item is not None), None) if isinstance(value, list) else None
    if isinstance(first, dict):
        shape = next((shape for shape in ROLE_AND_TEXT if all(isinstance(first.get(key), str) for key in shape)), ())
        return pa.list_(pa.struct([(key, pa.string()) for key in shape]))
    return pa.list_(pa.bool_() if isinstance(first, bool) else pa.int64())


def _objects(lines: Lines, place: Place) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines.text.removesuffix(b"\n").split(b"\n"), lines.first):
        yield number, _object(line, place, number)


def _checked(value: Any, name: str, kind: pa.DataType, place: Place, number: int) -> Any:
    """A value as its column wants it. Arrow itself would cut 2.5 to 2 in silence."""
    if value is None or not pa.types.is_list(kind):
        return value if value is None else str(value)
    if pa.types.is_struct(kind.value_type):
        return _texts_of(value, [field.name for field in kind.value_type])
    wanted = bool if pa.types.is_boolean(kind.value_type) else int
    fits = isinstance(value, list) and all(
        item is None or (type(item) is wanted and -(2**63) <= item < 2**63) for item in value
    )
    if fits:
        return value
    raise BadRow(
        f"{place(number)}, column {name}: {json.dumps(value)[:80]}, expected {kind} as in the first line. "
        "Repair the line."
    )


def _texts_of(value: Any, keys: list[str]) -> list[dict[str, str | None]] | None:
    """Messages with what of them is text, as they are only looked at for their first user's."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return None
    return [{key: text if isinstance(text := message.get(key), str) else None for key in keys} for message in value]


def _object(line: bytes, place: Place, number: int) -> dict[str, Any]:
    try:
        row = decoded(line)
    except ValueError as error:
        raise BadRow(f"{place(number)}: not JSON ({error}). Repair or remove the line.") from None
    if not isinstance(row, dict):
        raise BadRow(f"{place(number)}: a JSON {type(row).__name__}, expected an object. Repair the line.")
    return row


def _text_array(texts: list[str | None]) -> pa.Array:
    """Text for Arrow; half a surrogate pair, which JSON lets through and UTF-8 cannot say, becomes U+FFFD."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        whole = [text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        return pa.array(whole, pa.string())
