"""A batch of Arrow columns → each row's conversation and what stands beside it, as the file has them."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cache.chat.message import SchemaError
from cache.config import Columns
from cache.errors import BadRow
from cache.source.columns import INPUT, PAIRS, USUAL
from cache.source.json_text import decoded, is_missing

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, each as text or as messages; from JSON, each as JSON text."""

    prompt: Any
    completion: Any
    more: Any  # what an instruction is about, which follows it
    are_json: bool

    def joined(self, noted: Counter[str]) -> list[Any] | None:
        """As messages; None where one of them is null."""
        prompt, completion, more = (
            json_text(part, noted) if self.are_json and isinstance(part, str) else part
            for part in (self.prompt, self.completion, self.more)
        )
        if not is_missing(more) and more != "":
            if not isinstance(more, str) or not isinstance(prompt, str):
                raise SchemaError(f"{INPUT} of an instruction is a {type(more).__name__}, expected text beside text")
            prompt = f"{prompt}\n\n{more}" if prompt else more
        parts: list[Any] = []
        for role, value in (("user", prompt), ("assistant", completion)):
            if is_missing(value):
                return None
            if not isinstance(value, str | list):
                raise SchemaError(f"a prompt or completion is a {type(value).__name__}, expected text or messages")
            parts += [{"role": role, "content": value}] if isinstance(value, str) else value
        return parts


def raw_rows(
    batch: pa.RecordBatch | pa.Table, columns: Columns, source: str, *, are_json: bool = False
) -> Iterable[Any]:
    """Each row's conversation as the file has it, for `messages_of`. `are_json`: prompts and completions are JSON."""
    names = batch.schema.names
    wanted = (columns.messages,) if columns.messages else USUAL["messages"]
    column = next((name for name in wanted if name in names), None)
    named = (columns.prompt, columns.completion)
    pairs = [named] if all(named) else list(PAIRS)
    if column is not None and (columns.messages or not all(named)):
        return _conversations(batch.column(column))
    for prompt, completion in pairs:
        if prompt in names and completion in names and not columns.messages:
            more = values_of(batch, INPUT) if prompt == "instruction" else None
            both = (_conversations(batch.column(prompt)), _conversations(batch.column(completion)))
            return [Pair(*pair, are_json=are_json) for pair in zip(*both, more or [None] * batch.num_rows, strict=True)]
    raise BadRow(
        f"{source} has the columns {', '.join(names)}; expected conversations in {' or '.join(wanted)}, or prompt and"
        " completion. Name the column in rows.columns.messages."
    )


def values_of(batch: pa.RecordBatch | pa.Table, name: str) -> list[Any] | None:
    """A column that may be missing, as Python values."""
    if name not in batch.schema.names:
        return None
    column = batch.column(name)
    return None if column.null_count == len(column) else _without_nulls(column.to_pylist(), column.type)


def beside(values: list[Any] | None, index: int, *, are_json: bool) -> Any:
    """What a row has in a column beside its conversation; None where it has nothing."""
    value = values[index] if values else None
    if are_json and isinstance(value, str):
        value = decoded(value)
    return None if is_missing(value) else value


def text_of(value: Any, what: str) -> str:
    """Text beside a conversation; none is empty."""
    if value is not None and not isinstance(value, str):
        raise SchemaError(f"{what} is a {type(value).__name__}, expected text")
    return value or ""


def is_unfinished(value: Any) -> bool:
    """Whether `finished` says that a limit cut the last answer: false, 0 or their text. Null is not told."""
    known = _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if known in (None, ""):
        return False
    if known not in (0, 1):  # equal to False and True
        raise SchemaError(f"finished is {value!r}, expected true or false")
    return not known


def json_text(text: str, noted: Counter[str]) -> Any:
    """The value of a conversation's JSON text, with halves of surrogate pairs, which no encoding can hold, replaced."""
    try:
        value = decoded(text)
    except ValueError as error:
        raise SchemaError(f"the conversation is not JSON ({error})") from None
    if _SURROGATE.search(text):
        value, changed = _repaired(value)
        if changed:
            noted["half of a surrogate pair, replaced by U+FFFD"] += 1
    return value


def _conversations(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """A column as Python values; a list of structs goes through its flat fields, which is many times faster."""
    if isinstance(column, pa.ChunkedArray):
        return [row for chunk in column.chunks for row in _conversations(chunk)]
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return list(column.to_pylist())
    flat = column.flatten()  # honours slices and null rows
    names = [field.name for field in kind.value_type]
    fields = [_without_nulls(part.to_pylist(), part.type) for part in flat.flatten()]
    messages = [dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)]
    rows: list[Any] = []
    end = 0
    for length in column.value_lengths().to_pylist():
        start, end = end, end + (length or 0)
        rows.append(None if length is None else messages[start:end])
    return rows


def _without_nulls(values: list[Any], kind: pa.DataType) -> list[Any]:
    """Arrow gives every struct the keys of all others, as nulls: take them out again where structs are nested."""
    return [_dropped_nulls(value) for value in values] if pa.types.is_nested(kind) else values


def _dropped_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dropped_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_dropped_nulls(item) for item in value]
    return value


def _repaired(value: Any) -> tuple[Any, bool]:
    """Halves of surrogate pairs as U+FFFD."""
    if isinstance(value, str):
        good = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return good, good != value
    if isinstance(value, list):
        items = [_repaired(item) for item in value]
        return [item for item, _ in items], any(changed for _, changed in items)
    if isinstance(value, dict):
        pairs = {key: _repaired(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, any(changed for _, changed in pairs.values())
    return value, False
