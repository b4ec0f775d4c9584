"""Absolute ends of a training process: the same however often it is started."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import tiny
from pydantic import ValidationError

from dflash.config import TrainingConfig
from dflash.training.until import Until, end_of_window, next_time


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


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def machine_in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("machine_in_berlin")
@pytest.mark.parametrize("until", ["06:00 Europe/Berlin", "06:00"])
def test_a_night_ends_at_six_by_the_clock_on_every_night_of_a_year(until: str) -> None:
    hours = {}
    for day in range(365):
        begin = datetime(2026, 1, 1, 22, tzinfo=BERLIN) + timedelta(days=day)
        end = next_time(until, begin.timestamp())
        local = datetime.fromtimestamp(end, BERLIN)
        assert (local.date(), local.hour, local.minute) == ((begin + timedelta(days=1)).date(), 6, 0)
        hours[begin.date().isoformat()] = (end - begin.timestamp()) / 3600
    assert {date: length for date, length in hours.items() if length != 8} == {"2026-03-28": 7, "2026-10-24": 9}


@pytest.mark.parametrize(
    ("start", "until", "end"),
    [
        ("2026-03-28T21:00", "02:30 Europe/Berlin", "2026-03-29T01:30"),  # left out: 02:30 by the clock before
        ("2026-10-24T20:00", "02:30 Europe/Berlin", "2026-10-25T00:30"),  # shown twice: the first
        ("2026-10-25T00:30", "02:30 Europe/Berlin", "2026-10-25T01:30"),  # the second, once the first is past
        ("2026-06-01T04:00", "06:00 Europe/Berlin", "2026-06-02T04:00"),  # just six: until tomorrow
        ("2026-06-01T03:59", "06:00 Europe/Berlin", "2026-06-01T04:00"),
        ("2026-06-01T03:59", "06:00 UTC", "2026-06-01T06:00"),
        ("2026-06-01T23:30", "06:00 Asia/Kolkata", "2026-06-02T00:30"),
    ],
)
def test_time_of_day_is_the_next_one_of_its_own_time_zone(start: str, until: str, end: str) -> None:
    begin, expected = (datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for text in (start, end))
    assert next_time(until, begin) == expected


def test_earliest_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ten = datetime(2026, 6, 1, 22, tzinfo=UTC).timestamp()
    monkeypatch.setattr("dflash.training.until.time.time", lambda: ten)
    training = TrainingConfig(until="06:00 UTC")
    assert end_of_window(training, ten) == ten + 8 * 3600
    assert Until().within(training, 0).time == ten + 8 * 3600
    assert Until(time=ten + 60).within(training, 0).time == ten + 60, "what the flow fixed does not move"
    assert Until().within(TrainingConfig(until="06:00 UTC", stop_after_s=60), 0).time == ten + 60
    assert Until().within(TrainingConfig(), 0).time is None


def test_time_of_day_is_read_as_typed_and_its_time_zone_has_to_exist() -> None:
    assert TrainingConfig.model_validate({"until": 960}).until == "16:00", "what YAML makes of 16:00"
    for wrong in ("6:00", "24:00", "06:00 ", "at six", 1440, 960.5):
        with pytest.raises(ValidationError, match="until"):
            TrainingConfig.model_validate({"until": wrong})
    with pytest.raises(ValidationError, match="there is no time zone Europe/Bonn"):
        TrainingConfig(until="06:00 Europe/Bonn")
