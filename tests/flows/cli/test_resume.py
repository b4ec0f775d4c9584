"""`resume NAME`: the run goes on as it was started, from what its directory holds."""

import json
import os
from pathlib import Path

import pytest

import flows.__main__ as flows_cli
from flows.cli import run_here
from flows.cli.overrides import check_parameters
from flows.train import train

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(autouse=True)
def as_in_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_here, "_speak_plainly", lambda: None)
    monkeypatch.setattr(os, "chdir", lambda _: None)


def test_nothing_is_typed_again(
    home: Path, rows: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"name": "resumed", "rows": {"source": str(rows)}, "target": {"model": str(target)}}
    train(**check_parameters(train.fn, tree | {"training": {"epochs": 3, "lr": 0.5, "epochs_per_run": 1}}))
    run = home / "runs/resumed"
    assert json.loads((run / "flow.json").read_text()) == {"flow": "flows.train.train", "dask": None}
    assert flows_cli.main(["resume", "resumed", "--set", "training.epochs_per_run=null", "--override"]) == 0
    assert json.loads((run / "train.json").read_text())["finished"]
    assert json.loads((run / "config.json").read_text())["training"]["lr"] == 0.5
    attempts = (run / "attempts").read_text().splitlines()
    assert [line.endswith("--override") for line in attempts] == [False, True]
    (run / "config.json").unlink()
    assert flows_cli.main(["resume", "resumed"]) == 2
    assert "Type the command that started it again" in capsys.readouterr().err
