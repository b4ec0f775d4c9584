"""Every row exactly once an epoch, in steps that (sizes, tokens_per_step, seed, epoch) alone decide."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.batches.epoch import EpochPlan, plan_epoch
from cache.batches.passes import PassRoom, cut_passes, deal


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(7.57, 0.6, count)), 16, 4096).astype(np.int32)


def slots_of(lengths: np.ndarray) -> np.ndarray:
    """Of rows that are supervised to 60 %, with 512 anchors at most, K = 16."""
    return 16 * np.minimum(512, lengths * 3 // 5)


def mixed(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose supervised share has nothing to do with their length."""
    lengths, share = lengths_of(count), np.random.default_rng(1).uniform(0.05, 0.95, count)
    return lengths, 16 * np.minimum(512, (lengths * share).astype(np.int32))


def plan(lengths: np.ndarray, epoch: int = 0, seed: int = 0, tokens: int = 24_576) -> EpochPlan:
    rows = np.arange(lengths.size, dtype=np.int32)
    return plan_epoch(lengths, slots_of(lengths), rows, tokens_per_step=tokens, seed=seed, epoch=epoch)


def steps_of(made: EpochPlan) -> list[list[list[int]]]:
    return [[unit.tolist() for unit in made.step(index)] for index in range(made.num_steps)]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90)), max_size=300),
    st.integers(1, 900),
    st.integers(0, 2**63 - 1),
    st.integers(0, 5),
    st.data(),
)
def test_every_row_once_in_units_and_steps_that_are_never_empty(
    rows: list[tuple[int, int]], tokens: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    sizes = np.array(rows, dtype=np.int64).reshape(-1, 2)
    chosen = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(rows)))))) if rows else [], np.int64)
    made = plan_epoch(sizes[:, 0], sizes[:, 1], chosen, tokens_per_step=tokens, seed=seed, epoch=epoch)
    steps = steps_of(made)
    assert sorted(row for step in steps for unit in step for row in unit) == chosen.tolist()
    assert all(step and all(step) for step in steps)


def test_epochs_differ_and_runs_do_not() -> None:
    lengths = lengths_of(50)
    made = [steps_of(plan(lengths, epoch=epoch, tokens=8192)) for epoch in range(20)]
    assert steps_of(plan(lengths, tokens=8192)) == made[0] != steps_of(plan(lengths, seed=1, tokens=8192))
    in_sets = {frozenset(frozenset(row for unit in step for row in unit) for step in steps) for steps in made}
    assert len(in_sets) == 20, "other rows meet in every epoch"


def test_steps_have_about_the_tokens_that_were_asked_for() -> None:
    lengths = lengths_of(40_000)
    for tokens in (24_576, 98_304):
        made = plan(lengths, tokens=tokens)
        of_step = [int(lengths[np.concatenate(made.step(index))].sum()) for index in range(made.num_steps)]
        assert made.num_steps == pytest.approx(lengths.sum() / tokens, rel=0.05)
        # Half a group of 16,384 tokens, or of eight rows of 4,096, more or less.
        assert np.std(of_step) < 16_384
        assert max(of_step) < tokens + 2 * 32_768


def test_long_and_short_rows_are_mixed_through_the_epoch() -> None:
    lengths = lengths_of(20_000)
    made = plan(lengths)
    mean = np.array([lengths[np.concatenate(made.step(index))].mean() for index in range(made.num_steps)])
    quarters = [quarter.mean() for quarter in np.array_split(mean, 4)]
    assert max(quarters) / min(quarters) < 1.1


@pytest.mark.parametrize(("sizes", "least"), [("by length", 0.97), ("mixed", 0.96)])
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_processes_are_balanced_and_passes_hardly_padded(sizes: str, least: float, processes: int) -> None:
    """By dealing with the cost of Qwen3-8B's target and drafter, and also if a slot really costs half of that."""
    lengths = lengths_of(30_000)
    slots = slots_of(lengths)
    if sizes == "mixed":
        lengths, slots = mixed(30_000)
    rows = np.arange(lengths.size, dtype=np.int32)
    made = plan_epoch(lengths, slots, rows, tokens_per_step=24_576, seed=0, epoch=0)
    padded, whole, loads = np.zeros(2), np.zeros(2), []
    for index in range(0, made.num_steps, 5):
        units = made.step(index)
        of_process = []
        for mine in deal([13.1 * lengths[unit].sum() + 8.4 * slots[unit].sum() for unit in units], processes):
            own = np.zeros(2)
            ours = np.concatenate([rows[:0], *(units[unit] for unit in mine)])
            for ids in cut_passes(ours, lengths, slots, PassRoom(32_768, 65_536)):
                assert ids.size == 1 or ids.size * slots[ids].max() <= 65_536
                own += [ids.size * lengths[ids].max(), ids.size * slots[ids].max()]
                whole += [lengths[ids].sum(), slots[ids].sum()]
            padded += own
            of_process.append(own)
        loads.append(of_process)
    assert (whole / padded >= 0.98).all()
    for slot in (8.4, 4.2):
        cost = np.array(loads) @ [13.1, slot]
        assert cost.mean(1).sum() / cost.max(1).sum() >= least


def test_a_step_of_fewer_rows_than_units_has_a_power_of_two_of_them() -> None:
    made = plan(np.full(64, 100, dtype=np.int32), tokens=300)
    assert {len(step) for step in steps_of(made)} == {4}
    assert made.num_steps == 16


def test_a_row_longer_than_a_step_is_one() -> None:
    made = plan(np.array([5, 100, 5], dtype=np.int32), tokens=20)
    assert [[1]] in steps_of(made)


def test_no_rows_no_steps() -> None:
    made = plan(np.empty(0, dtype=np.int32))
    assert made.num_steps == 0
    with pytest.raises(IndexError, match="step 0 of epoch 0"):
        made.step(0)


def test_the_order_is_the_one_of_every_earlier_release() -> None:
    """A resumed run must find the steps it left: this value moves only with a note in the changelog."""
    made = plan(np.arange(1, 1001, dtype=np.int32) % 97 + 1, seed=5, epoch=2, tokens=512)
    arrays = (made.row_ids, made.unit_offsets, made.step_offsets)
    digest = hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays))
    assert digest.hexdigest()[:16] == "402eb98ea55270c3"
