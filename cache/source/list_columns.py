"""Arrow list columns → spans of flat numpy arrays, without a copy.

Lengths come from the offsets *and* the validity: a null row may have hidden values between its neighbours, and the
difference of offsets alone would shift every row after it. A slice keeps its array's whole child, so spans start
where the offsets say.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, Shaped, UInt8
from numpy import ndarray

from cache.errors import BadRow, BadSource
from cache.ragged import Spans
from cache.source.place import Place

IGNORED_LABEL = -100


def spans_of_list(column: pa.Array, name: str, place: Place) -> tuple[Spans, Bool[ndarray, "R"]]:
    """Spans of a list column of integers or booleans, and which rows are not null. Refuses a null inside a row."""
    while isinstance(column, pa.ExtensionArray):
        column = column.storage
    valid = np.asarray(column.is_valid())
    if pa.types.is_null(column.type):
        nothing = np.zeros(len(column), dtype=np.int64)
        return Spans(nothing[:0], nothing, nothing), valid
    start, length = _bounds(column, name, place)
    start, length = np.where(valid, start, 0), np.where(valid, length, 0)
    used = np.flatnonzero(length > 0)
    low, high = (int(start[used[0]]), int(start[used[-1]] + length[used[-1]])) if used.size else (0, 0)
    child = column.values.slice(low, high - low)  # what lies outside is another chunk's
    start = start - low
    if child.null_count:
        _refuse_inner_null(child, start, length, name, place)
    return Spans(_numbers(child, name, place), start, length), valid


def equal_lengths(ids: Spans, mask: Spans, both: Bool[ndarray, "R"], names: tuple[str, str], place: Place) -> None:
    """Refuse a mask of other length than its ids."""
    wrong = np.flatnonzero(both & (ids.length != mask.length))
    if wrong.size:
        row = int(wrong[0])
        raise BadRow(
            f"{place(row)}: column {names[1]} has {mask.length[row]} values, expected {ids.length[row]}, as many as "
            f"column {names[0]}. The mask belongs to other ids: repair the source, or set rows.columns.mask."
        )


def mask_of(mask: Spans, name: str, row: Int64[ndarray, "R"], place: Place) -> UInt8[ndarray, "T"]:
    """The spans' mask back to back as uint8 of 0 and 1; refuses other values. `row` numbers the rows from `place`."""
    flat = mask.flat()
    unsigned = flat.view(f"u{flat.dtype.itemsize}")
    if flat.size and int(unsigned.max()) > 1:
        at = int(np.argmax(unsigned > 1))
        where = place(int(row[row_of(mask.length, at)]))
        raise BadRow(
            f"{where}, column {name}: a loss mask value of {flat[at]}, expected 0 or 1. A column of labels with -100 "
            "must have a name that ends in 'labels'."
        )
    return unsigned.astype(np.uint8, copy=False)


def mask_of_labels(
    labels: Spans, ids: Spans, names: tuple[str, str], row: Int64[ndarray, "R"], place: Place
) -> UInt8[ndarray, "T"]:
    """1 where a label is not -100; refuses labels that are not the ids at their own place."""
    flat, tokens = labels.flat(), ids.flat()
    supervised: ndarray = np.not_equal(flat, IGNORED_LABEL)
    wrong = supervised & (flat != tokens)
    if wrong.any():
        at = int(np.argmax(wrong))
        where = place(int(row[row_of(labels.length, at)]))
        raise BadRow(
            f"{where}, column {names[1]}: label {flat[at]} where column {names[0]} has {tokens[at]}, expected the same "
            f"id or {IGNORED_LABEL}. Labels must not be shifted: repair the source."
        )
    mask: ndarray = supervised.view(np.uint8)
    return mask


def row_of(length: Int64[ndarray, "R"], position: int) -> int:
    """The row that holds a position of rows back to back."""
    return int(np.searchsorted(np.cumsum(length), position, side="right"))


def _bounds(column: pa.Array, name: str, place: Place) -> tuple[Int64[ndarray, "R"], Int64[ndarray, "R"]]:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = np.asarray(column.offsets).astype(np.int64, copy=False)
        return offsets[:-1], np.diff(offsets)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        start = (np.arange(len(column), dtype=np.int64) + column.offset) * size
        return start, np.full(len(column), size, dtype=np.int64)
    raise BadSource(
        f"{place.file}: column {name} is {kind}, expected list, large_list or fixed_size_list of integers. "
        "Name the right column in rows.columns, or convert it."
    )


def _refuse_inner_null(child: pa.Array, start: ndarray, length: ndarray, name: str, place: Place) -> None:
    """Nulls hidden under null rows are harmless; one inside a row is not."""
    nulls = np.flatnonzero(np.asarray(child.is_null()))
    used = np.flatnonzero(length > 0)
    if not used.size:
        return
    inside = used[np.maximum(np.searchsorted(start[used], nulls, side="right") - 1, 0)]
    wrong = np.flatnonzero((nulls >= start[inside]) & (nulls < start[inside] + length[inside]))
    if wrong.size:
        row, at = int(inside[wrong[0]]), int(nulls[wrong[0]])
        raise BadRow(
            f"{place(row)}, column {name}: a null at position {at - int(start[row])} of the row, expected an integer. "
            "Repair the row in the source, or make the whole row null to have it dropped."
        )


def _numbers(child: pa.Array, name: str, place: Place) -> Shaped[ndarray, "C"]:
    """The values as numpy sees them in place; bits are unpacked."""
    kind: Any = child.type
    if pa.types.is_integer(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        data = child.buffers()[1]
        if not len(child):
            return np.empty(0, dtype=dtype)
        return np.frombuffer(data, dtype=dtype, count=len(child), offset=child.offset * dtype.itemsize)
    if pa.types.is_null(kind):  # lists that are all empty
        return np.empty(0, dtype=np.int64)
    if pa.types.is_boolean(kind):
        return np.asarray(child.fill_null(False).cast(pa.uint8()))
    raise BadSource(
        f"{place.file}: column {name} holds lists of {kind}, expected integers. Name the right column in rows.columns."
    )
