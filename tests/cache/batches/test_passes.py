"""Units are dealt evenly, passes fit their room: every unit to one process, every row in one pass."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.batches.passes import ENOUGH, PADDING, PassRoom, cut_passes, deal

ROWS = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 8192)), max_size=60)


@given(ROWS, st.integers(1, 40_000), st.integers(0, 80_000))
def test_every_row_is_in_one_pass_that_fits(rows: list[tuple[int, int]], tokens: int, slots: int) -> None:
    sizes = np.array(rows, dtype=np.int32).reshape(-1, 2)
    passes = cut_passes(np.arange(len(rows)), sizes[:, 0], sizes[:, 1], PassRoom(tokens, slots))
    assert sorted(row for ids in passes for row in ids.tolist()) == list(range(len(rows)))
    for ids in passes:
        padded = ids.size * sizes[ids].max(0)
        assert ids.size == 1 or (padded <= [tokens, slots]).all()
        is_even = (sizes[ids].sum(0) >= (1 - PADDING) * padded).all()
        assert is_even or sizes[ids[:-1]].sum() < ENOUGH


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 9))
def test_every_unit_goes_to_one_process_and_none_has_much_more(cost: list[float], processes: int) -> None:
    dealt = deal(cost, processes)
    assert sorted(unit for units in dealt for unit in units) == list(range(len(cost)))
    assert len(dealt) == processes
    loads = [sum(cost[unit] for unit in units) for units in dealt]
    assert max(loads) - min(loads) <= max(cost, default=0) * (1 + 1e-9)
    assert dealt == deal(cost, processes)


def test_equal_units_are_dealt_in_equal_numbers() -> None:
    assert [len(units) for units in deal([1.0] * 16, 8)] == [2] * 8
