"""Absolute ends of a training process: the same however often it is started."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny


def trained(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "train.json").read_text())
    return result


def test_until_epoch_is_reached_once(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("nightly", epochs=3, epochs_per_run=1)
    for _ in range(2):  # the second start is what a retry after the last checkpoint does
        tiny.run(["train", run, "--tokens", tokens, "--until-epoch", "1"], run / "log")
        assert trained(run)["epochs_done"] == 1
    tiny.run(["train", run, "--tokens", tokens, "--until-epoch", "3"], run / "log")
    assert trained(run)["epochs_done"] == 2  # epochs_per_run still counts
    assert not trained(run)["finished"]


def test_until_time_ends_after_a_step_with_a_checkpoint(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("late", epochs=3)
    tiny.run(["train", run, "--tokens", tokens, "--until-time", str(time.time() - 1)], run / "log")
    assert trained(run)["steps"] == 1
    assert Path(trained(run)["checkpoint"]).name == "epoch-000-step-000001"
