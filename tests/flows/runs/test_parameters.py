"""Paths of the parameters mean the same from any directory."""

from pathlib import Path

import pytest

from flows.cli.overrides import check_parameters
from flows.errors import BadParameter
from flows.evaluate import evaluate
from flows.export import export
from flows.full import full
from flows.regenerate import regenerate
from flows.runs.parameters import Parameters, repository, resolve_home, run_directory
from flows.train import train


def parameters(**changes: object) -> Parameters:
    tree = {"name": "x", "rows": {"source": "examples/smollm2-chat.jsonl"}, "target": {"model": "some/model"}}
    return Parameters.model_validate(tree | changes)


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_HOME", raising=False)


def test_home_is_the_parameter_then_the_variable_then_var(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_home(None) == repository() / "var"
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    assert resolve_home(None) == tmp_path
    assert resolve_home("elsewhere") == repository() / "elsewhere"


def test_working_directory_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = parameters().resolved()
    monkeypatch.chdir(tmp_path)
    assert parameters().resolved() == before
    assert before.rows.source == str(repository() / "examples/smollm2-chat.jsonl")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("some/model", "some/model"),
        ("$DFLASH_HOME/targets/a", "{home}/targets/a"),
        ("${DFLASH_HOME}/b.gguf", "{home}/b.gguf"),
        ("files/c.gguf", "{root}/files/c.gguf"),
        ("./d", "{root}/d"),
        ("examples", "{root}/examples"),
        ("/e", "/e"),
    ],
)
def test_target_is_a_path_or_a_hub_name(model: str, expected: str, tmp_path: Path) -> None:
    resolved = parameters(home=str(tmp_path), target={"model": model}).resolved()
    assert resolved.target.model == expected.format(home=tmp_path, root=repository())


def test_dflash_home_in_sources_is_the_home_of_the_run(tmp_path: Path) -> None:
    rows = {"source": ["$DFLASH_HOME/a/*.parquet", "s3://bucket/b.parquet", "c.jsonl"], "template": "t.jinja"}
    resolved = parameters(home=str(tmp_path), rows=rows).resolved()
    assert resolved.rows.source == [f"{tmp_path}/a/*.parquet", "s3://bucket/b.parquet", f"{repository()}/c.jsonl"]
    assert resolved.rows.template == f"{repository()}/t.jinja"


def test_resolving_twice_changes_nothing() -> None:
    once = parameters(export={"path": "out"}).resolved()
    assert once.resolved() == once
    assert once.export.path == str(repository() / "out")
    assert once.run_directory == repository() / "var/runs/x"


@pytest.mark.parametrize("name", ["", "..", "/x", "a/../..", ".hidden"])
def test_name_leads_out_of_the_runs_from_nowhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="no name of a run"):
        run_directory(name, str(tmp_path))
    for flow in (train, evaluate, export, full, regenerate):
        with pytest.raises(BadParameter, match="name: String should match pattern"):
            check_parameters(flow.fn, {"name": name})
