"""Teacher-forced τ equals real greedy decoding on rows that the target wrote itself; ids are practice cases."""

from typing import Any

import numpy as np
import pytest
import torch
from decoding_toys import LOOKING_BACK, STOP, Toy, looking_back, prompts, taught, toy

from dflash.decoding.decode import DecodeLimits, draft_logits, plain, seeded, speculate
from dflash.decoding.sampling import Sampling, SeededDice
from dflash.decoding.tau import RowWalk, acceptance_by_slot, accepted_by_anchor, tau, walk

GREEDY = Sampling()


def written(
    one: Toy, lengths: tuple[int, ...], limits: DecodeLimits, seed: int = 11
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows as data preparation would have them: prompts, and the target's own answers as the supervised part."""
    rows = []
    for prompt in prompts(*lengths, seed=seed):
        answer = plain(one.target, prompt, limits, GREEDY, SeededDice(0)).ids
        ids = np.array([*prompt.tolist(), *answer], dtype=np.int64)
        rows.append((ids, (np.arange(ids.size) >= len(prompt)).astype(np.uint8)))
    return rows


def features(one: Toy, rows: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(ids) for ids, _ in rows], batch_first=True)
    return one.target.features(padded)


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("stop", [frozenset(), frozenset({9, STOP})], ids=["limit", "stop"])
def test_walks_are_the_passes_of_real_decoding(block_size: int, stop: frozenset[int]) -> None:
    one, limits, lengths = taught(block_size), DecodeLimits(30, stop), (6, 3, 12, 1, 8)
    rows = written(one, lengths, limits)
    by_row = accepted_by_anchor(one.drafter, one.ends, rows, features(one, rows))
    walked = [walk(mask, by_anchor) for (_, mask), by_anchor in zip(rows, by_row, strict=True)]
    dice = seeded(0, len(lengths), one.target.device)
    real = speculate(one.target, one.drafter, one.ends, prompts(*lengths, seed=11), limits, GREEDY, dice)
    for row, decoded in zip(walked, real, strict=True):
        assert row.accepted == decoded.accepted
        assert row.emitted == sum(decoded.emitted)
    assert tau(walked).value == sum(sum(d.emitted) for d in real) / sum(len(d.emitted) for d in real)
    assert len({count for row in walked for count in row.accepted}) > 1


def test_every_anchor_accepts_what_one_block_at_a_time_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of anchors and the head's chunks are but a way to compute the same."""
    one = taught()
    rows = written(one, (6, 6), DecodeLimits(40), seed=5)  # what the drafter has learned
    for _, mask in rows:
        mask[-7:] = 0  # text goes on behind the answer: drafts that equal it do not count
    values = features(one, rows)
    expected = []
    for b, (ids, mask) in enumerate(rows):
        found = {}
        for anchor in np.flatnonzero(mask[:-1] & mask[1:]).tolist():
            context = one.drafter.context(values[b : b + 1, :anchor])
            with torch.no_grad():
                drafts = (
                    draft_logits(one.drafter, one.ends, context, [int(ids[anchor])], [anchor])[0].argmax(-1).tolist()
                )
            right = 0
            while right < 3 and mask[anchor + right + 1] and drafts[right] == ids[anchor + right + 1]:
                right += 1
            found[anchor] = right
        expected.append(found)
    for slots, logits in ((1 << 15, 1 << 26), (12, 48), (1, 1)):
        monkeypatch.setattr("dflash.decoding.tau._SLOTS", slots)
        monkeypatch.setattr("dflash.decoding.tau._LOGITS", logits)
        assert accepted_by_anchor(one.drafter, one.ends, rows, values) == expected
    assert {0, 3} <= {count for row in expected for count in row.values()}


@pytest.mark.parametrize("parts", LOOKING_BACK.values(), ids=LOOKING_BACK)
def test_walks_of_drafters_that_look_back_are_the_passes_of_real_decoding(parts: dict[str, Any]) -> None:
    """Drafts look back at the true token, in decoding at the draft before: while a slot matters, it is the same."""
    one, limits, lengths = looking_back(**parts), DecodeLimits(30), (6, 3, 12, 1, 8)
    rows = written(one, lengths, limits)
    by_row = accepted_by_anchor(one.drafter, one.ends, rows, features(one, rows))
    walked = [walk(mask, by_anchor) for (_, mask), by_anchor in zip(rows, by_row, strict=True)]
    dice = seeded(0, len(lengths), one.target.device)
    real = speculate(one.target, one.drafter, one.ends, prompts(*lengths, seed=11), limits, GREEDY, dice)
    assert [row.accepted for row in walked] == [decoded.accepted for decoded in real]
    for (ids, _), decoded, length in zip(rows, real, lengths, strict=True):
        assert tuple(ids[length:].tolist()) == decoded.ids, "the text is the target's"
    assert len({count for row in walked for count in row.accepted}) > 1


def test_rows_without_an_answer_have_no_passes() -> None:
    one = toy()
    rows = [
        (np.array([4, 5, 6]), np.array([0, 0, 0], dtype=np.uint8)),
        (np.array([4, 5]), np.array([0, 1], dtype=np.uint8)),
    ]
    by_row = accepted_by_anchor(one.drafter, one.ends, rows, features(one, rows))
    assert by_row == [{}, {}]
    assert [walk(mask, found) for (_, mask), found in zip(rows, by_row, strict=True)] == [
        RowWalk(0, ()),
        RowWalk(0, ()),
    ]
    assert np.isnan(tau([RowWalk(0, ())]).value)


def test_two_answers_of_a_row_are_two_walks() -> None:
    """Answers at 1..3 and 6..8; each begins at its first token and ends at its last, whatever lies between."""
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1], dtype=np.uint8)
    assert walk(mask, {1: 0, 2: 1, 6: 2, 7: 1}) == RowWalk(4, (0, 1, 2))


def test_both_ways_to_count() -> None:
    """Accepted 2, 0 and 3 drafts: 1.667 accepted drafts a round, 2.667 tokens a round."""
    walks = [RowWalk(8, (2, 0, 3))]
    assert tau(walks).value == pytest.approx(8 / 3)
    assert sum(walks[0].accepted) / len(walks[0].accepted) == pytest.approx(5 / 3)
    assert acceptance_by_slot(walks, 5) == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])
    assert 1 + sum(acceptance_by_slot(walks, 5)) == pytest.approx(tau(walks).value)


def test_the_standard_error_is_that_of_repeated_samples() -> None:
    """Against the spread of τ over 400 sets of 50 rows drawn from one law; both within their own noise of a tenth."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(400):
        walks = []
        for _ in range(50):
            accepted = generator.integers(0, generator.integers(1, 6), size=generator.integers(3, 12))
            walks.append(RowWalk(int(accepted.sum() + accepted.size), tuple(accepted.tolist())))
        found.append(tau(walks))
    spread = np.std([one.value for one in found])
    assert np.mean([one.standard_error for one in found]) == pytest.approx(spread, rel=0.1)
