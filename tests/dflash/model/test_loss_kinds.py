"""Whole runs with each loss, in the process: the target runs to its end where the loss needs it, and only there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.disk.store import TokenCache
from dflash.training.train import train


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_a_run_with_each_loss(make_run: Callable[..., Path], tokens: Path, kind: str) -> None:
    run = make_run(kind, loss=kind, features="reuse", anchors=0.5, epochs=2)
    train(run, tokens)
    result = json.loads((run / "train.json").read_text())
    assert result["finished"]
    assert result["loss"] < result["loss_first"]
    stored = (run / "features" / "values.bin").stat().st_size
    taps = len(json.loads((run / "config.json").read_text())["drafter"]["taps"])
    assert stored == int(TokenCache.open(tokens).offsets[-1]) * (taps + (kind == "kl")) * 32 * 2
