"""On which side of the split a row is: drawn by what its conversation begins with, so that its pieces stay together."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from jaxtyping import UInt8, UInt64
from numpy import ndarray

from cache.message import ROLES, SHAPES
from cache.ragged import Spans

USERS = pa.array([name for name, role in ROLES.items() if role == "user"])

SALT = 0x9E3779B97F4A7C15  # of the split: constant, so that a conversation is on one side in every cache
SAMPLES = 16  # ids of a row that came tokenised, by which its side is drawn


def hashes_of_texts(texts: Sequence[str]) -> UInt64[ndarray, "R"]:
    """xxh3 of each conversation's first user text."""
    return np.array([xxhash.xxh3_64_intdigest(text.encode(), SALT) for text in texts], dtype=np.uint64)


def tells_first_text(kind: pa.DataType) -> bool:
    """Whether a column of this type, beside ids, holds prompts as text or conversations as lists of messages."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    return pa.types.is_struct(kind.value_type) and _shape(kind.value_type) is not None


def first_texts(column: pa.Array) -> list[str | None]:
    """First user text of each row, or of what there is the first text; None where there is none."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return list(column.to_pylist())
    shape = _shape(column.type.value_type)
    assert shape is not None
    messages = column.flatten()  # honours slices and null rows
    fields = dict(zip([field.name for field in messages.type], messages.flatten(), strict=True))
    length = np.asarray(column.value_lengths().fill_null(0)).astype(np.int64)
    end = np.cumsum(length)
    start = end - length
    users = np.flatnonzero(np.asarray(pc.is_in(fields[shape[0]], value_set=USERS)))
    found = np.append(users, len(messages))[np.searchsorted(users, start)]
    first = np.where(found < end, found, start)
    return list(fields[shape[1]].take(pa.array(first, mask=length == 0)).to_pylist())


def _shape(message: pa.StructType) -> tuple[str, str] | None:
    """Names of a message's role and text."""
    fields = {field.name: field.type for field in message}
    return next((shape for shape in SHAPES if all(pa.types.is_string(fields.get(n, pa.null())) for n in shape)), None)


def hashes_of_ids(ids: Spans) -> UInt64[ndarray, "R"]:
    """A hash of each row's length and of `SAMPLES` ids spread over it.

    A few ids and not all: hashing every token would cost as much as the conversion. Spread over the row and not its
    front: rows often begin with the same long instruction. Equal rows are on one side, which is what a split is for.
    """
    at = ids.start[:, None] + ids.length[:, None] * np.arange(SAMPLES) // SAMPLES
    odd = np.arange(SAMPLES, dtype=np.uint64) * np.uint64(2 * SALT % 2**64) + np.uint64(SALT)  # another factor a place
    words = (ids.values[at].astype(np.int64).view(np.uint64) + np.uint64(1)) * odd
    hashes = (words ^ (words >> np.uint64(29))).sum(axis=1, dtype=np.uint64)
    return _mix(hashes + ids.length.astype(np.uint64))


def sides(hashes: UInt64[ndarray, "R"], held_out: float) -> UInt8[ndarray, "R"]:
    """0 train, 1 held out."""
    # Compared in 53 bits, where a float is exact: hash < held_out · 2⁶⁴.
    return ((hashes >> np.uint64(11)).astype(np.float64) < held_out * 2.0**53).astype(np.uint8)


def _mix(words: ndarray) -> ndarray:
    """The finaliser of splitmix64, on many words at once."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: ndarray = words ^ (words >> np.uint64(31))
    return mixed
