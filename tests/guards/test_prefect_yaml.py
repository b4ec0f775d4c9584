"""prefect.yaml: every deployment is one that its flow takes and that Prefect serves as the design says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import pytest
import yaml

from flows.cli.overrides import check_parameters
from flows.cli.presets import load_flow, read_deployments

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRIES: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
NAMES = [entry["name"] for entry in ENTRIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_parameters_are_what_the_flow_takes(entry: dict[str, Any]) -> None:
    deployment = read_deployments(ROOT)[entry["name"]]
    flow = load_flow(deployment.entrypoint)
    check_parameters(flow.fn, deployment.parameters)
    schema = flow.parameters.model_dump()
    jsonschema.validate(deployment.parameters, schema)  # as the server does
    assert len(json.dumps(deployment.parameters)) < 10_000, "Prefect takes 512 KB; these are paths and small models"


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_every_parameter_of_the_form_is_described(entry: dict[str, Any]) -> None:
    schema = load_flow(read_deployments(ROOT)[entry["name"]].entrypoint).parameters.model_dump()
    bare = [name for name, field in schema["properties"].items() if not field.get("description")]
    for model in schema.get("definitions", {}).values():
        bare += [
            f"{model['title']}.{name}" for name, field in model["properties"].items() if not field.get("description")
        ]
    assert bare == []


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_entry_is_complete(entry: dict[str, Any]) -> None:
    assert ":" not in entry["entrypoint"], "a module path: a file would put flows/ first on sys.path"
    assert entry["description"]
    assert entry["tags"][0] == "dflash-train", "the automation watches runs with this tag only"
    variables = {"stream_output": False, "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
    assert entry["work_pool"]["job_variables"] == variables
    for schedule in entry.get("schedules", []):
        assert schedule["slug"], "without a slug, deploying again turns a paused schedule on"
        assert "active" not in schedule


def test_automations_watch_runs_of_our_deployments_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.events.schemas.events import RelatedResource
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from setup_automations import SILENT_AFTER_S, automations

    triggers = [EventTrigger.model_validate(one.trigger.model_dump(mode="json")) for one in automations()]
    run = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"}

    def heartbeat(tag: str) -> ReceivedEvent:
        tagged = RelatedResource({"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"})
        moment = {"occurred": "2026-01-01T00:00:00Z", "id": uuid4(), "received": "2026-01-01T00:00:00Z"}
        return ReceivedEvent(event="prefect.flow-run.heartbeat", resource=run, related=[tagged.model_dump()], **moment)

    for trigger in triggers:
        assert trigger.covers_resources(heartbeat("dflash-train").resource, heartbeat("dflash-train").related)
        assert not trigger.covers_resources(heartbeat("theirs").resource, heartbeat("theirs").related)
    every_s = int(ENTRIES[0]["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert 5 * every_s <= SILENT_AFTER_S


@pytest.mark.parametrize("name", ["demo", "train", "nightly-epoch", "regenerate"])
def test_what_writes_a_directory_runs_once_at_a_time(name: str) -> None:
    assert ENTRIES[NAMES.index(name)]["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_night_is_one_epoch_in_a_window() -> None:
    nightly = ENTRIES[NAMES.index("nightly-epoch")]
    assert nightly["schedules"][0]["cron"] == "0 22 * * *"
    assert nightly["parameters"]["training"]["epochs_per_run"] == 1
    assert nightly["parameters"]["training"]["until"] == f"06:00 {nightly['schedules'][0]['timezone']}"


def test_deployments_write_the_directory_themselves() -> None:
    assert "pull" not in yaml.safe_load((ROOT / "prefect.yaml").read_text())


def test_settings_are_ones_that_prefect_knows(tmp_path: Path) -> None:
    code = """
from prefect.settings import get_current_settings
s = get_current_settings()
print(s.server.analytics_enabled, s.server.ephemeral.startup_timeout_seconds, s.server.concurrency.lease_storage,
      s.flows.heartbeat_frequency, s.results.default_serializer, sorted(s.logging.extra_loggers),
      s.logging.to_api.when_missing_flow)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env | {"PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split(maxsplit=3) == [
        "False",
        "120",
        "prefect.server.concurrency.lease_storage.filesystem",
        "30 json ['cache', 'dflash', 'flows'] ignore\n",
    ]
