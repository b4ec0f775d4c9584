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


def test_stop_after_s_ends_a_start_and_the_next_goes_on(make_run: Callable[..., Path], tokens: Path) -> None:
    run, whole = make_run("timed", stop_after_s=1e-6), make_run("whole")
    tiny.run(["train", whole, "--tokens", tokens], whole / "log")
    for start in (1, 2):
        tiny.run(["train", run, "--tokens", tokens], run / "log")
        assert (trained(run)["steps"], trained(run)["finished"]) == (start, False)
    config = json.loads((run / "config.json").read_text())
    config["training"]["stop_after_s"] = None
    (run / "config.json").write_text(json.dumps(config))
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, whole)
