"""The flow of answers: what it hands to the stage, what a refusal leaves behind. The stage is a stand-in."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash.answers.parameters import AnswersConfig
from dflash.errors import ConfigMismatch
from flows.cli.overrides import check_parameters
from flows.regenerate import regenerate
from flows.stage import process as child

pytestmark = pytest.mark.usefixtures("server")

# Stands in for `python -m dflash generate`: refuses another temperature, as the header of real answers does.
STAGE = """
import json, sys
from pathlib import Path
command, path = sys.argv[1], Path(sys.argv[2])
assert command == "generate"
proposed = path / sys.argv[sys.argv.index("--config") + 1]
config = json.loads(proposed.read_text())
if len((path / "attempts").read_text() if (path / "attempts").exists() else "") < config["generation"]["seed"]:
    for file, text in (("attempts", "x"), ("shard-00000.jsonl", "{}\\n")):
        with (path / file).open("a") as stream:
            stream.write(text)
    sys.exit(9)
header = path / "header.json"
if not header.exists():
    header.write_text(json.dumps(config["generation"]["temperature"]))
with (path / "attempts").open("a") as stream:
    stream.write("x")
if json.loads(header.read_text()) != config["generation"]["temperature"]:
    report = {"type": "ConfigMismatch", "module": "dflash.errors", "message": "generation.temperature: no"}
    (path / "error-generate.json").write_text(json.dumps(report))
    sys.exit(2)
proposed.replace(path / "config.json")
counts = {"path": "answers.jsonl", "answers": 1234, "rows": 1200, "tokens": 9, "cut": 2, "refused": {"empty": 3}}
(path / "answers.json").write_text(json.dumps(counts))
"""


@pytest.fixture
def tree(home: Path, rows: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    stage = tmp_path / "stage.py"
    stage.write_text(STAGE)
    monkeypatch.setattr(child, "PROGRAM", (sys.executable, str(stage)))
    return {"name": "own", "rows": {"source": str(rows)}, "target": {"model": str(target)}}


def run(tree: dict[str, Any], **changes: Any) -> Any:
    return regenerate(**check_parameters(regenerate.fn, tree | changes), return_state=True)


def test_stage_gets_the_resolved_parameters(home: Path, tree: dict[str, Any]) -> None:
    state = run(tree, generation={"only_missing": "$DFLASH_HOME/answers/before", "max_new_tokens": 7})
    assert state.message.startswith("1,234 answers to 1,200 rows, 9 tokens, 2 cut by the limit, 3 rows refused, in ")
    assert state.result()["rows"] == 1200
    config = AnswersConfig.model_validate_json((home / "answers/own/config.json").read_text())
    assert config.generation.only_missing == str(home / "answers/before")
    assert config.generation.max_new_tokens == 7
    assert config.rows.source == tree["rows"]["source"]


def test_refusal_is_not_tried_again_and_leaves_the_parameters_that_were(home: Path, tree: dict[str, Any]) -> None:
    run(tree)
    before = (home / "answers/own/config.json").read_text()
    state = run(tree, generation={"temperature": 0.5})
    with pytest.raises(ConfigMismatch, match=r"generation\.temperature: no"):
        state.result()
    assert json.loads((home / "answers/own/config.json").read_text()) == json.loads(before)
    assert (home / "answers/own/attempts").read_text() == "xx"


def test_answering_that_dies_is_tried_again_as_long_as_it_answers(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.stage.attempts.DELAYS_S", (0.0, 0.0))
    assert run(tree, generation={"seed": 5}).is_completed()
    assert (home / "answers/own/attempts").read_text() == 6 * "x"
