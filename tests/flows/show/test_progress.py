"""The one line of a stage: live on a terminal; elsewhere, and in the UI, a plain line now and then."""

import io
import itertools
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from cache.build import BuildProgress
from flows.cli import run_here as command
from flows.prepare import _stage_progress
from flows.show import progress
from flows.show.progress import LINE_EVERY_S, StageProgress, progress_line


def at(step: int) -> StageProgress:
    return StageProgress("train", step, 480, "steps", 2.1, 5.7, 222, f"loss {9 - step / 1000:.3f}", step / 480)


def use_console(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> io.StringIO:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120, highlight=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(command, "console", console)
    return shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_log_lines_are_seconds_apart_however_fast_the_steps_are_and_one_a_minute_after_some(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_console(monkeypatch, is_terminal)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(progress, "time", clock)
    now = 0.0
    with caplog.at_level(logging.INFO), progress_line("train") as line:
        times = []
        for step in range(1, 24_001):
            now = step / 20
            before = len(caplog.records)
            line.show(at(step))
            times += [now] if len(caplog.records) > before else []
    apart = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert apart[:6] == pytest.approx([10, 15, 22.5, 33.75, 50.65, 60], abs=0.1)
    assert {round(gap, 1) for gap in apart[6:]} == {LINE_EVERY_S}
    assert caplog.records[0].message == "train: 200/480 steps  2.1/s  3 min 42 s left  loss 8.800"


def test_terminal_has_a_live_line_that_is_gone_when_the_stage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = use_console(monkeypatch, is_terminal=True)
    with progress_line("train") as line:
        line.show(at(12))
    text = shown.getvalue()
    assert "12/480 steps  2.1/s  3 min 42 s left" in text
    assert "loss 8.988" in text
    assert text.rstrip().endswith("\x1b[2K"), "the line is erased"


def test_without_a_terminal_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = use_console(monkeypatch, is_terminal=False)
    with progress_line("train") as line:
        line.show(at(12))
    assert shown.getvalue() == ""


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, ""), (False, "train: 12/480 steps\n")])
def test_progress_is_shown_once_as_a_live_line_or_as_a_plain_one(
    is_terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = use_console(monkeypatch, is_terminal)
    record = logging.LogRecord("flows.show.progress", logging.INFO, __file__, 1, "train: 12/480 steps", (), None)
    command._Plain().emit(record)
    assert shown.getvalue() == expected


def test_share_is_known_where_a_total_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    building = _stage_progress(BuildProgress(120, None, 10**6, 30.0, 0.25))
    assert (building.total, building.share, building.eta_s) == (None, 0.25, 90.0)
    shown = use_console(monkeypatch, is_terminal=True)
    with progress_line("prepare") as line:
        line.show(building)
        assert line._live is not None
        assert line._live.tasks[0].percentage == 25
    assert "120 rows  4/s  1 min 30 s left" in shown.getvalue()
