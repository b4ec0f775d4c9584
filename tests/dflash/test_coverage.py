"""Coverage: the share of supervised tokens that some block predicted, by length of row, from batch to report."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import drafter_reference as reference
import numpy as np
import pytest
import tiny

from cache.disk.store import TokenCache
from dflash.anchors import LENGTH_BINS, draw_anchors, length_bin
from dflash.training.open_run import changed_settings

SIZE = 4  # of the tiny run's blocks


def counted(store: TokenCache, anchors: int | float) -> dict[int, list[int]]:
    """Longest length of a bin → covered and supervised tokens of the first epoch, by loops."""
    covered: Counter[int] = Counter()
    supervised: Counter[int] = Counter()
    for row in store.rows(0).tolist():
        mask = store.mask[store.offsets[row] : store.offsets[row + 1]]
        drawn = draw_anchors(mask, anchors=anchors, seed=0, epoch=0, row=row)
        predicted = {int(a) + k for a in drawn for k in range(SIZE) if reference.counts(mask.tolist(), int(a), SIZE)[k]}
        longest = next(power for power in (1, 2, 4, 8, 16, 32) if mask.size <= power)
        covered[longest] += len(predicted)
        supervised[longest] += int(mask.sum())
    return {longest: [covered[longest], supervised[longest]] for longest in sorted(supervised)}


@pytest.mark.parametrize("anchors", [2, 0.25, 1.0])
def test_a_run_says_what_its_blocks_covered(make_run: Callable[..., Path], tokens: Path, anchors: int | float) -> None:
    run = make_run(f"run-{anchors}", epochs=1, anchors=anchors, log_every_steps=1)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    expected = counted(TokenCache.open(tokens), anchors)
    sums = {longest: np.zeros(2, dtype=int) for longest in expected}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for longest, covered, supervised in line["coverage_by_length"]:
            sums[longest] += covered, supervised
        parts = np.array([part[1:] for part in line["coverage_by_length"]]).sum(0)
        assert line["coverage"] == pytest.approx(parts[0] / parts[1])
    assert {longest: pair.tolist() for longest, pair in sums.items()} == expected
    told = json.loads((run / "train.json").read_text())["coverage_by_length"]
    assert told == pytest.approx({str(longest): pair[0] / pair[1] for longest, pair in expected.items()})
    assert "coverage" in (run / "log").read_text()


def test_a_number_favours_short_rows_and_a_share_treats_all_alike(tokens: Path) -> None:
    store = TokenCache.open(tokens)
    number, share = (
        {longest: pair[0] / pair[1] for longest, pair in counted(store, anchors).items()} for anchors in (2, 0.25)
    )
    assert number[16] - number[32] > 0.2
    assert abs(share[16] - share[32]) < 0.1


def test_one_anchor_and_all_anchors_are_two_settings() -> None:
    one, everything = {"training.anchors": 1, "training.lr": 1.0}, {"training.anchors": 1.0, "training.lr": 1.0}
    assert changed_settings(one, everything) == {"training.anchors": (1, 1.0)}
    assert not changed_settings(one, one)


def test_bins_of_lengths_are_powers_of_two() -> None:
    assert [1 << length_bin(n) for n in (1, 2, 3, 4, 5, 64, 65, 3072)] == [1, 2, 4, 4, 8, 64, 128, 4096]
    assert length_bin(1 << 40) == LENGTH_BINS - 1
