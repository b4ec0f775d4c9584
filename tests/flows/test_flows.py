"""Flows on a server: what a rerun repeats, what a retry repeats, and what is refused. The stages are stand-ins."""

import json
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Scheduled

from cache.build import build
from cache.disk.store import TokenCache
from cache.errors import BadSource
from dflash.errors import ConfigMismatch, RunLocked
from flows import prepare as prepare_module
from flows import serve_check as serve_check_module
from flows.cli.overrides import check_parameters
from flows.errors import BadParameter, CannotFit, NoProgress, StageKilled
from flows.evaluate import evaluate
from flows.export import export
from flows.full import full
from flows.prepare import prepare
from flows.runs.directory import stage_alone
from flows.runs.ledger import mark_finished, seconds_by_stage
from flows.serve_check import serve_check
from flows.show.summary import summary_table
from flows.show.tables import served_line
from flows.stage import attempts as attempts_module
from flows.stage.attempts import _begin
from flows.train import outcome, train, train_drafter

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def tree(home: Path, rows: Path, target: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "rows": {"source": str(rows)},
        "target": {"model": str(target)},
        "training": {"epochs": 2},
    }


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the token caches that were asked of the writer, which is not asked on a hit."""
    made: list[str] = []

    def counted(*arguments: Any, **options: Any) -> Path:
        path = build(*arguments, **options)
        made.append(path.name)
        return path

    monkeypatch.setattr(prepare_module, "build", counted)
    return made


def run(flow: Any, tree: dict[str, Any], **changes: Any) -> Any:
    return flow(**check_parameters(flow.fn, tree | changes))


def stages_run(home: Path) -> list[str]:
    return (home / "runs/tiny/stages_run").read_text().split()


def test_full_run_makes_everything_and_a_second_repeats_nothing(
    home: Path, tree: dict[str, Any], builds: list[str]
) -> None:
    first = run(full, tree)
    assert stages_run(home) == ["check", "train", "evaluate", "export"]
    second = run(full, tree)
    assert stages_run(home) == ["check", "train", "evaluate", "export"]
    assert len(builds) == 1
    assert first == second == json.loads((home / "runs/tiny/summary.json").read_text())
    assert {"rows", "tokens", "dropped", "seconds", "busy", "tau", "lossless", "report", "export"} <= first.keys()
    assert first["tau"] == {"before": 1.0, "after": 1.5}
    assert first["busy"] == {"read": 0.75, "target": 0.75, "train": 0.75}
    assert first["lossless"] is True


def test_an_export_for_llama_cpp_is_tried_in_its_server_once(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["export"] = {"layouts": ["dflash", "gguf"]}
    first = run(full, tree)
    assert stages_run(home) == ["check", "train", "evaluate", "export", "serve-check"]
    assert first["served"] == json.loads((home / "runs/tiny/served.json").read_text())
    line = "2 of 2 texts equal; τ 1.500 in llama.cpp, 1.490 of ours; 10.0 tokens/s plain, 8.0 speculative (0.80×)"
    assert served_line(first["served"]) == f"{line}; WRONG: a stop text"
    assert summary_table(first).row_count == summary_table(first | {"served": None}).row_count + 1
    assert run(serve_check, {"name": "tiny"}) == first["served"]
    assert run(full, tree) == first
    run(full, tree, evaluation={"prompts": 3})
    assert stages_run(home)[5:] == ["evaluate", "serve-check"]
    monkeypatch.setattr(serve_check_module, "is_installed", lambda: False)
    assert run(full, tree)["served"] is None
    with pytest.raises(BadParameter, match=r"xllamacpp and openai are not installed; pip install"):
        run(serve_check, {"name": "tiny"})


def test_what_repeats_evaluation_and_export(home: Path, tree: dict[str, Any]) -> None:
    run(full, tree)
    run(full, tree, evaluation={"prompts": 3})
    assert stages_run(home)[4:] == ["evaluate"]
    run(full, tree, evaluation={"prompts": 3}, export={"path": str(home / "elsewhere")})
    assert stages_run(home)[5:] == ["export"]
    (home / "runs/tiny/report.html").unlink()
    run(evaluate, {"name": "tiny"})
    assert stages_run(home)[6:] == ["evaluate"]
    run(export, {"name": "tiny"})
    assert len(stages_run(home)) == 7
    run(evaluate, {"name": "tiny", "evaluation": {"max_new_tokens": 5}})
    assert stages_run(home)[7:] == ["evaluate"]
    evaluation = json.loads((home / "runs/tiny/config.json").read_text())["evaluation"]
    assert (evaluation["prompts"], evaluation["max_new_tokens"]) == (3, 256), "once is not from now on"


def test_evaluation_of_an_unknown_run_says_which_there_are(home: Path, tree: dict[str, Any]) -> None:
    run(train, tree)
    with pytest.raises(ConfigMismatch, match=r"There are: tiny"):
        run(evaluate, {"name": "other"})


def test_record_that_points_to_a_deleted_or_damaged_cache_is_built_again(
    tree: dict[str, Any], builds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"rows": tree["rows"], "target": tree["target"]}
    directory = Path(run(prepare, arguments))
    assert run(prepare, arguments) == str(directory)
    assert len(builds) == 1

    (directory / "ids/c/0").write_bytes(b"")
    assert run(prepare, arguments) == str(directory)
    assert "does not open and is built again" in caplog.text
    TokenCache.open(directory).verify()

    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    directory.rmdir()
    assert run(prepare, arguments) == str(directory)
    TokenCache.open(directory).verify()
    assert len(builds) == 3


def test_failure_is_never_recorded_as_the_result(
    tree: dict[str, Any], builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"rows": tree["rows"], "target": tree["target"]}
    counted = prepare_module.build

    def broken(*arguments: Any, **options: Any) -> Path:
        raise OSError("the disk is gone")

    monkeypatch.setattr(prepare_module, "build", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        run(prepare, arguments)
    monkeypatch.setattr(prepare_module, "build", counted)
    directory = run(prepare, arguments)
    monkeypatch.setattr(prepare_module, "build", broken)
    assert run(prepare, arguments) == directory
    assert len(builds) == 1


def test_record_holds_no_place_so_a_home_may_move(
    home: Path, tree: dict[str, Any], builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"rows": tree["rows"], "target": tree["target"]}
    name = Path(run(prepare, arguments)).name
    moved = home.rename(home.with_name("moved"))
    monkeypatch.setenv("DFLASH_HOME", str(moved))
    assert run(prepare, arguments) == str(moved / "tokens" / name)
    assert len(builds) == 1


def test_lower_limit_of_dropped_rows_counts_on_a_hit_too(rows: Path, tree: dict[str, Any]) -> None:
    with rows.open("a") as stream:
        stream.write(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}) + "\n")
    run(prepare, {"rows": tree["rows"] | {"max_dropped": 0.5}, "target": tree["target"]})
    with pytest.raises(BadSource, match="max_dropped"):
        run(prepare, {"rows": tree["rows"] | {"max_dropped": 0.0}, "target": tree["target"]})


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "DELAYS_S", (0.0, 0.0))


def attempts(home: Path) -> list[str]:
    """What `train` was told beside run and token cache, an attempt a line."""
    return (home / "runs/tiny/attempts").read_text().splitlines()


@pytest.mark.usefixtures("quick_retries")
def test_training_that_dies_eight_times_after_a_checkpoint_each_is_finished(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL_FIRST", "8")
    trained = run(train, tree | {"training": {"epochs": 9}})
    assert trained["epochs_done"] == 9
    assert len(attempts(home)) == 9
    assert not (home / "runs/tiny/attempts-train.json").exists()


@pytest.mark.usefixtures("quick_retries")
def test_training_that_dies_three_times_at_one_place_fails_with_its_own_error(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL_FIRST", "2")  # both get further, so they do not count
    monkeypatch.setenv("FAKE_FAIL_IN", "3")
    with pytest.raises(StageKilled, match="SIGKILL"):
        run(train, tree | {"training": {"epochs": 9}})
    assert len(attempts(home)) == 6, "the third got to the place where it dies"
    with pytest.raises(StageKilled):  # another run begins to count anew
        run(train, tree | {"training": {"epochs": 9}})
    assert len(attempts(home)) == 9


@pytest.mark.parametrize(("gets_further", "allowed"), [(True, 8), (False, 3)])
def test_deaths_of_the_whole_flow_are_counted_over_its_starts(tmp_path: Path, gets_further: bool, allowed: int) -> None:
    """Each start is the same flow run, whose attempt leaves nothing but what lies on disk."""
    file = tmp_path / "attempts-train.json"
    for number in range(allowed):
        _begin("train", file, "one", (number if gets_further else 0, 0))
    if gets_further:
        return
    with pytest.raises(NoProgress, match="died 3 times in this flow run without getting further"):
        _begin("train", file, "one", (0, 0))
    _begin("train", file, "one", (0, 0))  # by hand


@pytest.mark.usefixtures("quick_retries")
def test_refused_training_is_not_tried_again_and_the_config_of_the_run_stays(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(train, tree)
    config = (home / "runs/tiny/config.json").read_text()
    monkeypatch.setenv("FAKE_ERROR", "ConfigMismatch")
    with pytest.raises(ConfigMismatch, match="as asked"):
        run(train, tree | {"training": {"epochs": 3, "lr": 1.0}})
    assert len(attempts(home)) == 2
    assert (home / "runs/tiny/config.json").read_text() == config


@pytest.mark.usefixtures("quick_retries")
def test_training_that_cannot_fit_is_refused_before_it_starts(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TOO_BIG", "1")
    with pytest.raises(CannotFit, match="99 TB"):
        run(train, tree)
    assert stages_run(home) == ["check"]
    assert not (home / "runs/tiny/config.json").exists(), "nothing was accepted"
    monkeypatch.delenv("FAKE_TOO_BIG")
    run(train, tree)
    accepted = (home / "runs/tiny/config.json").read_text()
    monkeypatch.setenv("FAKE_TOO_BIG", "1")
    with pytest.raises(CannotFit):
        run(train, tree | {"training": {"epochs": 3, "tokens_per_step": 10**9}})
    assert (home / "runs/tiny/config.json").read_text() == accepted
    assert list((home / "runs/tiny").glob("proposed-*")) == []


def test_finished_run_is_of_this_target_wherever_it_lies(home: Path, tree: dict[str, Any], tmp_path: Path) -> None:
    """Another model under the same name, or in the same place, is none that it was trained for."""
    run(full, tree)
    moved = tmp_path / "elsewhere" / "target"
    shutil.copytree(tree["target"]["model"], moved)
    run(full, tree | {"target": {"model": str(moved)}})
    assert stages_run(home) == ["check", "train", "evaluate", "export"], "the same content in another place"
    (moved / "model.safetensors").write_bytes(b"other weights")
    run(full, tree | {"target": {"model": str(moved)}})
    assert stages_run(home)[4:] == ["check", "train", "evaluate", "export"], "asked: the real stages refuse it"


def test_hub_target_without_a_revision_keeps_the_commit_that_the_run_began_with(
    home: Path, tree: dict[str, Any], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(revision)
        place = tmp_path / "hub/snapshots" / (revision or "c0ffee")
        return str(shutil.copytree(target, place, dirs_exist_ok=True))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    run(train, tree | {"target": {"model": "org/model"}})
    config = json.loads((home / "runs/tiny/config.json").read_text())
    assert config["target"]["revision"] == "c0ffee"
    asked.clear()
    run(train, tree | {"target": {"model": "org/model"}})
    assert asked == ["c0ffee"], "not main, where another commit may be by now"
    assert stages_run(home) == ["check", "train"]


def test_stages_at_once_lose_nothing_of_the_ledger(tmp_path: Path) -> None:
    def note(stage: str) -> None:
        for number in range(50):
            mark_finished(tmp_path, f"{stage}-{number}", "x")

    threads = [threading.Thread(target=note, args=(stage,)) for stage in ("train", "evaluate")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds_by_stage(tmp_path)) == 100
    with (
        stage_alone(tmp_path, "evaluate"),
        stage_alone(tmp_path, "train"),
        pytest.raises(RunLocked, match=r"evaluate of .* is under way"),
        stage_alone(tmp_path, "evaluate"),
    ):
        pass


NIGHT = {"epochs": 3, "epochs_per_run": 1}


def test_each_night_trains_one_epoch_until_nothing_is_left(home: Path, tree: dict[str, Any]) -> None:
    done = [run(train, tree | {"training": NIGHT})["epochs_done"] for _ in range(5)]
    assert done == [1, 2, 3, 3, 3]
    assert attempts(home) == ["--until-epoch 1", "--until-epoch 2", "--until-epoch 3"]


@pytest.mark.usefixtures("quick_retries")
def test_retry_of_a_night_does_not_train_one_epoch_more(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAIL_FIRST", "1")  # killed after the epoch's checkpoint, before it could say so
    run(train, tree | {"training": NIGHT})
    assert attempts(home) == ["--until-epoch 1", "--until-epoch 1"]


def test_flow_run_tried_again_keeps_its_limits(
    home: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `prefect flow-run retry` does: the same flow run, from the top, in a new process."""
    from prefect.flow_engine import run_flow

    monkeypatch.setattr(attempts_module, "MAX_FAILURES", 1)
    monkeypatch.setenv("FAKE_FAIL_IN", "0")
    arguments = check_parameters(
        train.fn, tree | {"training": {"epochs": 3, "epochs_per_run": 2, "stop_after_s": 3600}}
    )
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=arguments)
        with pytest.raises(StageKilled):
            run_flow(train, flow_run, parameters=arguments)
        again = client.read_flow_run(flow_run.id)
        assert again.state is not None
        assert again.state.is_failed()
        _schedule_again(client, again)
        monkeypatch.delenv("FAKE_FAIL_IN")
        run_flow(train, client.read_flow_run(flow_run.id), parameters=arguments)
    first, second = attempts(home)
    assert first.startswith("--until-epoch 2 --until-time ")
    assert first == second


def _schedule_again(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)


def test_window_runs_from_the_scheduled_start(home: Path, tree: dict[str, Any]) -> None:
    from prefect.flow_engine import run_flow

    scheduled = datetime.now(UTC) - timedelta(hours=1)
    arguments = check_parameters(train.fn, tree | {"training": NIGHT | {"stop_after_s": 7200}})
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=arguments, state=Scheduled(scheduled_time=scheduled))
    run_flow(train, flow_run, parameters=arguments)
    until = float(attempts(home)[0].split()[-1])
    assert until == pytest.approx(scheduled.timestamp() + 7200, abs=0.01)


def test_night_until_a_time_of_day_is_that_of_its_scheduled_start(home: Path, tree: dict[str, Any]) -> None:
    """One that starts after it trains nothing, though the next such time is to come."""
    from prefect.flow_engine import run_flow

    scheduled = datetime.now(UTC) - timedelta(hours=2)
    until = f"{scheduled + timedelta(hours=1):%H:%M} UTC"
    arguments = check_parameters(train.fn, tree | {"training": NIGHT | {"until": until}})
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(train, parameters=arguments, state=Scheduled(scheduled_time=scheduled))
    run_flow(train, flow_run, parameters=arguments)
    assert not (home / "runs/tiny/attempts").exists()


def test_run_that_starts_after_its_window_trains_nothing_and_says_so(
    home: Path, tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trained = run(train, tree | {"training": NIGHT | {"stop_after_s": 1e-6}})
    assert trained["epochs_done"] == 0
    assert "its window ended at" in outcome(trained)
    assert not (home / "runs/tiny/attempts").exists()
    assert "its window ended at" in caplog.text


def test_flow_run_is_named_by_what_it_does_and_ends_with_what_it_did(tree: dict[str, Any]) -> None:
    run(train, tree | {"training": NIGHT})
    run(train, tree | {"training": NIGHT})
    with get_client(sync_client=True) as client:
        names = {flow_run.name: flow_run for flow_run in client.read_flow_runs()}
    state = names["train tiny epoch 2/3"].state
    assert state is not None
    assert state.is_completed()
    assert state.message == "2/3 epochs, 20 steps, loss 3.000"


def test_plan_that_is_done_is_completed_with_nothing_left(tree: dict[str, Any]) -> None:
    run(train, tree)
    state = train(**check_parameters(train.fn, tree), return_state=True)
    assert state.is_completed()
    assert state.message == "2/2 epochs, 20 steps, loss 3.000, nothing left"


def test_prefect_itself_retries_neither_the_flow_nor_the_task() -> None:
    assert (train.retries, full.retries, train_drafter.retries) == (0, 0, 0), "a number for the whole run is not enough"
