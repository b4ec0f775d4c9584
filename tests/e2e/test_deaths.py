"""With a real server, worker and deployments: who may die in mid-training, and what the next run does about it.

    make test-e2e        # about five minutes

One site serves all tests; they run in the order in which they stand. A silent run is marked Crashed 150 s after its
last heartbeat, and the other tests run meanwhile.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from prefect_site import ROOT, Site, wait_for
from safetensors.numpy import load_file
from tiny_run import EPOCHS, TRAINING, tiny_tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    tree = tiny_tree(directory)

    def changes(deployments: dict[str, Any]) -> None:
        deployments["train"]["parameters"] = tree
        nightly = deployments["nightly-epoch"]
        nightly["parameters"] = tree | {"name": "nightly", "training": TRAINING | {"epochs_per_run": 1}}
        nightly["schedules"] = [{"interval": 20, "slug": "nightly"}]

    site = Site(directory, changes)
    try:
        site.start_server()
        site.python(str(ROOT / "scripts/setup_automations.py"))
        site.deploy()
        site.prefect("deployment", "schedule", "pause", "train/nightly-epoch", schedule(site)["id"])
        site.start_worker()
        yield site
    finally:
        site.close()


def checkpoints(site: Site, name: str) -> list[str]:
    directory = site.home / "runs" / name / "checkpoints"
    return sorted(path.name for path in directory.glob("epoch-???-step-??????")) if directory.is_dir() else []


def wait_until_training(site: Site, name: str, beyond: str = "epoch-000-step-000000") -> None:
    """Until a checkpoint lies behind and the training still runs."""
    wait_for(f"a checkpoint of {name}", lambda: any(found > beyond for found in checkpoints(site, name)))


def trained(site: Site, name: str) -> dict[str, Any]:
    file = site.home / "runs" / name / "train.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"finished": False}
    return result


def weights(site: Site, name: str) -> dict[str, Any]:
    newest = site.home / "runs" / name / "checkpoints" / checkpoints(site, name)[-1]
    return load_file(newest / "drafter.safetensors") | load_file(newest / "optimizer.safetensors")


def assert_same_weights(site: Site, name: str) -> None:
    """To the last bit as those of the run that nothing disturbed."""
    expected, found = weights(site, "whole"), weights(site, name)
    assert trained(site, name)["finished"]
    assert expected.keys() == found.keys()
    assert [key for key, value in expected.items() if (found[key] != value).any()] == []


def test_schedule_paused_by_hand_stays_paused_when_deployed_again(site: Site) -> None:
    site.prefect("deploy", "--all")
    assert schedule(site)["active"] is False


def test_deployed_run_trains_to_the_end(site: Site) -> None:
    said = site.prefect("deployment", "run", "train/train", "--param", 'name="whole"')
    found = re.search(r"UUID: (\S+)", said)
    assert found, said
    run = found[1]
    site.wait_for_state(run, "Completed")
    flow_run = site.call("GET", f"/flow_runs/{run}")
    assert flow_run["name"] == f"train whole epoch 1/{EPOCHS}"
    assert flow_run["state"]["message"].startswith(f"{EPOCHS}/{EPOCHS} epochs")


@pytest.fixture(scope="module")
def silent_run(site: Site) -> str:
    """A night's run in which flow and worker were killed after two epochs: nobody is left to say so."""
    run = site.run_deployment("train/nightly-epoch", {"training": {"epochs_per_run": EPOCHS - 1}})
    wait_until_training(site, "nightly", beyond="epoch-002-step-000000")
    assert site.worker is not None
    site.worker.kill()
    for process in site.flow_processes():
        process.kill()
    site.worker.wait()
    return run


def test_worker_and_flow_killed_leave_no_process_and_a_run_that_looks_alive(site: Site, silent_run: str) -> None:
    wait_for("the training process to die with its flow", lambda: not site.training_processes(), timeout_s=5)
    assert site.state(silent_run) == "Running"
    site.start_worker()


def test_cancel_stops_all_processes_of_a_run_and_is_cancelled(site: Site) -> None:
    long = {"epochs": 100, "processes": 2, "tokens_per_step": 128}
    run = site.run_deployment("train/train", {"name": "two", "training": long})
    wait_until_training(site, "two")
    assert len(site.training_processes()) == 3, "torchrun and its two"
    site.prefect("flow-run", "cancel", run)
    site.wait_for_state(run, "Cancelled", timeout_s=60)
    assert trained(site, "two")["checkpoint"].endswith(checkpoints(site, "two")[-1])
    assert site.training_processes() == []


def test_cancel_finishes_the_step_writes_a_checkpoint_and_is_cancelled(site: Site) -> None:
    run = site.run_deployment("train/train", {"name": "cancelled"})
    wait_until_training(site, "cancelled")
    site.prefect("flow-run", "cancel", run)
    site.wait_for_state(run, "Cancelled", timeout_s=60)
    assert not trained(site, "cancelled")["finished"]
    assert trained(site, "cancelled")["checkpoint"].endswith(checkpoints(site, "cancelled")[-1])
    assert site.training_processes() == []
    again = site.run_deployment("train/train", {"name": "cancelled"})
    site.wait_for_state(again, "Completed")
    assert_same_weights(site, "cancelled")


def kill_training(site: Site, name: str) -> None:
    """The process that trains: not the flow's own, which then tries again."""
    found = wait_for(f"the training of {name}", lambda: [one for one in site.training_processes() if trains(one, name)])
    found[0].kill()


def trains(process: psutil.Process, name: str) -> bool:
    try:
        command = process.cmdline()
        return "train" in command and any(part.endswith(f"/runs/{name}") for part in command)
    except psutil.Error:
        return False


def kill_flow(site: Site, name: str) -> None:
    found = wait_for(f"the training of {name}", lambda: [one for one in site.training_processes() if trains(one, name)])
    flow = found[0].parent()
    assert flow is not None
    flow.kill()


def test_run_that_dies_five_times_with_progress_in_between_is_finished(site: Site) -> None:
    run = site.run_deployment("train/train", {"name": "mortal"})
    newest = "epoch-000-step-000000"
    for number in range(5):
        wait_until_training(site, "mortal", beyond=newest)
        newest = checkpoints(site, "mortal")[-1]
        if number % 2:
            kill_flow(site, "mortal")
            site.wait_for_state(run, "Crashed", timeout_s=30)
        else:
            kill_training(site, "mortal")
    site.wait_for_state(run, "Completed", started_again=True)
    states = site.states(run)
    print("mortal:", states)
    assert [state for state in states if state in ("Crashed", "AwaitingRetry")] == 2 * ["Crashed", "AwaitingRetry"]
    tasks = site.call("POST", "/task_runs/filter", {"limit": 200, "task_runs": {"name": {"like_": "train mortal"}}})
    assert len(tasks) >= 6
    assert trained(site, "mortal")["resumed_from"] is not None
    assert_same_weights(site, "mortal")


def test_run_that_dies_three_times_without_progress_is_failed(site: Site) -> None:
    run = site.run_deployment("train/train", {"name": "stuck", "training": {"checkpoint_every_steps": 10_000}})
    for kill in (kill_training, kill_flow, kill_training):
        wait_for("the training", lambda: progress(site, "stuck") > 0)
        (site.home / "runs/stuck/progress-train.json").unlink()
        kill(site, "stuck")
    site.wait_for_state(run, "Failed", started_again=True)
    print("stuck:", site.states(run))
    assert site.states(run).count("Crashed") == 1
    assert not trained(site, "stuck")["finished"]


def progress(site: Site, name: str) -> float:
    """Steps that a training has done."""
    file = site.home / "runs" / name / "progress-train.json"
    with contextlib.suppress(FileNotFoundError):
        return float(json.loads(file.read_text())["done"])
    return 0


def test_server_restarted_does_not_end_the_run(site: Site) -> None:
    run = site.run_deployment("train/train", {"name": "server-restarted"})
    wait_until_training(site, "server-restarted")
    site.stop_server()
    site.start_server()
    site.wait_for_state(run, "Completed", timeout_s=240)
    assert_same_weights(site, "server-restarted")


def test_worker_killed_does_not_end_the_run(site: Site) -> None:
    run = site.run_deployment("train/train", {"name": "worker-killed"})
    wait_until_training(site, "worker-killed")
    assert site.worker is not None
    site.worker.kill()
    site.worker.wait()
    site.wait_for_state(run, "Completed")
    assert_same_weights(site, "worker-killed")


def test_silent_run_is_crashed_and_started_again_and_the_schedule_finishes_what_is_left(
    site: Site, silent_run: str
) -> None:
    site.start_worker()
    site.wait_for_state(silent_run, "Completed", timeout_s=300, started_again=True)
    found = site.call("GET", f"/flow_run_states/?flow_run_id={silent_run}")
    assert [state["message"][:22] for state in found if state["name"] == "Crashed"] == ["No heartbeat for 150 s"]
    assert trained(site, "nightly")["epochs_done"] == EPOCHS - 1, "as many as its first attempt was to reach"
    site.prefect("deployment", "schedule", "resume", "train/nightly-epoch", schedule(site)["id"])
    wait_for("the schedule to finish the plan", lambda: trained(site, "nightly")["finished"], timeout_s=400)
    site.prefect("deployment", "schedule", "pause", "train/nightly-epoch", schedule(site)["id"])
    assert_same_weights(site, "nightly")


def schedule(site: Site) -> dict[str, Any]:
    deployment = site.call("GET", "/deployments/name/train/nightly-epoch")
    only: dict[str, Any]
    (only,) = deployment["schedules"]
    return only


def test_rows_were_prepared_once_in_all(site: Site) -> None:
    tasks = site.call("POST", "/task_runs/filter", {"limit": 200, "task_runs": {"name": {"like_": "prepare"}}})
    states = [task["state_name"] for task in tasks]
    assert states.count("Completed") == 1
    assert states.count("Cached") == len(states) - 1 >= 6


def test_cancelled_runs_were_not_started_again(site: Site) -> None:
    runs = site.call("POST", "/flow_runs/filter", {"flow_runs": {"state": {"name": {"any_": ["Cancelled"]}}}})
    cancelled = {run["parameters"]["name"] for run in runs}
    assert {"cancelled", "two"} <= cancelled


def test_nothing_of_any_run_is_left(site: Site) -> None:
    assert os.path.exists(site.home / "runs")
    wait_for("the last flow to end", lambda: not site.flow_processes(), timeout_s=60)
    assert site.training_processes() == []
