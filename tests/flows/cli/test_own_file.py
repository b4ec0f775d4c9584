"""A file of one's own: what `init` writes is whole and accepted; `-f` reads it; help and schema know every field."""

import inspect
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_inputs import make_target, write_rows

import flows.__main__ as flows_cli
from flows.cli import own_file, run_here
from flows.cli.fields import FLOWS, Everything, all_fields, json_schema
from flows.cli.own_file import read_file
from flows.cli.presets import load_flow, read_deployments
from flows.errors import BadParameter
from flows.runs.parameters import repository


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a person with rows and a target of their own."""
    write_rows(tmp_path / "rows.jsonl")
    make_target(tmp_path / "target")
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_here.os, "chdir", lambda _: None)
    monkeypatch.setattr(run_here, "choose_server", lambda: None)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert flows_cli.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("gpus", [0, 8])
def test_init_writes_every_field_and_what_it_writes_is_accepted(
    directory: Path, gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_file, "gpu_count", lambda: gpus)
    monkeypatch.setattr(own_file, "_mask_token", lambda _: (7, "nothing uses it"))
    run(capsys, "init", "mine.yaml", "--model", "target", "--rows", "rows.jsonl")
    text = (directory / "mine.yaml").read_text()
    for field in all_fields().values():
        assert f"{field.path.rpartition('.')[2]}: " in text or field.path == "override"
    schema = Path(text.splitlines()[0].partition("$schema=")[2])
    jsonschema.validate(yaml.safe_load(text), json.loads(schema.read_text()))
    shown = yaml.safe_load(run(capsys, "train", "-f", "mine.yaml", "--show", "--set", "training.epochs=9"))
    assert shown["name"] == "mine"
    assert shown["rows"]["source"] == str(directory / "rows.jsonl")
    assert (shown["target"]["model"], shown["target"]["dtype"]) == (
        str(directory / "target"),
        "bfloat16" if gpus else "float32",
    )
    assert (shown["training"]["epochs"], shown["drafter"]["mask_token_id"]) == (9, 7)
    # What a line behind # says is the default: with all of them taken away, the parameters are the same.
    whole = "\n".join(line.replace("#", "", 1) if _is_default(line) else line for line in text.splitlines())
    (directory / "whole.yaml").write_text(whole)
    again = yaml.safe_load(run(capsys, "train", "-f", "whole.yaml", "--show", "--set", "training.epochs=9"))
    assert again == shown


def _is_default(line: str) -> bool:
    return line.lstrip().startswith("#") and not line.lstrip().startswith("# ")


def test_one_file_serves_all_flows(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"name": "mine", "rows": {"source": "rows.jsonl"}, "target": {"model": "target"}, "evaluation": None}
    (directory / "mine.yaml").write_text(yaml.safe_dump(tree | {"generation": {"rows": 3}}))
    taken = {
        "prepare": {"rows", "target"},
        "evaluate": {"name", "evaluation"},
        "export": {"name"},
        "regenerate": {"name", "rows", "target", "generation"},
        "full": {"name", "rows", "target", "drafter", "training", "evaluation", "export"},
    }
    for flow, names in taken.items():
        assert names <= yaml.safe_load(run(capsys, flow, "-f", "mine.yaml", "--show")).keys()
    (directory / "mine.yaml").write_text(yaml.safe_dump(tree | {"trainig": {"epochs": 3}}))
    assert flows_cli.main(["train", "-f", "mine.yaml", "--show"]) == 2
    assert "trainig: there is no such field; did you mean training?" in capsys.readouterr().err


def test_relative_paths_are_the_callers_and_a_files_are_its_own(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "below").mkdir()
    tree: dict[str, Any] = {"name": "mine", "rows": {"source": ["a.jsonl", "/b.jsonl", "$DFLASH_HOME/c.jsonl"]}}
    (directory / "below/mine.yaml").write_text(yaml.safe_dump(tree | {"target": {"model": "some/name"}}))
    base = directory / "below"
    read = read_file(base / "mine.yaml")
    assert read["rows"]["source"] == [str(base / "a.jsonl"), "/b.jsonl", "$DFLASH_HOME/c.jsonl"]
    assert read["target"]["model"] == "some/name", "no such directory: a name of the hub"
    out = run(capsys, "train", "-f", "below/mine.yaml", "--show", "--set", "target.model=target")
    assert yaml.safe_load(out)["target"]["model"] == str(directory / "target")
    out = run(capsys, "demo", "--show", "--set", "rows.source=rows*.jsonl", "--set", "export.path=out")
    shown = yaml.safe_load(out)
    assert shown["rows"]["source"] == str(directory / "rows*.jsonl")
    assert shown["export"]["path"] == str(directory / "out")
    assert shown["target"]["model"].startswith(str(directory / "home")), "a preset's own paths stay"


def test_file_that_is_none_is_refused(directory: Path) -> None:
    for text, message in (("a: [1", "mine.yaml"), ("- 1", "no fields in it"), ("", "no fields in it")):
        (directory / "mine.yaml").write_text(text)
        with pytest.raises(BadParameter, match=message):
            read_file(directory / "mine.yaml")


def test_help_lists_each_field_with_type_default_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        flows_cli.main(["train", "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    for field in all_fields().values():
        assert (f"  {field.path} " in said) is not field.path.startswith("generation.")
        assert field.description, f"{field.path} has a description"
    assert "  training.lr                    number > 0, default 0.0006\n      peak learning rate\n" in said
    assert 'float32 | bfloat16, default "bfloat16"' in said
    assert "integer or list of integer, default 5" in said


def test_every_flow_takes_known_fields_only() -> None:
    deployed = {one.entrypoint for one in read_deployments(repository()).values()}
    assert deployed <= set(FLOWS.values())
    for entrypoint in FLOWS.values():
        assert inspect.signature(load_flow(entrypoint).fn).parameters.keys() <= Everything.model_fields.keys()


def test_schema_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(run(capsys, "schema"))
    assert schema == json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"name": "x", "training": {"lr": 6e-4}}, schema)
    for wrong in ({"training": {"lr": -1}}, {"training": {"epoch": 1}}, {"nmae": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
