"""A gathered batch is its rows, padded right with 0, in memory that was leased once."""

from typing import Any

import numpy as np
import pytest
from arrow_rows import table

from cache.batches.gather import Buffers, gather, prefetch
from cache.disk.store import TokenCache

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11, 12]]
MASKS = [[0, 1, 1], [1, 1], [0, 0, 1, 1, 1], [1, 1]]


@pytest.fixture(params=[1000, 100_000])
def store(make: Any, request: pytest.FixtureRequest) -> TokenCache:
    cache: TokenCache = make(data=table(ROWS, MASKS), vocabulary=request.param)
    return cache


@pytest.mark.parametrize("chosen", [[0], [2, 0, 3], [3, 3], [0, 1, 2, 3]])
def test_rows_are_copied_and_padded_with_zeros(store: TokenCache, chosen: list[int]) -> None:
    out = Buffers(40)
    out.ids[:], out.mask[:] = 77, 77  # what an earlier batch left
    prefetch(store, np.array(chosen))
    got = gather(store, np.array(chosen), out)
    longest = max(len(ROWS[row]) for row in chosen)
    assert got.ids.tolist() == [ROWS[row] + [0] * (longest - len(ROWS[row])) for row in chosen]
    assert got.mask.tolist() == [MASKS[row] + [0] * (longest - len(ROWS[row])) for row in chosen]
    assert got.lengths.tolist() == [len(ROWS[row]) for row in chosen]
    assert np.shares_memory(got.ids, out.ids)
    assert np.shares_memory(got.mask, out.mask)


def test_a_batch_that_does_not_fit_is_refused(store: TokenCache) -> None:
    with pytest.raises(ValueError, match="2 rows padded to 5 tokens needs 10 tokens, the buffers hold 9"):
        gather(store, np.array([0, 2]), Buffers(9))


def test_padding_is_known_by_position_not_by_value(make: Any) -> None:
    store = make(data=table([[5, 6, 0], [1, 2, 3, 4]]))
    got = gather(store, np.array([0, 1]), Buffers(8))
    assert got.ids[0].tolist() == [5, 6, 0, 0]
    assert got.mask[0].tolist() == [1, 1, 1, 0]
    assert got.lengths[0] == 3
