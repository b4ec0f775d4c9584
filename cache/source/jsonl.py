"""Lines of JSON → Arrow record batches.

Token rows are parsed by Arrow, many lines at once, with the schema that the first line shows. Conversations keep
their JSON text: one schema for all lines would fill a key that one line lacks with a null of another line. A block
that Arrow refuses is read again line by line, so that an error names the line, and a line that is only odd is kept.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from cache.errors import BadRow, BadSource
from cache.source.columns import UNREAD, USUAL, Layout
from cache.source.find import COMPRESSED
from cache.source.json_text import decoded, is_missing
from cache.source.message_keys import ROLE_AND_TEXT

BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 22  # text that is parsed at once; a longer line is its own block


MAX_LINE_BYTES = 1 << 26  # of one line: a row of some ten million tokens


@dataclass(frozen=True, slots=True)
class Lines:
    """Neighbouring lines of a file, none of them blank."""

    first: int  # number of the first line, from 0
    count: int
    text: bytes
    position: int  # bytes of the file that were read up to here


def first_objects(path: Path) -> list[dict[str, Any]]:
    """The lines of the first block: they show which columns there are, and which types these have."""
    for lines in read_lines(path, block_bytes=1 << 16):
        return [row for _, row in _objects(lines, path)]
    raise BadSource(f"{path}: no line in it, expected one JSON object a line.")


def first_values(path: Path) -> dict[str, Any]:
    """The keys of these lines, each with the first value that says more than null."""
    found: dict[str, Any] = {}
    for row in first_objects(path):
        for name, value in row.items():
            if found.get(name) in (None, [], "") or is_missing(found[name]):
                found[name] = value
    return found


def read_lines(
    path: Path, block_bytes: int = BLOCK_BYTES, *, start: int = 0, stop: int | None = None, first_line: int = 0
) -> Iterator[Lines]:
    """The file, or its bytes from `start` to `stop`, in blocks of whole lines; blank lines are left out, and end one.

    Where a file is compressed it can only be read from its beginning to its end.
    """
    number, rest = first_line, b""
    with pa.OSFile(str(path)) as file:
        codec = codec_of(path)
        stream = file if codec is None else pa.CompressedInputStream(file, codec)
        left = math.inf if stop is None or codec else stop - start
        if codec is None:
            file.seek(start)
        while True:
            try:
                read = stream.read(int(min(block_bytes, left)))
            except OSError as error:
                if error.errno is not None:  # of the system, not of what the file holds
                    raise
                raise BadSource(
                    f"{path}: cannot be read to its end ({error}): it is damaged or was cut off. Download it again."
                ) from None
            left -= len(read)
            if len(rest) > MAX_LINE_BYTES:
                raise BadSource(
                    f"line {number + 1} of {path}: longer than {MAX_LINE_BYTES >> 20} MiB, expected one row a line. "
                    "Take it out."
                )
            text = rest + read
            if number == 0 and text.startswith(BOM):
                text = text[len(BOM) :]
            end = text.rfind(b"\n") + 1 if read else len(text)
            block, rest = text[:end], text[end:]
            for first, count, part in _without_blanks(block):
                yield Lines(number + first, count, part, file.tell())
            number += block.count(b"\n")
            if not read:
                return


def token_batch(lines: Lines, layout: Layout, schema: pa.Schema, path: Path) -> pa.RecordBatch:
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
    for number, row in _objects(lines, path):
        for name, values in columns.items():
            value = group_of(row, layout, path, number) if name == layout.group else row.get(name)
            values.append(_checked(value, name, schema.field(name).type, path, number))
        if layout.mask is None and (told := next((name for name in USUAL["mask"] if row.get(name) is not None), None)):
            raise BadRow(
                f"line {number + 1} of {path}: a loss mask in {told}, though lines before it have none. Set "
                f"rows.columns.mask={told} and give every line one, or take it out of this one."
            )
    arrays = {
        name: _text_array(values) if name == layout.group else pa.array(values, schema.field(name).type)
        for name, values in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def conversation_batch(lines: Lines, layout: Layout, path: Path) -> pa.RecordBatch:
    """One record batch with what is read of each conversation as JSON text; half a surrogate pair becomes U+FFFD.

    A key that a line lacks is null, whatever other lines have; those that nothing reads are named beside the row.
    """
    rows = []
    others = USUAL["messages"] if layout.messages in USUAL["messages"] else ()
    names = list(dict.fromkeys(name for name in (layout.messages, *others) if name is not None))
    for number, row in _objects(lines, path):
        name = next((name for name in names if name in row), None)
        is_there = row.keys() >= set(layout.pair) if layout.pair else name is not None
        if not is_there:
            raise BadRow(
                f"line {number + 1} of {path}: keys {', '.join(row)}, expected {layout.rows} among them. Repair "
                "the line, or set rows.columns.messages."
            )
        rows.append((number, row, name))
    columns = {}
    for name in layout.names:
        if name == layout.group:
            columns[name] = _text_array([group_of(row, layout, path, number) for number, row, _ in rows])
            continue
        found = [row.get(own if own is not None and name == layout.messages else name) for _, row, own in rows]
        texts = [None if is_missing(value) else json.dumps(value, ensure_ascii=False) for value in found]
        columns[name] = _text_array(texts)
    columns[UNREAD] = _text_array([layout.unread([key for key in row if key != name]) for _, row, name in rows])
    return pa.RecordBatch.from_pydict(columns)


def group_of(row: dict[str, Any], layout: Layout, path: Path, number: int) -> str | None:
    """A line's domain as text."""
    value = next((row[name] for name in layout.groups if not is_missing(row.get(name))), None)
    if isinstance(value, list | dict):
        raise BadRow(
            f"line {number + 1} of {path}, column {layout.group}: {json.dumps(value)[:80]}, expected the domain of a "
            'row as text. Name another in rows.columns.group, or set rows.columns.group="" to read none.'
        )
    return None if value is None else str(value)


def schema_of(row: dict[str, Any], layout: Layout, path: Path) -> pa.Schema:
    """Types of token columns, as the first line shows them: JSON's integers are 64 bits wide."""
    fields = []
    for name in layout.names:
        value = row.get(name)
        if name == layout.group:
            fields.append(pa.field(name, pa.string()))
            continue
        if name != layout.said and value is not None and not isinstance(value, list):
            raise BadSource(f"{path}: column {name} holds {type(value).__name__}, expected lists. Set rows.columns.")
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


def codec_of(path: Path) -> str | None:
    """How the file is compressed; None: it is not."""
    with path.open("rb") as file:
        head = file.read(4)
    return next((codec for magic, codec in COMPRESSED.items() if head.startswith(magic)), None)


def _without_blanks(block: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Runs of lines that are not blank: number of the first, count, text."""
    count = block.count(b"\n") + (not block.endswith(b"\n") and bool(block))
    if b"\n\n" not in block and b"\n " not in block and b"\n\r" not in block and b"\n\t" not in block:
        if block.strip():  # the usual case: no blank line between; the first may still be one
            lead = len(block) - len(block.lstrip(b"\r\n\t "))
            skipped = block[:lead].count(b"\n")
            yield skipped, count - skipped, block[lead:]
        return
    run: list[bytes] = []
    first = 0
    for number, line in enumerate(block.split(b"\n")):
        if line.strip():
            if not run:
                first = number
            run.append(line)
        elif run:
            yield first, len(run), b"\n".join(run) + b"\n"
            run = []
    if run:
        yield first, len(run), b"\n".join(run) + b"\n"


def _objects(lines: Lines, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines.text.removesuffix(b"\n").split(b"\n"), lines.first):
        yield number, _object(line, path, number)


def _checked(value: Any, name: str, kind: pa.DataType, path: Path, number: int) -> Any:
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
        f"line {number + 1} of {path}, column {name}: {json.dumps(value)[:80]}, expected {kind} as in the first line. "
        "Repair the line."
    )


def _texts_of(value: Any, keys: list[str]) -> list[dict[str, str | None]] | None:
    """Messages with what of them is text, as they are only looked at for their first user's."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return None
    return [{key: text if isinstance(text := message.get(key), str) else None for key in keys} for message in value]


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = decoded(line)
    except ValueError as error:
        if number == 0 and line.strip() == b"{":
            raise BadRow(
                f"{path}: JSON over several lines, expected one object a line. For one object after another: jq -c . "
                f"'{path}' > rows.jsonl; for one that holds the rows under a key: jq -c '.[][]' '{path}' > rows.jsonl"
            ) from None
        raise BadRow(f"line {number + 1} of {path}: not JSON ({error}). Repair or remove the line.") from None
    if not isinstance(row, dict):
        raise BadRow(f"line {number + 1} of {path}: a JSON {type(row).__name__}, expected an object. Repair the line.")
    return row


def _text_array(texts: list[str | None]) -> pa.Array:
    """Text for Arrow; half a surrogate pair, which JSON lets through and UTF-8 cannot say, becomes U+FFFD."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        whole = [text and text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        return pa.array(whole, pa.string())
