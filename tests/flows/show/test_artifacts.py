"""What the UI gets of a run, and that a slow or failing server neither ends a run nor holds it up."""

import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from tiny_inputs import VOCABULARY

from flows.cli.overrides import check_parameters
from flows.full import full
from flows.show import artifacts
from flows.show.artifacts import Reporter, reporting


@pytest.fixture
def tree(home: Path, rows: Path, target: Path) -> dict[str, Any]:
    return {
        "name": "Shown_1",
        "rows": {"source": str(rows)},
        "target": {"model": str(target)},
        "training": {"epochs": 2},
    }


def sent(tree: dict[str, Any]) -> dict[str, Any]:
    """The artifacts of a whole run, by key."""
    state = full(**check_parameters(full.fn, tree), return_state=True)
    assert state.is_completed()
    with get_client(sync_client=True) as client:
        this = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        return {artifact.key: artifact for artifact in client.read_artifacts(flow_run_filter=this)}


@pytest.mark.usefixtures("server")
def test_run_leaves_progress_tables_curves_and_report(tree: dict[str, Any]) -> None:
    found = sent(tree)
    kinds = {key.split("-", 1)[1]: artifact.type for key, artifact in found.items() if not key.startswith("shown-1")}
    assert kinds == {"prepare-progress": "progress", "token-cache": "table", "sample-rows": "markdown"}
    kinds = {key: artifact.type for key, artifact in found.items() if key.startswith("shown-1")}
    assert kinds.pop("shown-1-train-progress") == "progress"
    assert kinds == {
        "shown-1-pipeline": "table",
        "shown-1-loss": "image",
        "shown-1-training": "table",
        "shown-1-tau-while-training": "table",
        "shown-1-tau": "table",
        "shown-1-report": "markdown",
    }
    assert found["shown-1-pipeline"].description == "All are busy."
    assert "**w7 w8 w9 w10**" in next(a.data for key, a in found.items() if key.endswith("sample-rows"))
    assert f"{VOCABULARY:,}" in next(str(a.data) for key, a in found.items() if key.endswith("token-cache"))


@pytest.mark.usefixtures("server")
def test_artifact_that_cannot_be_sent_is_logged_and_the_run_goes_on(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = artifacts.send_new

    def broken(key: str, kind: str, data: object, description: str) -> UUID:
        if kind == "image":
            raise ConnectionError("no server")
        return send(key, kind, data, description)

    monkeypatch.setattr(artifacts, "send_new", broken)
    found = sent(tree)
    assert "An artifact of train could not be sent: ConnectionError: no server" in caplog.text
    assert "shown-1-pipeline" in found, "what comes after it is sent"


@pytest.mark.usefixtures("server")
def test_training_that_fails_leaves_what_it_had_come_to(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL_IN", "2")
    monkeypatch.setattr("flows.stage.attempts.MAX_FAILURES", 1)
    monkeypatch.setattr("flows.stage.attempts.DELAYS_S", (0.0,))
    state = full(**check_parameters(full.fn, tree | {"training": {"epochs": 3}}), return_state=True)
    assert state.is_failed()
    with get_client(sync_client=True) as client:
        this = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        found = {artifact.key: str(artifact.data) for artifact in client.read_artifacts(flow_run_filter=this)}
    assert found["shown-1-loss"].startswith("data:image/svg+xml;base64,")
    for what in ("epoch 1, step 10", "epoch-002-step-000000", "3.000", "2.0 GB", "123"):
        assert what in found["shown-1-training"], what
    assert found["shown-1-tau-while-training"].index("1.800") < found["shown-1-tau-while-training"].index("1.900")
    assert found["shown-1-tau-while-training"].count("best so far") == 1


@pytest.mark.usefixtures("server")
def test_what_is_sent_again_takes_the_place_of_what_was_there() -> None:
    @flow
    def shows() -> None:
        with reporting("again", "train") as reporter:
            for number in (1, 2):
                reporter.table("state", lambda number=number: [{"what": number}], f"the {number}.")  # type: ignore[misc]
                reporter.image("curve", lambda number=number: f"<svg>{number}</svg>", f"the {number}.")  # type: ignore[misc]

    state = shows(return_state=True)
    with get_client(sync_client=True) as client:
        this = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        found = client.read_artifacts(flow_run_filter=this)
    assert {artifact.key: artifact.description for artifact in found} == {
        "again-state": "the 2.",
        "again-curve": "the 2.",
    }
    assert len(found) == 2
    assert next(str(artifact.data) for artifact in found if artifact.type == "table") == '[{"what": 2}]'


def test_slow_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()
    senders = []

    def slow(*arguments: Any) -> UUID:
        senders.append(threading.current_thread().name)
        answers.wait(20)
        return UUID(int=0)

    monkeypatch.setattr(artifacts, "send_new", slow)
    monkeypatch.setattr(artifacts, "send_again", lambda *arguments: None)
    monkeypatch.setattr(artifacts, "LAST_WORDS_S", 0.2)
    reporter = Reporter("run", "train")
    reporter.start()
    start = time.monotonic()
    for _ in range(3):
        reporter.markdown("report", lambda: "text", "a report")
    assert time.monotonic() - start < 0.1
    reporter.close()
    assert time.monotonic() - start < 2
    assert "slow to answer" in caplog.text
    answers.set()
    assert set(senders) == {"reporter"}
