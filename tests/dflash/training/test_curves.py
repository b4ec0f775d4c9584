"""TensorBoard's own reader finds in a run directory what metrics.jsonl says, also after a kill and a rewind."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash.training.curves import Curves


def read(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run / "tensorboard")).Reload()


def curve(found: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in found.Scalars(name)]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_curves_are_the_lines_of_metrics_each_step_once_after_a_kill(
    make_run: Callable[..., Path], tokens: Path
) -> None:
    run = make_run("curves", log_every_steps=1, checkpoint_every_steps=5, evaluate_every_steps=10)
    command = tiny.start(["train", run, "--tokens", tokens], run / "log", tiny.slow_steps)
    tiny.wait_for(run / "checkpoints" / "epoch-000-step-000005")
    done = len(lines(run))
    while len(lines(run)) <= done:  # a line past the checkpoint, whose step will be done again
        assert command.process.exitcode is None
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    found, expected = read(run), lines(run)
    assert len(list((run / "tensorboard").iterdir())) == 2
    steps = list(range(1, len(expected) + 1))
    for name in ("loss", "lr", "tokens_per_s"):
        points = curve(found, name)
        assert [step for step, _ in points] == steps
        assert [value for _, value in points] == pytest.approx([line[name] for line in expected], rel=1e-6)
    slot = [value for _, value in curve(found, "accuracy/slot_01")]
    assert slot == pytest.approx([line["accuracy_by_slot"][0] for line in expected], rel=1e-6)
    measured = [step for step, _ in curve(found, "tau")]
    assert 10 in measured
    assert measured == sorted(set(measured))


def test_without_the_package_it_is_said_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level("INFO"):
        curves = Curves(tmp_path / "tensorboard", 0)
        curves.add(1, {"loss": 1.0})
    assert [record.message for record in caplog.records] == [
        "no curves for TensorBoard: the package tensorboard is not installed; metrics.jsonl has them all"
    ]
    assert not (tmp_path / "tensorboard").exists()
