"""SIGKILL at any instant: the run goes on and ends with the bits of a run that nothing disturbed.

`make test` kills 5 runs, `make test-kill` 30 (`KILL_ROUNDS`). A round kills its run twice: at a random time, and inside
a random one of the calls that make files durable, rename and remove them. Rounds differ in features and targets.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny

ROUNDS = int(os.environ.get("KILL_ROUNDS", "5"))
SETTINGS = {"epochs": 3, "checkpoint_every_steps": 2}
FIRST = "epoch-000-step-000000"
Killed = dict[str, int]


def die_in_call(number: int) -> None:
    """For `tiny.start`: this process kills itself before or after one of its calls to the file system."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **keywords)
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    os.fsync = counted(os.fsync)
    pathlib.Path.replace = counted(pathlib.Path.replace)  # type: ignore[method-assign]
    shutil.rmtree = counted(shutil.rmtree)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, target: Path, tokens: Path) -> dict[str, Path]:
    """Runs that nothing disturbed, by `training.features`.

    They differ in last bits: a later epoch groups rows anew, and a row's stored features are those of its first group.
    """
    runs = {}
    for features in ("stream", "reuse"):
        run = tiny.make_run(tmp_path_factory.mktemp("runs") / features, target, features=features, **SETTINGS)
        tiny.run(["train", run, "--tokens", tokens], run / "log")
        runs[features] = run
    return runs


def fail_in(stage: str) -> None:
    """For `tiny.start`: the stage raises at its seventh item."""
    from dflash.pipeline.train_plan import TrainPlan
    from dflash.target.frozen import Target
    from dflash.training.step import Trainer

    owner, name = {"read": (TrainPlan, "make_batch"), "target": (Target, "features"), "train": (Trainer, "accumulate")}[
        stage
    ]
    call, calls = getattr(owner, name), [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raise OSError(f"the {stage} stage was told to fail")
        return call(*arguments)

    setattr(owner, name, failing)


@pytest.mark.parametrize("stage", ["read", "target", "train"])
def test_a_failed_stage_is_named_and_the_next_start_ends_bit_equal(
    stage: str, make_run: Callable[..., Path], tokens: Path, uninterrupted: dict[str, Path]
) -> None:
    run = make_run(stage, **SETTINGS)
    tiny.run(["train", run, "--tokens", tokens], run / "log", expected=1, before=partial(fail_in, stage))
    error = json.loads((run / "error-train.json").read_text())
    assert error["type"] == "StageFailed"
    assert f"stage {stage} failed" in error["message"]
    assert "told to fail" in error["message"]
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, uninterrupted["stream"])


@pytest.fixture(scope="module")
def killed() -> Any:
    """Counts of what was killed; printed at the end."""
    counts: Killed = {"rounds": 0, "kills at a random time": 0, "kills inside a file operation": 0, "bit-equal": 0}
    yield counts
    print("\nkill test:", ", ".join(f"{name} {count}" for name, count in counts.items()))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_runs_end_bit_equal(
    number: int, make_run: Callable[..., Path], tokens: Path, uninterrupted: dict[str, Path], killed: Killed
) -> None:
    chance = random.Random(number)
    features = ("stream", "reuse")[number % 2]
    whole = uninterrupted[features]
    seconds = (whole / "train.json").stat().st_mtime - (whole / "checkpoints" / FIRST).stat().st_mtime
    targets = {"devices": ["cpu"] * (1 + number // 2 % 2)}
    run = make_run(f"round-{number}", features=features, target=targets, **SETTINGS)
    killed["rounds"] += 1

    command = tiny.start(["train", run, "--tokens", tokens], run / "log")
    tiny.wait_for(run / "checkpoints" / FIRST)  # earlier deaths are among those in a file operation
    time.sleep(chance.uniform(0, seconds))
    command.process.kill()
    killed["kills at a random time"] += command.wait() == -signal.SIGKILL

    before = partial(die_in_call, chance.randint(1, 80))
    code = tiny.start(["train", run, "--tokens", tokens], run / "log", before).wait()
    assert code in (0, -signal.SIGKILL), (run / "log").read_text()[-2000:]
    killed["kills inside a file operation"] += code == -signal.SIGKILL

    tiny.run(["train", run, "--tokens", tokens], run / "log")
    tiny.assert_equal(run, whole)
    assert not list((run / "checkpoints").glob("*.tmp-*")), "what killed writers left is swept away"
    killed["bit-equal"] += 1
