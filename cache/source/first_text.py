"""What a conversation begins with: its system text and first user text. The split is drawn by them."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from jaxtyping import UInt64
from numpy import ndarray

from cache.source.message_keys import ROLE_AND_TEXT, ROLES

USERS, SYSTEMS = (
    pa.array([name for name, of in ROLES.items() if of == role], pa.large_string()) for role in ("user", "system")
)

SALT = 0x9E3779B97F4A7C15  # of the split: constant, so that a conversation is on one side in every cache


def beginning(system: str | None, user: str) -> str:
    """The text by which a conversation is drawn."""
    return f"{system}\x1e{user}" if system else user


def hashes_of_texts(texts: Sequence[str]) -> UInt64[ndarray, "R"]:
    """xxh3 of each conversation's beginning."""
    return np.array([xxhash.xxh3_64_intdigest(text.encode(), SALT) for text in texts], dtype=np.uint64)


def tells_first_text(kind: pa.DataType) -> bool:
    """Whether a column of this type, beside ids, holds prompts as text or conversations as lists of messages."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return _is_text(kind)
    return pa.types.is_struct(kind.value_type) and _shape(kind.value_type) is not None


def first_texts(column: pa.Array) -> list[str | None]:
    """Beginning of each row: system text where it comes first, and the first user text or the first of all.

    None where there is none.
    """
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return list(column.to_pylist())
    shape = _shape(column.type.value_type)
    assert shape is not None
    messages = column.flatten()  # honours slices and null rows
    fields = dict(zip([field.name for field in messages.type], messages.flatten(), strict=True))
    length = np.asarray(column.value_lengths().fill_null(0)).astype(np.int64)
    end = np.cumsum(length)
    start = end - length
    # string, large_string and string_view are the same to people, and Arrow cannot take from the last.
    roles, texts = (fields[name].cast(pa.large_string()) for name in shape)
    users = np.flatnonzero(np.asarray(pc.is_in(roles, value_set=USERS)))
    found = np.append(users, len(messages))[np.searchsorted(users, start)]
    first = np.where(found < end, found, start)
    told = texts.take(pa.array(first, mask=length == 0)).to_pylist()
    opens = np.asarray(pc.is_in(roles, value_set=SYSTEMS).take(pa.array(start, mask=length == 0)).fill_null(False))
    opens &= first != start
    systems = texts.take(pa.array(start, mask=~opens)).to_pylist()
    return [text if text is None else beginning(system, text) for system, text in zip(systems, told, strict=True)]


def _shape(message: pa.StructType) -> tuple[str, str] | None:
    """Names of a message's role and text."""
    fields = {field.name: field.type for field in message}
    return next((shape for shape in ROLE_AND_TEXT if all(_is_text(fields.get(n, pa.null())) for n in shape)), None)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
