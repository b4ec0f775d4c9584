"""Forty plausible mistakes at the command line: one line says what, where and what to do; no traceback, no waiting."""

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_inputs import make_target, write_rows

import cache.__main__ as cache_cli
import flows.__main__ as flows_cli
from cache.build import build
from cache.config import RowsConfig
from flows.cli import run_here

SLOWEST_S = 3.0

TRAIN = ("train", "--set", "name=x", "--set", "rows.source={d}/rows.jsonl", "--set", "target.model={d}/target")

FLOWS = [
    (("trian",), 2, "trian: there is no such command or deployment. Did you mean train?"),
    ((), 2, "Name what to run: demo, "),
    (("train", "--sett", "x"), 2, "unrecognized arguments"),
    ((*TRAIN, "--set", "training.epoch=3"), 2, "did you mean training.epochs?"),
    ((*TRAIN, "--set", "epochs=3"), 2, "did you mean training.epochs?"),
    ((*TRAIN, "--set", "training.epochs"), 2, "expected field=value"),
    ((*TRAIN, "--set", "training.epochs=many"), 2, "training.epochs: "),
    ((*TRAIN, "--set", "training.epochs=0"), 2, "greater than or equal to 1; got 0"),
    ((*TRAIN, "--set", "rows.held_out=2"), 2, "rows.held_out: "),
    ((*TRAIN, "--set", "training.lr=[1"), 2, "is not YAML"),
    ((*TRAIN, "--set", "name.first=x"), 2, "name is 'x' and has no fields"),
    ((*TRAIN, "--set", "name=../x"), 2, "name: "),
    ((*TRAIN, "--set", "rows.source={d}/nowhere.jsonl"), 1, "nothing at '{d}/nowhere.jsonl'"),
    ((*TRAIN, "--set", "rows.source={d}/*.parquett"), 1, "nothing at"),
    ((*TRAIN, "--set", "target.model={d}/nowhere"), 2, "target.model: there is no directory {d}/nowhere"),
    ((*TRAIN, "--set", "target.model={d}/nowhere.gguf"), 2, "target.model: there is no file {d}/nowhere.gguf"),
    ((*TRAIN, "--set", "target.model=models/mistyped"), 1, "target.model=models/mistyped: no directory here"),
    ((*TRAIN, "--set", "learning_rate=1"), 2, "did you mean training.lr or training.min_lr or"),
    ((*TRAIN, "--set", "taining.epochs=1"), 2, "did you mean training?"),
    (("full",), 2, "Give its parameters with -f FILE"),
    (("full", "-f", "{d}/none.yaml"), 2, "{d}/none.yaml: cannot be read"),
    (("full", "-f", "{d}/rows.jsonl"), 2, "rows.jsonl"),
    (("init", "{d}/rows.jsonl", "--model", "x", "--rows", "y"), 2, "is there already"),
    (("evaluate", "--set", "name=none"), 1, "name=none: there is no run in"),
    (("export", "--set", "name=none"), 1, "name=none: there is no run in"),
    (("evaluate", "--dry-run"), 2, "trains nothing"),
    (("status", "none"), 2, "none: there is no such run"),
    (("logs", "../x"), 2, "is no name of a run"),
    (("resume", "none"), 2, "none: there is no such run"),
    (("clean", "--run", "none"), 2, "there is no such run"),
    (("clean", "--run", "../.."), 2, "is no name of a run"),
]

CACHE = [
    (("buidl",), 2, "invalid choice: 'buidl'"),
    (("build", "{d}/nowhere.jsonl"), 1, "nothing at"),
    (("build", "{d}/rows.jsonl"), 1, "Set rows.vocabulary"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "many"), 2, "invalid int value: 'many'"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "5"), 1, "not in 0..4"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "300", "--set", "max_token=3"), 1, "max_token"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "300", "--set", "max_tokens"), 1, "expected field=value"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "300", "--set", "template={d}"), 0, ""),  # of no use, no harm
    (
        ("build", "{d}/chat.jsonl", "--tokenizer", "{d}/target", "--set", "template={d}"),
        1,
        "rows.template: {d}: Is a dir",
    ),
    (("build", "{d}/chat.jsonl", "--tokenizer", "{d}/target", "--set", "template={d}/x"), 1, "no file at {d}/x"),
    (("build", "{d}/chat.jsonl", "--tokenizer", "{d}"), 1, "no tokenizer in it"),
    (("build", "{d}/cut.jsonl.gz", "--vocabulary", "300"), 1, "cut.jsonl.gz"),
    (("build", "{d}/cut.parquet", "--vocabulary", "300"), 1, "cut.parquet"),
    (("build", "{d}/empty.jsonl", "--vocabulary", "300"), 1, "empty.jsonl"),
    (("build", "{d}/picture.png", "--vocabulary", "300"), 1, "picture.png"),
    (("build", "{d}/rows.jsonl", "--vocabulary", "300", "--home", "{d}/rows.jsonl"), 1, "rows.jsonl"),
    (("inspect", "abcdef"), 1, "abcdef: no such cache"),
    (("inspect", "{key}", "--row", "999"), 1, "--row 999: expected 0.."),
    (("verify", "{d}"), 1, "no zarr.json in it"),
    (("remove", "{d}", "--yes"), 1, "not a directory right below the tokens"),
    (("remove",), 1, "expected a CACHE or --slices"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    d = tmp_path_factory.mktemp("mistakes")
    write_rows(d / "rows.jsonl")
    make_target(d / "target")
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    (d / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (d / "cut.jsonl.gz").write_bytes(gzip.compress((d / "rows.jsonl").read_bytes() * 50)[:-200])
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}), d / "whole.parquet")
    (d / "cut.parquet").write_bytes((d / "whole.parquet").read_bytes()[:-40])
    (d / "empty.jsonl").touch()
    (d / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    rows = RowsConfig(source=str(d / "rows.jsonl"), vocabulary=300)
    key = build(rows, home=d / "home", tokenizer=None, vocabulary=None).name
    return {"d": str(d), "key": key[:8]}


def answer(
    main: Callable[[list[str]], int], arguments: tuple[str, ...], inputs: dict[str, str], capsys: Any
) -> tuple[int, str, float]:
    started = time.monotonic()
    try:
        code = main([argument.format(**inputs) for argument in arguments])
    except SystemExit as end:  # argparse's own
        code = int(end.code or 0)
    seconds = time.monotonic() - started
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.err, seconds


@pytest.fixture(autouse=True)
def no_server(inputs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that is found after a server was started for it has cost its maker half a minute."""
    monkeypatch.setenv("DFLASH_HOME", f"{inputs['d']}/home")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(run_here, "choose_server", lambda: "http://127.0.0.1:1/api")
    monkeypatch.setattr(run_here, "start_server", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setattr(run_here, "_speak_plainly", lambda: None)
    monkeypatch.setattr(os, "chdir", lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What any command imports is not what its answer takes."""
    import flows.full
    import flows.regenerate  # noqa: F401


@pytest.mark.parametrize(("arguments", "code", "says"), FLOWS)
def test_dflash_train_answers_in_one_line(
    arguments: tuple[str, ...], code: int, says: str, inputs: dict[str, str], capsys: Any
) -> None:
    _check(flows_cli.main, arguments, code, says, inputs, capsys)


@pytest.mark.parametrize(("arguments", "code", "says"), CACHE)
def test_python_m_cache_answers_in_one_line(
    arguments: tuple[str, ...], code: int, says: str, inputs: dict[str, str], capsys: Any
) -> None:
    home = () if "--home" in arguments or arguments[0] == "buidl" else ("--home", "{d}/home")
    _check(cache_cli.main, (*arguments, *home), code, says, inputs, capsys)


def _check(main: Any, arguments: tuple[str, ...], code: int, says: str, inputs: dict[str, str], capsys: Any) -> None:
    got, err, seconds = answer(main, arguments, inputs, capsys)
    assert got == code, err
    assert says.format(**inputs) in err
    lines = [line for line in err.splitlines() if line and not line.startswith(("usage:", " ", "Tokenising"))]
    assert len(lines) <= 1, err
    assert all(len(line) < 1500 for line in lines)
    assert seconds < SLOWEST_S


def test_there_are_forty() -> None:
    assert len([*FLOWS, *CACHE]) >= 40


def test_what_nobody_expected_is_one_line_and_a_log(
    inputs: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*_: Any) -> None:
        raise pa.ArrowInvalid("a page is\ndamaged")

    monkeypatch.setattr(cache_cli, "entries", broken)
    code, err, _ = answer(cache_cli.main, ("list", "--home", "{d}/home"), inputs, capsys)
    assert code == 1
    log = Path(inputs["d"]) / "home/logs/errors.log"
    assert err.startswith("ArrowInvalid: a page is damaged. ")
    assert err.strip().endswith(f"The traceback is in {log}.")
    assert "in broken" in log.read_text()
