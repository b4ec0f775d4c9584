"""Rows for tests, in every shape that Arrow has for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Row = list[int] | None


def list_array(rows: Sequence[Row], kind: str, values: pa.DataType, hidden: int = 0, size: int = 0) -> pa.Array:
    """A list column; null rows hide `hidden` values of their child. `size` is that of fixed_size_list."""
    as_value = bool if values == pa.bool_() else int
    typed = [None if row is None else [as_value(value) for value in row] for row in rows]
    if kind == "fixed_size_list":
        return pa.array(typed, pa.list_(values, size))
    child: list[Any] = []
    offsets = [0]
    for row in typed:
        child += [as_value(7)] * hidden if row is None else row
        offsets.append(len(child))
    validity = pa.array([None if row is None else True for row in typed], pa.bool_()).buffers()[0]
    width, make = (np.int32, pa.list_) if kind == "list" else (np.int64, pa.large_list)
    buffers = [validity, pa.py_buffer(np.array(offsets, dtype=width))]
    return pa.Array.from_buffers(make(values), len(rows), buffers, children=[pa.array(child, values)])


def table(rows: Sequence[Row], masks: Sequence[Row] | None = None, **columns: Any) -> pa.Table:
    """A table of token rows; every token supervised where no masks are given."""
    masks = [row and [1] * len(row) for row in rows] if masks is None else masks
    ids = pa.array(rows, pa.list_(pa.int32()))
    return pa.table({"input_ids": ids, "loss_mask": pa.array(masks, pa.list_(pa.int8())), **columns})


def rows_of(cache: Any) -> list[list[int]]:
    return [cache.ids[a:b].tolist() for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]


def masks_of(cache: Any) -> list[list[int]]:
    return [cache.mask[a:b].tolist() for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]
