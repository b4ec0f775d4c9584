"""A flow run of a deployment that was given only some fields of a model: the others are the deployment's."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows.train import train

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def tree(home: Path, rows: Path, target: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "rows": {"source": str(rows), "columns": {"ids": "input_ids", "mask": "loss_mask"}},
        "target": {"model": str(target), "dtype": "float32"},
        "drafter": {"kind": "dspark", "confidence": True},
        "training": {"epochs": 3, "loss": "dspark", "lr": 0.002, "anchors": 7},
    }


def run_deployed(tree: dict[str, Any], **given: Any) -> tuple[str, str]:
    """As a worker runs it. Returns the name of the flow run and the message of its last state."""
    from prefect.flow_engine import run_flow

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(train), name="tiny", parameters=tree)
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=given)
        run_flow(train, flow_run, parameters=flow_run.parameters)
        ended = client.read_flow_run(flow_run.id)
    assert ended.state is not None
    return ended.name, str(ended.state.message)


def test_fields_that_a_run_was_not_given_are_those_of_its_deployment(
    home: Path, tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name, message = run_deployed(tree, training={"epochs": 2}, rows={"source": tree["rows"]["source"], "held_out": 0.4})
    config = json.loads((home / "runs/tiny/config.json").read_text())
    training = config["training"]
    assert (training["epochs"], training["loss"], training["lr"], training["anchors"]) == (2, "dspark", 0.002, 7)
    assert (config["rows"]["held_out"], config["rows"]["columns"]["ids"]) == (0.4, "input_ids")
    assert name == "train tiny epoch 1/2"
    assert message.startswith("2/2 epochs")
    taken = "training.loss, training.lr, training.anchors"
    assert any(taken in line and "rows.columns" in line for line in caplog.messages), "and it is said"


def test_name_of_a_run_counts_the_epochs_of_its_deployment(home: Path, tree: dict[str, Any]) -> None:
    name, _ = run_deployed(tree, training={"lr": 0.001})
    assert name == "train tiny epoch 1/3"
    assert json.loads((home / "runs/tiny/config.json").read_text())["training"]["lr"] == 0.001


def test_fields_within_a_model_within_a_model_are_completed_too(home: Path, tree: dict[str, Any]) -> None:
    run_deployed(tree, rows={"source": tree["rows"]["source"], "columns": {"ids": "input_ids"}})
    assert json.loads((home / "runs/tiny/config.json").read_text())["rows"]["columns"]["mask"] == "loss_mask"
