"""Pure operations on ragged rows, against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.ragged import Spans, has_anchor, last_runs, num_runs, offsets_of, spans_of, windows

rows_of_bits = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=8)


def spans(rows: list[list[int]], gap: int = 0) -> Spans:
    """Rows as spans with `gap` ones between them, which no operation may look at."""
    values, start = [], []
    for row in rows:
        start.append(len(values))
        values += row + [1] * gap
    return Spans(
        np.array(values, dtype=np.uint8),
        np.array(start, dtype=np.int64),
        np.array([len(row) for row in rows], dtype=np.int64),
    )


def runs(row: list[int]) -> int:
    return sum(bit and not before for before, bit in zip([0, *row], row, strict=False))


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ([2**30] * 3, [0, 1073741824, 2147483648, 3221225472]),
        ([2**31 + 5, 1], [0, 2**31 + 5, 2**31 + 6]),
    ],
)
def test_offsets_are_64_bits_wide(lengths: list[int], ends: list[int]) -> None:
    assert offsets_of(np.array(lengths)).tolist() == ends


def test_byte_positions_do_not_overflow() -> None:
    offsets = offsets_of(np.full(3, 2**29))
    assert (offsets * 4).tolist()[:3] == [0, 2147483648, 4294967296]


@given(rows_of_bits, st.integers(0, 2))
def test_flat_leaves_gaps_out(rows: list[list[int]], gap: int) -> None:
    assert spans(rows, gap).flat().tolist() == [bit for row in rows for bit in row]


def test_flat_is_a_view_where_there_is_no_gap() -> None:
    whole = spans([[1, 0], [], [0, 1, 1]])
    assert np.shares_memory(whole.flat(), whole.values)
    assert not np.shares_memory(spans([[1, 0], [1]], gap=1).flat(), whole.values)


@given(rows_of_bits, st.integers(0, 2))
def test_anchor_needs_two_supervised_neighbours_in_one_row(rows: list[list[int]], gap: int) -> None:
    expected = [any(a and b for a, b in pairwise(row)) for row in rows]
    assert has_anchor(spans(rows, gap)).tolist() == expected


@given(rows_of_bits, st.integers(0, 2))
def test_runs_are_counted_row_by_row(rows: list[list[int]], gap: int) -> None:
    assert num_runs(spans(rows, gap)) == sum(runs(row) for row in rows)


@given(rows_of_bits, st.integers(0, 2))
def test_last_run_of_each_row(rows: list[list[int]], gap: int) -> None:
    expected = []
    for row in rows:
        stop = next((i for i in range(len(row), 0, -1) if row[i - 1]), 0)
        start = stop
        while start and row[start - 1]:
            start -= 1
        expected += [0] * start + row[start:stop] + [0] * (len(row) - stop)
    assert last_runs(spans(rows, gap)).flat().tolist() == expected


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 7))
def test_windows_cover_every_token_once(lengths: list[int], size: int) -> None:
    row, inside, length = windows(np.array(lengths, dtype=np.int64), size)
    found = list(zip(row.tolist(), inside.tolist(), length.tolist(), strict=True))
    expected = [
        (index, start, min(size, total - start))
        for index, total in enumerate(lengths)
        for start in range(0, max(total, 1), size)
    ]
    assert found == expected


def test_spans_of_offsets() -> None:
    made = spans_of(np.arange(5), np.array([0, 2, 2, 5]))
    assert (made.start.tolist(), made.length.tolist()) == ([0, 2, 2], [2, 0, 3])
