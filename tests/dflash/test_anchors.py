"""Anchors, labels and weights against loops; which tokens blocks cover; anchors independent of grouping."""

from pathlib import Path

import drafter_reference as reference
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.batches.gather import Buffers
from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from dflash.anchors import (
    block_counts,
    block_labels,
    covered_tokens,
    default_gamma,
    draw_anchors,
    legal_anchors,
    slot_weights,
)
from dflash.batch import Position
from dflash.config import DrafterConfig, RunConfig, TargetConfig, TrainingConfig
from dflash.pipeline.train_plan import TrainPlan

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=60)
SIZES = st.integers(2, 17)


def array(mask: list[int]) -> np.ndarray:
    return np.array(mask, dtype=np.uint8)


def draw(mask: list[int], anchors: int | float, epoch: int = 0, row: int = 0, seed: int = 0) -> np.ndarray:
    return draw_anchors(array(mask), anchors=anchors, seed=seed, epoch=epoch, row=row)


@given(MASKS, SIZES)
def test_legal_counts_and_labels_equal_loops(mask: list[int], size: int) -> None:
    legal = np.flatnonzero(legal_anchors(array(mask)))
    assert legal.tolist() == reference.legal(mask)
    assert block_counts(array(mask), legal, size).tolist() == [reference.counts(mask, a, size) for a in legal]
    ids = np.arange(100, 100 + len(mask), dtype=np.int32)
    labels = block_labels(ids, legal, size)
    for a, row in zip(legal, labels, strict=True):
        assert row.tolist() == [int(ids[a + k]) if a + k < len(mask) else 0 for k in range(size)]


@given(MASKS, SIZES)
def test_every_counted_label_is_a_supervised_token_of_its_row(mask: list[int], size: int) -> None:
    legal = np.flatnonzero(legal_anchors(array(mask)))
    counts = block_counts(array(mask), legal, size)
    positions = (legal[:, None] + np.arange(size))[counts]
    assert array(mask)[positions].all()


@given(MASKS, st.integers(1, 40), st.integers(0, 5))
def test_drawn_anchors_are_legal_ascending_distinct_and_as_many_as_asked(
    mask: list[int], anchors: int, epoch: int
) -> None:
    drawn, legal = draw(mask, anchors, epoch).tolist(), reference.legal(mask)
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(legal)
    assert len(drawn) == min(anchors, len(legal))


@given(MASKS, SIZES, st.integers(1, 8))
def test_covered_tokens_are_those_that_counted_slots_predict(mask: list[int], size: int, anchors: int) -> None:
    drawn = draw(mask, anchors)
    expected = {int(a) + k for a in drawn for k in range(size) if reference.counts(mask, int(a), size)[k]}
    assert set(np.flatnonzero(covered_tokens(array(mask), drawn, size)).tolist()) == expected


def test_all_legal_anchors_cover_all_supervised_tokens_but_the_first_of_each_answer() -> None:
    mask = [0, 1, 1, 1, 0, 0, 1, 1, 0, 1]
    covered = covered_tokens(array(mask), draw(mask, 99), 4)
    assert covered.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0]


def test_supervised_positions_and_labels_of_one_row() -> None:
    ids, mask = np.array([10, 11, 12, 20, 21, 22, 13], dtype=np.int32), array([0, 0, 0, 1, 1, 1, 0])
    anchors = np.flatnonzero(legal_anchors(mask))
    assert anchors.tolist() == [3, 4]
    assert block_labels(ids, anchors, 3).tolist() == [[20, 21, 22], [21, 22, 13]]
    assert block_counts(mask, anchors, 3).tolist() == [[False, True, True], [False, True, False]]


def test_labels_never_cross_into_the_next_row(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2, 3, 9], [4, 5, 9]], "loss_mask": [[1, 1, 1, 1], [1, 1, 1]]})
    rows = RowsConfig(source="in memory", vocabulary=16, held_out=0.0)
    store = TokenCache.open(build(rows, home=tmp_path, tokenizer=None, vocabulary=16, data=table))
    target = TargetConfig(model="none")
    config = RunConfig(target=target, drafter=DrafterConfig(block_size=3), training=TrainingConfig(anchors=1.0))
    plan = TrainPlan(store, config)
    batch = plan.make_batch(Position(0, 0, 0), np.array([0, 1]), Buffers(plan.buffer_tokens))
    labels = torch.where(batch.weights > 0, batch.labels, -100)
    assert batch.anchor.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert labels[..., 1].tolist() == [[2, 3, 9], [5, 9, -100]]
    assert labels[..., 2].tolist() == [[3, 9, -100], [9, -100, -100]]


def test_slot_k_predicts_the_token_at_anchor_plus_k() -> None:
    ids, mask = np.arange(20, dtype=np.int32), np.ones(20, dtype=np.uint8)
    anchor = np.array([5])
    assert block_labels(ids, anchor, 4).tolist() == [[5, 6, 7, 8]]
    assert block_counts(mask, anchor, 4).sum() == 3


def test_a_block_of_8_trains_7_slots() -> None:
    assert np.count_nonzero(slot_weights(8, 4.0)) == 7


def test_the_mask_is_read_at_the_token_that_is_predicted() -> None:
    mask = np.zeros(50, dtype=np.uint8)
    mask[8:40] = 1
    legal = legal_anchors(mask)
    assert [bool(legal[p]) for p in (7, 8, 38, 39)] == [False, True, True, False]
    assert block_counts(mask, np.array([37]), 4).astype(int).tolist() == [[0, 1, 1, 0]]


def test_each_row_has_its_own_budget() -> None:
    # n supervised tokens in one answer have n − 1 legal anchors.
    assert [draw([1] * (n + 1), 512).size for n in (187, 4000)] == [187, 512]


@pytest.mark.parametrize(("share", "expected"), [(1.0, 100), (0.25, 25), (0.001, 1)])
def test_a_share_of_the_legal_positions(share: float, expected: int) -> None:
    assert draw([1] * 101, share).size == expected


def test_a_share_of_no_legal_position_is_none() -> None:
    assert draw([0, 1, 0], 0.5).size == 0


def test_anchors_depend_on_seed_epoch_and_row_alone() -> None:
    mask = [1] * 200
    same = draw(mask, 8, epoch=1, row=2, seed=3).tolist()
    assert same == draw(mask, 8, epoch=1, row=2, seed=3).tolist()
    others = [draw(mask, 8, 2, 2, 3), draw(mask, 8, 1, 3, 3), draw(mask, 8, 1, 2, 4)]
    assert all(same != other.tolist() for other in others)


@pytest.mark.parametrize(
    ("seed", "epoch", "row", "drawn"),
    [
        (0, 0, 0, [32, 191, 193, 208, 234, 376, 382, 394]),
        (3, 1, 2, [30, 41, 157, 180, 181, 227, 260, 393]),
        (2**62, 5, 902_086, [7, 34, 80, 171, 191, 194, 245, 330]),
    ],
)
def test_the_same_anchors_with_every_numpy(
    seed: int, epoch: int, row: int, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Golden values: a resume under another numpy would go on with other anchors, and nobody would notice."""
    monkeypatch.delattr(np.random, "Generator")  # whose streams numpy may change
    assert draw([1] * 400, 8, epoch, row, seed).tolist() == drawn


def test_every_legal_position_is_drawn_equally_often() -> None:
    counts = np.bincount(np.concatenate([draw([0, *[1] * 41], 10, row=row) for row in range(2000)]), minlength=41)
    assert counts[0] == 0
    # Each of 40 positions is in a draw with probability 1/4: 500 ± 19.4 times in 2,000.
    assert np.abs(counts[1:] - 500).max() < 4.5 * 19.4
    assert ((counts[1:] - 500) ** 2 / 375).sum() * 40 / 39 < 75  # χ² with 39 degrees of freedom: 0.9996


def test_weights_decay_from_slot_1() -> None:
    weights = slot_weights(5, 2.0)
    np.testing.assert_allclose(weights, [0, 1, np.exp(-0.5), np.exp(-1), np.exp(-1.5)], rtol=1e-6)


def test_gamma_of_the_paper() -> None:
    assert [default_gamma(k) for k in (16, 10, 8)] == [7.0, 5.0, 4.0]
