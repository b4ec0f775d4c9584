"""Training by several processes, which one flow run starts: what is learned and raised, and that none survives."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from tiny_run import TRAINING, tiny_tree

from cache.build import build
from cache.json_file import write_json
from dflash.errors import RunLocked
from flows.cli.overrides import check_parameters
from flows.runs.directory import read_lines
from flows.runs.parameters import Parameters
from flows.stage.process import run_stage
from flows.train import train

TWO = {"processes": 2, "tokens_per_step": 1024}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Parameters whose epoch has a few steps, of rows that are prepared already."""
    directory = tmp_path_factory.mktemp("processes")
    tree = tiny_tree(directory) | {"home": str(directory / "home")}
    tree["training"] = TRAINING | {"epochs": 1, "tokens_per_step": 512, "log_every_steps": 1}
    return tree


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun gives its processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def weights(home: str, name: str) -> dict[str, Any]:
    newest = max((Path(home) / "runs" / name / "checkpoints").glob("epoch-???-step-??????"))
    return load_file(newest / "drafter.safetensors")


@pytest.mark.usefixtures("server")
def test_two_processes_of_one_flow_run_learn_what_one_learns(tree: dict[str, Any]) -> None:
    shared = {"tokens_per_step": 2048}
    for name, processes in (("alone", 1), ("two", 2)):
        training = tree["training"] | shared | {"processes": processes}
        trained = train(**check_parameters(train.fn, tree | {"name": name, "training": training}))
        assert (trained["finished"], trained["steps"]) == (True, 3)
        history = read_lines(Path(tree["home"]) / "runs" / name / "history.jsonl")
        assert [line["processes"] for line in history if line["event"] == "start"] == [processes]
    alone, two = weights(tree["home"], "alone"), weights(tree["home"], "two")
    # AdamW's first steps divide by about |gradient|: rounding where that is near ε moves a weight by up to lr/1000.
    assert max(abs(alone[key] - two[key]).max() for key in alone) <= 3 * TRAINING.get("lr", 6e-4) / 1000 + 1e-6


def make_run(tree: dict[str, Any], name: str, **training: Any) -> tuple[Path, list[str]]:
    """A run directory and the arguments of `python -m dflash` that train it."""
    parameters = Parameters(**tree | {"name": name, "training": tree["training"] | TWO | training}).resolved()
    tokens = build(
        parameters.rows,
        home=Path(tree["home"]),
        tokenizer=Path(parameters.target.model),
        vocabulary=None,
        progress=None,
    )
    run = parameters.run_directory
    write_json(run / "config.json", parameters.model_dump(mode="json"))
    return run, ["train", str(run), "--tokens", str(tokens)]


def test_error_of_one_process_is_raised_as_its_own_type_not_what_it_did_to_the_others(tree: dict[str, Any]) -> None:
    run, arguments = make_run(tree, "refused")
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the first process wants, and the others wait for
        with pytest.raises(RunLocked, match="being written by another process"):
            run_stage("train", arguments, run, lambda progress: None, processes=2)


FLOW = """
import json, pathlib, sys
from flows.stage.process import run_stage
run_stage("train", json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), lambda progress: None, processes=2)
"""


class Running:
    """A training by two processes under a flow's process, in mid-training."""

    def __init__(self, tree: dict[str, Any], name: str) -> None:
        self.run, arguments = make_run(tree, name, epochs=10_000, checkpoint_every_steps=5)
        self.errors = (self.run / "flow.log").open("w+")
        self.flow = subprocess.Popen([sys.executable, "-c", FLOW, json.dumps(arguments), self.run], stderr=self.errors)
        wait_for(lambda: len([*(self.run / "checkpoints").glob("epoch-???-step-??????")]) > 1, 90)
        assert len(self.processes("torch.distributed.run")) == 1
        assert len(self.processes("dflash")) == 3, "torchrun and two that train"

    def processes(self, word: str) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._belongs(process, word)]

    def _belongs(self, process: psutil.Process, word: str) -> bool:
        try:
            command = process.cmdline()
            return process.status() != psutil.STATUS_ZOMBIE and word in command and str(self.run) in command
        except psutil.Error:
            return False

    def assert_none_survives(self) -> None:
        wait_for(lambda: self.processes("dflash") == [], 5)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.fixture
def running(tree: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Running]:
    started = Running(tree, request.node.name.removeprefix("test_"))
    yield started
    started.flow.kill()
    started.flow.wait()
    for process in started.processes("dflash"):
        process.kill()
    started.errors.close()


def test_killed_torchrun_takes_its_processes_along_and_is_an_error_worth_a_retry(running: Running) -> None:
    running.processes("torch.distributed.run")[0].kill()
    running.assert_none_survives()
    assert running.flow.wait(30) == 1
    assert "StageKilled: train was killed by SIGKILL" in (running.run / "flow.log").read_text()


def test_killed_flow_takes_all_processes_along(running: Running) -> None:
    running.flow.kill()
    running.assert_none_survives()


def test_one_killed_process_ends_the_others_with_an_error_that_says_where(running: Running) -> None:
    ranks = [process for process in running.processes("dflash") if process.environ().get("RANK") == "1"]
    ranks[0].kill()
    assert running.flow.wait(60) == 1
    running.assert_none_survives()
    assert json.loads((running.run / "error-train.json").read_text())["type"] == "StageFailed"
    assert "StageFailed: stage train failed" in (running.run / "flow.log").read_text()


def test_signal_to_the_flow_stops_all_processes_at_one_step_with_a_checkpoint(running: Running) -> None:
    os.kill(running.flow.pid, signal.SIGTERM)
    assert running.flow.wait(30) == -signal.SIGTERM, "the signal takes its usual effect once the processes have stopped"
    running.assert_none_survives()
    trained = json.loads((running.run / "train.json").read_text())
    newest = max((running.run / "checkpoints").glob("epoch-???-step-??????"))
    assert (trained["finished"], trained["checkpoint"]) == (False, str(newest))
    assert not (running.run / "error-train.json").exists()
