"""Trackers get what metrics.jsonl gets, each step once; one that is dead, slow or missing harms no run.

Stand-ins take the place of the services' packages.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from dflash.training import trackers
from dflash.training.trackers import Points, track

HANGS = "import os, time\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"


class Service:
    """A package as W&B, trackio or MLflow have it; fails so many times."""

    def __init__(self, name: str, failures: int = 0) -> None:
        self.__name__, self.failures = name, failures
        self.opened: list[dict[str, Any]] = []
        self.points: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def init(self, **options: Any) -> None:
        self.opened.append(options)

    def log(self, values: dict[str, float], step: int) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route")
        self.points.append((step, values))

    def finish(self) -> None:
        self.closed += 1

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, **options: Any) -> Any:
        self.opened.append(options)
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_params(self, values: dict[str, str]) -> None:
        self.settings = values

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.log(values, step)

    end_run = finish


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"name": "mine", "training": {"lr": 0.5}}))
    (run / "history.jsonl").write_text(json.dumps({"event": "tau", "steps": 20, "value": 1.5}) + "\n")
    add_lines(run, 3)
    return run


def add_lines(run: Path, count: int, end: str = "\n") -> None:
    line = {"loss": 2.0, "coverage": None, "lr": 0.1, "grad_norm": 1.0, "padding": 0.0, "skipped": 0}
    line |= {"tokens_per_s": 5.0, "accuracy_by_slot": [0.5], "stages": {"read": {"busy": 0.1}}, "steps": 10}
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(line) + "\n" for _ in range(count)) + end.strip("\n"))


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_each_step_is_sent_once_also_by_a_second_start(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    track(run, name, lambda _: True)
    add_lines(run, 1)
    track(run, name, lambda _: True)
    assert [step for step, _ in service.points] == [10, 20, 30, 40]
    first, second = service.points[0][1], service.points[1][1]
    assert first == {
        "loss": 2.0,
        "lr": 0.1,
        "grad_norm": 1.0,
        "padding": 0.0,
        "skipped": 0,
        "tokens_per_s": 5.0,
        "accuracy/slot_01": 0.5,
        "busy/read": 0.1,
    }
    assert second == first | {"tau": 1.5}
    assert service.closed == 2
    if name == "mlflow":
        assert service.opened[0]["run_id"] is None
        assert service.opened[1]["run_id"] == "abc"
        assert service.settings == {"name": "mine", "training.lr": "0.5"}
    else:
        assert service.opened[0]["config"] == {"name": "mine", "training.lr": 0.5}
        assert service.opened[0] == service.opened[1], "the same run of the service"


def test_service_that_fails_is_tried_again_and_loses_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, waits = Service("wandb", failures=2), iter([False, False, False, True])
    monkeypatch.setitem(sys.modules, "wandb", service)
    asked: list[float] = []

    def over(wait_s: float) -> bool:
        asked.append(wait_s)
        return next(waits)

    track(run, "wandb", over)
    assert [step for step, _ in service.points] == [10, 20, 30]
    assert asked == [0.0, trackers.AFTER_FAILURE_S, trackers.AFTER_FAILURE_S, trackers.EVERY_S]


def test_half_a_line_is_read_when_it_is_whole(run: Path) -> None:
    points = Points(run)
    add_lines(run, 1, '{"steps": ')
    assert [step for step, _ in points.new()] == [10, 20, 30, 40]
    assert list(points.new()) == []


def finds_packages(directory: Path) -> None:
    """The processes that this one starts find packages here: it comes from a server with an environment of its own."""
    os.environ["PYTHONPATH"] = f"{directory}:{Path(__file__).resolve().parents[3]}"


def test_run_with_trackers_that_hang_or_are_not_installed_is_the_run_without(
    make_run: Callable[..., Path], tokens: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(HANGS)
    (packages / "mlflow.py").write_text("raise ImportError('no such thing')")
    alone, told = make_run("alone"), make_run("told", trackers=["wandb", "mlflow"])
    for run in (alone, told):
        tiny.run(["train", run, "--tokens", tokens], run / "log", before=partial(finds_packages, packages))
    tiny.assert_equal(told, alone)
    tiny.wait_for(packages / "wandb.py.pid")
    log = told / "logs/tracker-mlflow.log"
    deadline = time.monotonic() + 60
    while "pip install 'dflash-train[mlflow]'" not in log.read_text():
        assert time.monotonic() < deadline, "what is missing is said"
        time.sleep(0.1)
    os.kill(int((packages / "wandb.py.pid").read_text()), signal.SIGKILL)
