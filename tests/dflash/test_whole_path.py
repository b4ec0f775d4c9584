"""From rows to a served drafter on a tiny target, with every kind of death on the way."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

MakeRun = Callable[..., Path]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, target: Path, tokens: Path) -> Path:
    """A run that nothing disturbed."""
    run = tiny.make_run(tmp_path_factory.mktemp("runs") / "whole", target, epochs=4, evaluation={"before": True})
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    return run


def interrupt(run: Path, tokens: Path, number: int, after: str) -> int:
    """Start training, send a signal when a checkpoint is there; the exit code."""
    command = tiny.start(["train", run, "--tokens", tokens], run / "log", tiny.slow_steps)
    tiny.wait_for(run / "checkpoints" / after)
    os.kill(command.pid, number)
    return command.wait()


def test_sigkill_then_resume_gives_the_same_bits(make_run: MakeRun, tokens: Path, uninterrupted: Path) -> None:
    run = make_run("killed", epochs=4)
    assert interrupt(run, tokens, signal.SIGKILL, "epoch-000-step-000004") == -signal.SIGKILL
    assert not (run / "train.json").exists()
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, uninterrupted)
    assert json.loads((run / "train.json").read_text())["resumed_from"] >= "epoch-000-step-000004"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signals_leave_a_checkpoint_and_code_75(
    make_run: MakeRun, tokens: Path, uninterrupted: Path, number: int
) -> None:
    run = make_run("stopped", epochs=4, checkpoint_every_steps=7)
    assert interrupt(run, tokens, number, "epoch-001-step-000001") == 75
    stopped = json.loads((run / "train.json").read_text())
    assert not stopped["finished"]
    assert Path(stopped["checkpoint"]).is_dir()
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, uninterrupted)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [curve(line) for line in lines] == [curve(line) for line in whole]


def curve(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what depends on the clock."""
    return {
        name: value for name, value in line.items() if name not in ("tokens_per_s", "stages", "queues", "bottleneck")
    }


def test_evaluate_export_reload(uninterrupted: Path, tokens: Path) -> None:
    tiny.run(["evaluate", uninterrupted, "--tokens", tokens], uninterrupted / "log")
    tiny.run(["export", uninterrupted], uninterrupted / "log")
    evaluation = json.loads((uninterrupted / "evaluation.json").read_text())
    assert evaluation["decode"]["lossless"]
    assert evaluation["tau"]["after"]["value"] > evaluation["tau"]["before"]["value"]
    exported = json.loads((uninterrupted / "export.json").read_text())
    from dflash.export.export import load_exported

    drafter = load_exported(Path(exported["path"]))
    trained = tiny.weights(uninterrupted)
    assert all((trained[f"drafter.{name}"] == value).all() for name, value in drafter.state_dict().items())


def test_evaluation_on_the_way_changes_nothing_and_keeps_the_best(
    make_run: MakeRun, tokens: Path, uninterrupted: Path
) -> None:
    run = make_run("watched", epochs=4, evaluate_every_steps=3, keep=1)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, uninterrupted)
    measured = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    taus = {line["checkpoint"]: line["value"] for line in measured if line["event"] == "tau"}
    trained = json.loads((run / "train.json").read_text())
    assert len(taus) == -(-trained["steps"] // 3), "every three steps and at the end"
    best = trained["best"]
    assert best == {"tau": max(taus.values()), "checkpoint": max(taus, key=lambda name: (taus[name], name))}
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"epoch-000-step-000000", best["checkpoint"], "epoch-004-step-000000"}


def test_the_last_position_is_measured_before_its_checkpoint(make_run: MakeRun, tokens: Path) -> None:
    run = make_run("last", epochs=1, checkpoint_every_steps=1, evaluate_every_steps=999)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    trained = json.loads((run / "train.json").read_text())
    assert trained["best"]["checkpoint"] == "epoch-001-step-000000"
    assert json.loads((run / "checkpoints/epoch-001-step-000000/state.json").read_text())["best"] == trained["best"]


def test_a_finished_run_trains_nothing(uninterrupted: Path, tokens: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (uninterrupted / "checkpoints").rglob("*")}
    tiny.run(["train", uninterrupted, "--tokens", tokens], uninterrupted / "log")
    assert {path: path.stat().st_mtime_ns for path in (uninterrupted / "checkpoints").rglob("*")} == before
    assert "nothing left" in (uninterrupted / "log").read_text()
