"""The dry run: counts and needs that the run then has, and refusals that say what to change."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from dflash.config import RunConfig, TargetConfig, TrainingConfig
from dflash.training.check import _seconds_total


def test_the_plan_is_what_the_run_then_does(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("planned", features="reuse", checkpoint_every_steps=3, keep=2)
    tiny.run(["check", run, "--tokens", tokens], run / "log")
    plan = json.loads((run / "plan.json").read_text())
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    trained = json.loads((run / "train.json").read_text())
    assert plan["fits"]
    assert not plan["refusals"]
    assert plan["steps"] == plan["steps_left"] == trained["steps"]
    files = list((run / "checkpoints").rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 1.5 * plan["disk_bytes"]["checkpoints"]
    assert plan["disk_bytes"]["features"] == (run / "features" / "values.bin").stat().st_size
    tiny.run(["check", run, "--tokens", tokens], run / "log")
    assert json.loads((run / "plan.json").read_text())["steps_left"] == 0
    assert json.loads((run / "plan.json").read_text())["seconds_total"] == 0


def no_disk() -> None:
    import shutil

    shutil.disk_usage = lambda path: type("Usage", (), {"free": 1000})()  # type: ignore[assignment]


def test_a_full_disk_is_refused_before_the_start(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("big")
    tiny.run(["check", run, "--tokens", tokens], run / "log", before=no_disk)
    plan = json.loads((run / "plan.json").read_text())
    assert not plan["fits"]
    assert "lower training.keep" in plan["refusals"][0]


@pytest.mark.parametrize(("features", "expected"), [("stream", 12 * 3.0), ("reuse", 12 * 1.0 + 2 * 2.0)])
def test_only_the_rest_of_the_first_epoch_pays_for_reused_features(features: str, expected: float) -> None:
    """12 of 15 steps are left, 2 of them in the first of three epochs of 5; one CPU, so times add up."""
    config = RunConfig(
        target=TargetConfig(model="-", devices=["cpu"]), training=TrainingConfig.model_validate({"features": features})
    )
    assert _seconds_total([5, 5, 5], 12, {"train": 1.0, "target": 2.0}, config, 1) == expected


def test_several_processes_share_out_a_step_and_need_their_memory_each(
    make_run: Callable[..., Path], tokens: Path
) -> None:
    plans = []
    for processes in (1, 4):
        run = make_run(f"of-{processes}", tokens_per_step=4096, processes=processes)
        tiny.run(["check", run, "--tokens", tokens], run / "log")
        plans.append(json.loads((run / "plan.json").read_text()))
    alone, four = plans
    assert 3 < four["memory_bytes"]["memory"] / alone["memory_bytes"]["memory"] < 5
    assert (alone["processes"], four["processes"]) == (1, 4)
