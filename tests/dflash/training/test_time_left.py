"""The time left, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from dflash.training import time_left
from dflash.training.time_left import TimeLeft


class Run:
    """Steps of so many seconds, in which the drafter works for so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.drafter = 0.0
        self.done = 0
        monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: self.now))

    def steps(self, left: TimeLeft, count: int, seconds: float, drafter: float) -> float | None:
        said = None
        for _ in range(count):
            self.now, self.drafter, self.done = self.now + seconds, self.drafter + drafter, self.done + 1
            said = left.after(self.done, self.drafter)
        return said


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_later_epochs_without_the_target_are_told_from_the_first_step_on(run: Run) -> None:
    """Ten epochs of 40 steps: 5 s each in the first, 1 s in the others, as the drafter alone would take."""
    left = TimeLeft(400, 40, 0, reuse=True)
    assert run.steps(left, 1, 30.0, 1.0) is None, "one step that has loaded and warmed up tells no pace"
    assert run.steps(left, 2, 5.0, 1.0) == pytest.approx(37 * 5 + 360)
    assert run.steps(left, 37, 5.0, 1.0) == pytest.approx(360 * 5), "no step of the second epoch is done yet"
    assert run.steps(left, 130, 1.0, 1.0) == pytest.approx(230, rel=0.1)
    assert run.steps(left, 230, 1.0, 1.0) == 0


def test_without_kept_features_the_newest_pace_counts(run: Run) -> None:
    left = TimeLeft(1000, 100, 0, reuse=False)
    assert run.steps(left, 50, 2.0, 1.0) == pytest.approx(950 * 2)
    assert run.steps(left, 200, 1.0, 1.0) == pytest.approx(750)


def test_run_that_goes_on_counts_its_own_steps(run: Run) -> None:
    run.done = 20
    left = TimeLeft(400, 40, 20, reuse=True)
    assert run.steps(left, 4, 5.0, 1.0) == pytest.approx(16 * 5 + 360)
