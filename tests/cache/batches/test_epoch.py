"""Every row exactly once an epoch, in an order that (seed, epoch) alone decide."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.batches.epoch import EpochPlan, plan_epoch


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(7.57, 0.6, count)), 16, 4096).astype(np.int64)


def plan(lengths: np.ndarray, epoch: int = 0, seed: int = 0, tokens: int = 24_576) -> EpochPlan:
    return plan_epoch(lengths, np.arange(lengths.size), tokens_per_batch=tokens, seed=seed, epoch=epoch)


@given(
    st.lists(st.integers(1, 60), max_size=300),
    st.integers(1, 200),
    st.integers(0, 2**63 - 1),
    st.integers(0, 5),
    st.data(),
)
def test_every_row_once_and_no_batch_too_large(
    lengths: list[int], tokens: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    length = np.array(lengths, dtype=np.int64)
    chosen = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(lengths)))))) if lengths else [], np.int64)
    made = plan_epoch(length, chosen, tokens_per_batch=tokens, seed=seed, epoch=epoch)
    assert sorted(made.row_ids.tolist()) == chosen.tolist()
    batches = [made.batch(index) for index in range(made.num_batches)]
    assert sum(batch.size for batch in batches) == chosen.size
    for batch in batches:
        assert batch.size == 1 or batch.size * length[batch].max() <= tokens
        assert batch.size > 0


def test_epochs_differ_and_runs_do_not() -> None:
    lengths = lengths_of(10)
    first, again, second, other = plan(lengths), plan(lengths), plan(lengths, epoch=1), plan(lengths, seed=1)
    assert (first.row_ids == again.row_ids).all()
    assert (first.batch_offsets == again.batch_offsets).all()
    assert not np.array_equal(first.row_ids, second.row_ids)
    assert not np.array_equal(first.row_ids, other.row_ids)


def test_any_two_of_many_epochs_differ() -> None:
    lengths = lengths_of(50)
    assert len({plan(lengths, epoch=epoch).row_ids.tobytes() for epoch in range(50)}) == 50


def test_a_position_is_a_number_and_nothing_else() -> None:
    lengths = lengths_of(5000)
    unbroken = [plan(lengths).batch(index).tolist() for index in range(plan(lengths).num_batches)]
    resumed = plan(lengths)
    assert [resumed.batch(index).tolist() for index in range(200, resumed.num_batches)] == unbroken[200:]


def test_batches_shared_out_among_any_number_of_workers_are_all_of_them() -> None:
    made = plan(lengths_of(200), tokens=8192)
    for workers in (1, 2, 3, 7):
        shares = [range(rank, made.num_batches, workers) for rank in range(workers)]
        rows = np.concatenate([made.batch(index) for share in shares for index in share])
        assert sorted(rows.tolist()) == list(range(200))


def test_padding_is_under_two_percent_and_random_batches_waste_half() -> None:
    lengths = lengths_of(60_000)
    made = plan(lengths)
    assert made.padding_efficiency(lengths) >= 0.98
    random = np.random.default_rng(0).permutation(60_000)
    by_chance = EpochPlan(random, np.arange(0, 60_001, 16), 0)
    assert by_chance.padding_efficiency(lengths) < 0.6


def test_long_and_short_batches_are_mixed_through_the_epoch() -> None:
    lengths = lengths_of(20_000)
    made = plan(lengths)
    longest = np.array([lengths[made.batch(index)].max() for index in range(made.num_batches)])
    quarters = [quarter.mean() for quarter in np.array_split(longest, 4)]
    assert max(quarters) / min(quarters) < 1.1


def test_a_longer_row_is_its_own_batch() -> None:
    made = plan(np.array([5, 100, 5]), tokens=20)
    assert sorted(batch.tolist() for batch in (made.batch(0), made.batch(1))) == [[0, 2], [1]] or made.num_batches == 3


def test_rows_that_do_not_fill_a_batch_still_share_one() -> None:
    made = plan(np.full(4, 4, dtype=np.int64), tokens=9)
    assert [made.batch(index).size for index in range(made.num_batches)] == [2, 2]


def test_no_rows_no_batches() -> None:
    made = plan(np.empty(0, dtype=np.int64))
    assert made.num_batches == 0
    assert made.padding_efficiency(np.empty(0, dtype=np.int64)) == 1.0
    with pytest.raises(IndexError, match="batch 0 of epoch 0"):
        made.batch(0)


def test_the_order_is_the_one_of_every_earlier_release() -> None:
    """A resumed run must find the batches it left: this value moves only with a note in the changelog."""
    made = plan(np.arange(1, 1001, dtype=np.int64) % 97 + 1, seed=5, epoch=2, tokens=512)
    digest = hashlib.sha256(made.row_ids.astype("<i8").tobytes() + made.batch_offsets.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "f96e5f060f9fc9c8"
