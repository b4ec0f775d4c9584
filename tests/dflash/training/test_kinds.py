"""Runs of drafters that look back: cut and resumed they end with the bits of a whole one, and can be evaluated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

KINDS: dict[str, dict[str, Any]] = {
    "dflash2": {"drafter": {"kind": "dflash2", "rank": 4}, "training": {}},
    "dspark": {
        "drafter": {"kind": "dspark", "rank": 4, "confidence": True, "sliding_window": 6},
        "training": {"loss": "dspark", "features": "reuse"},
    },
    "dspark vocabulary": {"drafter": {"kind": "dspark", "rank": 4, "vocabulary": 30}, "training": {}},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_cut_run_ends_as_a_whole_one_and_is_evaluated(
    kind: dict[str, Any], make_run: Callable[..., Path], tokens: Path
) -> None:
    settings = {"drafter": kind["drafter"], **kind["training"]}
    whole = make_run("whole", **settings)
    tiny.run(["train", whole, "--tokens", tokens], whole / "log")
    cut = make_run("cut", **settings, epochs_per_run=1)
    for _ in range(2):
        tiny.run(["train", cut, "--tokens", tokens], cut / "log")
    tiny.assert_equal(whole, cut)
    assert [name for name in tiny.weights(whole) if "conv" in name or "markov" in name]
    tiny.run(["evaluate", whole, "--tokens", tokens], whole / "log")
    found = json.loads((whole / "evaluation.json").read_text())
    assert found["tau"]["after"]["value"] >= 1.0
    assert found["decode"]["identical"] + found["decode"]["near_ties"] == found["decode"]["prompts"]
