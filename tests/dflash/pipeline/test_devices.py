"""The real pipeline over simulated devices that work behind the host's back: shares of time, and how much is alive."""

import re
import time
from pathlib import Path

import pytest
from plans import new_plan
from simulated import Devices, SimulatedTarget, SimulatedTrainer, most_at_once

from dflash.pipeline.pipeline import Pipeline
from dflash.pipeline.telemetry import bottleneck
from dflash.pipeline.train_plan import TrainPlan

STEPS = 30


class Run:
    """30 steps; the drafter on device 0, targets on 1, 2, …, or the first of them on 0, too."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        plan: TrainPlan,
        targets: int,
        target_s: float,
        drafter_s: float,
        *,
        together: bool = False,
        ahead: int = 8,
    ) -> None:
        devices = Devices(monkeypatch)
        self.targets = [SimulatedTarget(devices, index + (not together), target_s) for index in range(targets)]
        self.trainer = SimulatedTrainer(devices, 0, drafter_s)
        self.pipeline = Pipeline(plan, self.trainer, self.targets, ahead=ahead)
        done: list[int] = []
        self.pipeline.run(0, 0, 9, lambda _: len(done) < STEPS and not done.append(1))


@pytest.mark.parametrize(
    ("targets", "target_s", "drafter_s", "read_s", "together", "idle", "sentence"),
    [
        (3, 0.060, 0.010, 0.0, False, {"train": "starved"}, "target .* busy, train .* starved: add a target device"),
        (1, 0.030, 0.010, 0.0, False, {"train": "starved"}, "target .* busy, train .* starved: add a target device"),
        (2, 0.010, 0.025, 0.0, False, {"target": "blocked"}, "train .* busy, target .* blocked: give the drafter"),
        (1, 0.006, 0.006, 0.025, False, {"target": "starved", "train": "starved"}, "read .* busy, target .* starved"),
        (1, 0.010, 0.025, 0.0, True, {"target": "blocked", "train": "blocked"}, "target .* of one device: the drafter"),
    ],
    ids=["three targets", "one target", "a slow drafter", "a slow disk", "one device"],
)  # fmt: skip
def test_shares_are_those_of_the_devices(
    targets: int,
    target_s: float,
    drafter_s: float,
    read_s: float,
    together: bool,
    idle: dict[str, str],
    sentence: str,
    tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = new_plan(tokens, epochs=9)
    make_batch = plan.make_batch

    def slow(*arguments: object) -> object:
        time.sleep(read_s)
        return make_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "make_batch", slow)
    run = Run(monkeypatch, plan, targets, target_s, drafter_s, together=together)
    stages = run.pipeline.stages()
    busy = {
        "target": sum(target.busy(1) for target in run.targets) / targets,
        "train": run.trainer.busy(2),
    }
    for name, share in busy.items():
        assert stages[name]["busy"] == pytest.approx(share, abs=0.03), name
    for name, kind in idle.items():  # of what is idle, all but the host's own work
        other = 1 - sum(stages[name].values())
        assert stages[name][kind] == pytest.approx(1 - busy[name] - other, abs=0.03), (name, stages)
    assert re.match(sentence, bottleneck(stages, shared=run.pipeline.shares_device)), stages


@pytest.mark.parametrize("ahead", [5, 9])
def test_no_more_features_are_alive_than_there_is_room_for(
    ahead: int, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What targets compute and what is trained on counts, too; room is taken before the features are made."""
    run = Run(monkeypatch, new_plan(tokens, epochs=9), 3, 0.002, 0.006, ahead=ahead)
    assert most_at_once(run.trainer.alive) == ahead
