"""prefect.yaml, `--set`, and errors that name the field."""

from pathlib import Path
from typing import Any

import pytest

from cache.config import RowsConfig
from dflash.config import TargetConfig, TrainingConfig
from flows.cli.overrides import check_parameters, with_overrides
from flows.cli.presets import read_deployments
from flows.errors import BadParameter
from flows.runs.parameters import Home, Name

TREE: dict[str, Any] = {
    "name": "x",
    "rows": {"source": "a.jsonl"},
    "target": {"model": "m"},
    "training": {"epochs": 2},
}


def flow_like(
    name: Name, rows: RowsConfig, target: TargetConfig, training: TrainingConfig = TrainingConfig(), home: Home = None
) -> None: ...


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.epochs=5", ("training", "epochs"), 5),
        ("rows.groups=[math, facts]", ("rows", "groups"), ["math", "facts"]),
        ("evaluation.prompts=3", ("evaluation", "prompts"), 3),
        ("name=a=b", ("name",), "a=b"),
        ("home=null", ("home",), None),
        ("training.lr=6e-4", ("training", "lr"), 6e-4),
        ("training.lr=1E+2", ("training", "lr"), 100.0),
        (
            "rows.template_arguments.strftime_now=2025-01-31",
            ("rows", "template_arguments", "strftime_now"),
            "2025-01-31",
        ),
        ("rows.source=*.jsonl", ("rows", "source"), "*.jsonl"),
        ("rows.source=/data/b #2.jsonl", ("rows", "source"), "/data/b #2.jsonl"),
        ("rows.source=[v2] chat/*.jsonl", ("rows", "source"), "[v2] chat/*.jsonl"),
        ("rows.source=#2.jsonl", ("rows", "source"), "#2.jsonl"),
        ("target.devices=auto", ("target", "devices"), "auto"),
        ("target.devices=cuda:0", ("target", "devices"), ["cuda:0"]),
        ("target.devices=[cuda:0, cuda:1]", ("target", "devices"), ["cuda:0", "cuda:1"]),
        ("name=2024", ("name",), "2024"),
        ("name=no", ("name",), "no"),
        ("rows.groups=math", ("rows", "groups"), ["math"]),
        ("rows.groups=[2024, on]", ("rows", "groups"), ["2024", "on"]),
        ("rows.groups=null", ("rows", "groups"), None),
        ("rows.source=[a.jsonl, b.jsonl]", ("rows", "source"), ["a.jsonl", "b.jsonl"]),
        ("export.layouts=gguf", ("export", "layouts"), ["gguf"]),
        ("drafter.taps=3", ("drafter", "taps"), 3),
        ("drafter.taps=[1, 2]", ("drafter", "taps"), [1, 2]),
        ("drafter.sliding_layers=1", ("drafter", "sliding_layers"), [1]),
        ("training.betas=[0.9, 0.98]", ("training", "betas"), [0.9, 0.98]),
        ("training.anchors=0.5", ("training", "anchors"), 0.5),
        ("rows.columns.group=", ("rows", "columns", "group"), ""),
    ],
)
def test_set_reads_what_the_field_is_and_leaves_the_preset_alone(
    override: str, path: tuple[str, ...], value: object
) -> None:
    changed: Any = with_overrides(TREE, [override])
    for key in path:
        changed = changed[key]
    assert changed == value
    assert TREE["training"] == {"epochs": 2}


@pytest.mark.parametrize("override", ["training.epochs", "=3", "training..epochs=3", "training.lr=[1", "name.first=x"])
def test_set_that_says_nothing_is_refused(override: str) -> None:
    with pytest.raises(BadParameter):
        with_overrides(TREE, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.epoch=2"], "training.epoch: there is no such field; did you mean training.epochs?"),
        (["training.epochs=0"], "training.epochs: Input should be greater than or equal to 1; got 0."),
        (["training.epochs=many"], "training.epochs: "),
        (["epochs=2"], "epochs: there is no such field; did you mean training.epochs?"),
        (["model=2"], "model: there is no such field; did you mean target.model?"),
        (["targets.model=2"], "targets: there is no such field; did you mean target?"),
        (["zzz=2"], "zzz: there is no such field; known here: name, rows, target, training, home."),
        (["rows.columns.idz=x"], "rows.columns.idz: there is no such field; did you mean rows.columns.ids?"),
        (["training.betas=3"], "training.betas: "),
        (["training.anchors=[1]"], "training.anchors: "),
        (["name=../x"], "name: "),
        (["rows={}"], "rows.source: this field is needed and has no default; set it in prefect.yaml or with --set"),
    ],
)
def test_error_names_the_field_as_a_path(overrides: list[str], message: str) -> None:
    with pytest.raises(BadParameter) as caught:
        check_parameters(flow_like, with_overrides(TREE, overrides))
    assert any(line.startswith(message) for line in str(caught.value).splitlines()), str(caught.value)


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(BadParameter) as caught:
        check_parameters(flow_like, with_overrides(TREE, ["training.epochs=0", "rows.held_out=2"]))
    assert "training.epochs" in str(caught.value)
    assert "rows.held_out" in str(caught.value)


def test_good_parameters_become_models_and_defaults_stay() -> None:
    arguments = check_parameters(flow_like, TREE)
    assert arguments["training"].epochs == 2
    assert arguments["home"] is None


def test_missing_file_says_where(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=str(tmp_path)):
        read_deployments(tmp_path)
