"""`compare A B`: what differs, by how much, and how sure that is; the page stands alone."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import flows.__main__ as flows_cli
from flows.show.two_runs import Measured, sections


def make_run(home: Path, name: str, lr: float, loss: float, tau: float, count: int = 20) -> Path:
    run = home / "runs" / name
    run.mkdir(parents=True)
    config = {"name": name, "home": str(home), "rows": {"source": "a.jsonl"}, "training": {"lr": lr, "epochs": 2}}
    (run / "config.json").write_text(json.dumps(config))
    line = {"epoch": 0, "steps": 10, "weight_sum": 1.0, "tokens_per_s": 50.0}
    lines: list[dict[str, Any]] = [
        line | {"step": 10 * i + 9, "loss": loss + 1 / (1 + i), "loss_sum": loss} for i in range(count)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    events = [
        {"event": "start", "commit": "abc"},
        {"event": "tau", "time": 1.0, "steps": 100, "value": tau, "se": 0.04},
    ]
    (run / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    measured = {"value": tau, "se": 0.03}
    decode = {"tau": tau, "by_group": {"a<b": {"tau": tau}}}
    evaluation = {"tau": {"before": None, "after": measured}, "by_group": {"a<b": measured | {"rows": 3}}}
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"decode": decode}))
    (run / "stages.json").write_text(json.dumps({"prepare": {"seconds": 2.0, "key": name}, "train": {"seconds": 70.0}}))
    return run


def test_tables_say_what_differs_and_how_sure_it_is(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "one", 0.1, 3.0, 1.2), make_run(tmp_path, "other", 0.2, 2.5, 1.3, count=10)]
    tables = sections(*map(Measured.read, runs))
    assert tables["Settings that differ"] == [
        ("training.lr", "0.1", "0.2", ""),
        ("rows, by content", "one", "other", ""),
    ]
    assert ("steps", "200", "100", "") in tables["Results"]
    assert ("loss", "3.000", "2.500", "-0.500") in tables["Results"]
    assert ("time of train", "1 min 10 s", "1 min 10 s", "") in tables["Results"]
    assert ("held out, teacher-forced", "1.200 ± 0.030", "1.300 ± 0.030", "+0.100 ± 0.042") in tables["τ"]
    assert ("  domain a<b", "1.200 ± 0.030", "1.300 ± 0.030", "+0.100 ± 0.042") in tables["τ"]
    assert ("  prompts of a<b", "1.200", "1.300", "+0.100") in tables["τ"]
    way = tables["Loss on the way"]
    assert len(way) == 10
    assert way[0] == ("step 20", "3.500", "3.000", "-0.500")
    assert way[-1] == ("step 200", "3.050", "–", ""), "the other one is not that far"


def test_page_stands_alone_and_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", 0.1, 3.0, 1.2)
    make_run(tmp_path, "other", 0.2, 2.5, 1.3, count=900)
    page = tmp_path / "page.html"
    assert flows_cli.main(["compare", "one", "other", "--home", str(tmp_path), "--html", str(page)]) == 0
    said, text = capsys.readouterr().out, page.read_text()
    for part in ("training.lr", "+0.100 ± 0.042", "domain a"):
        assert part in said
        assert part in text
    assert "a<b" in said
    assert "a<b" not in text, "names are escaped"
    assert not any(outside in text for outside in ("<script", "http:", "https:", "url("))
    pictures = [ElementTree.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in text.split("<svg")[1:]]
    assert len(pictures) == 3
    curves = [line.get("points", "") for line in pictures[0].iter("polyline")]
    assert [len(line.split()) for line in curves] == [20, 300], "thinned where it cannot be seen"
    assert len(list(pictures[2].iter("rect"))) == 4


def test_run_that_is_not_there_or_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", 0.1, 3.0, 1.2)
    (tmp_path / "runs/empty").mkdir()
    assert flows_cli.main(["compare", "one", "none", "--home", str(tmp_path)]) == 2
    assert "There are: " in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert flows_cli.main(["compare", "one", "empty", "--home", str(tmp_path), "--html", str(page)]) == 0
    assert flows_cli.main(["compare", "empty", "empty", "--home", str(tmp_path), "--html", str(page)]) == 0
