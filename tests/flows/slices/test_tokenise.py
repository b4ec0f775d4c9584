"""Slices of conversations as tasks: in this process, on two Dask workers, and what is not made again."""

import builtins
import fcntl
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from prefect.client.orchestration import get_client

from cache.build import build
from cache.disk.store import TokenCache
from cache.errors import BadRow
from cache.key.content import content_key
from cache.slices import cut as cuts
from cache.slices import make as making
from cache.slices.plan import SlicePlan, plan_slices
from cache.source.find import find_files
from cache.source.open import open_source
from flows.cli.overrides import check_parameters
from flows.errors import BadParameter
from flows.prepare import prepare
from flows.runs.parameters import resolve_home
from flows.show.progress import ProgressLine, StageProgress
from flows.slices import fan_out, slice_task
from flows.slices.slice_task import make_slice, tokenise_slice

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture
def tree(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Thirty conversations in slices of four, and a target that has a tokenizer and sizes."""
    monkeypatch.setattr(cuts, "SLICE_ROWS", 4)
    target = toy.save_tokenizer(tmp_path / "chat-target")
    (target / "config.json").write_text(json.dumps({"vocab_size": 263}))
    write(tmp_path / "chat.jsonl", 30)
    return {"rows": {"source": str(tmp_path / "chat.jsonl"), "held_out": 0.3}, "target": {"model": str(target)}}


def write(path: Path, count: int, last: Any = None) -> None:
    talks = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(count)]
    lines = [json.dumps({"messages": talk}) for talk in talks] + ([] if last is None else [json.dumps(last)])
    path.write_text("\n".join(lines) + "\n")


def run(tree: dict[str, Any], **changes: Any) -> TokenCache:
    return TokenCache.open(prepare(**check_parameters(prepare.fn, tree | changes)))


def new_tasks(seen: set[Any]) -> list[Any]:
    """Task runs called `tokenise…` since the last call."""
    with get_client(sync_client=True) as client:
        found = [one for one in client.read_task_runs(limit=200) if one.id not in seen]
    seen |= {one.id for one in found}
    return [one for one in found if one.name.startswith("tokenise")]


def records(home: Path) -> list[dict[str, Any]]:
    """What the tasks left: one small JSON record a slice, named by its key."""
    slices = [path.stem for path in (home / "tokens/.slices").glob("*/*.arrow")]
    return [json.loads(json.loads((home / "tokens/.records" / key).read_text())["result"]) for key in slices]


@pytest.fixture
def plain(tree: dict[str, Any], tmp_path: Path) -> TokenCache:
    """The same cache, built without flows."""
    parameters = check_parameters(prepare.fn, tree)
    home, tokenizer = tmp_path / "plain", Path(tree["target"]["model"])
    return TokenCache.open(build(parameters["rows"], home=home, tokenizer=tokenizer, vocabulary=None))


def test_each_missing_slice_is_a_task_and_no_other(
    home: Path, tree: dict[str, Any], plain: TokenCache, tmp_path: Path
) -> None:
    seen: set[Any] = set()
    new_tasks(seen)
    assert run(tree).manifest == plain.manifest
    assert sorted(task.name for task in new_tasks(seen)) == sorted(f"tokenise slice {i}/8" for i in range(1, 9))
    assert sum(record["rows"] for record in records(resolve_home(None))) == 30
    run(tree)
    run(tree, rows=tree["rows"] | {"max_tokens": 8})
    assert new_tasks(seen) == []
    write(tmp_path / "chat.jsonl", 33)
    run(tree)
    assert sorted(task.name for task in new_tasks(seen)) == ["tokenise slice 8/9", "tokenise slice 9/9"]


def test_no_more_tasks_than_prefect_can_bear(
    home: Path, tree: dict[str, Any], plain: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "MOST_TASKS", 3)
    seen: set[Any] = set()
    new_tasks(seen)
    assert run(tree).manifest == plain.manifest
    assert sorted(task.name for task in new_tasks(seen)) == [f"tokenise slice {i}/8" for i in range(1, 4)]


def test_two_dask_workers_make_the_same_cache(home: Path, tree: dict[str, Any], plain: TokenCache) -> None:
    # Slices are cut by the flow; the workers only make them.
    assert run(tree, dask="local:2").manifest == plain.manifest
    made = records(resolve_home(None))
    assert len(made) == 8
    assert len({record["by"] for record in made}) == 2, "both workers have made some"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[StageProgress]:
    """What the line of the stage `tokenise` was given."""
    given: list[StageProgress] = []
    monkeypatch.setattr(
        ProgressLine, "show", lambda line, state: given.append(state) if state.stage == "tokenise" else None
    )
    return given


def plan_of(tree: dict[str, Any]) -> SlicePlan:
    rows, tokenizer, home = (
        check_parameters(prepare.fn, tree)["rows"],
        Path(tree["target"]["model"]),
        resolve_home(None),
    )
    key = content_key(rows, tokenizer, home=home)
    return plan_slices(open_source(find_files(rows), rows), rows, tokenizer, key.parts, home)


@contextmanager
def other_builder_of_first_slice(plan: SlicePlan, made: Path) -> Iterator[list[bool]]:
    """Holds the lock of the first slice until all others are there, then makes it. Yields: were they there in time?"""
    first, *others = (plan.path(one) for one in plan.slices)
    (first.parent / ".locks").mkdir(parents=True)
    are_there: list[bool] = []

    def hold(lock: Any) -> None:
        until = time.monotonic() + 60
        with lock:
            while not all(path.exists() for path in others) and time.monotonic() < until:
                time.sleep(0.02)
            are_there.append(all(path.exists() for path in others))
            shutil.copy(made / first.parent.name / first.name, first)

    lock = (first.parent / ".locks" / first.stem).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    holder = threading.Thread(target=hold, args=(lock,))
    holder.start()
    yield are_there
    holder.join()


@pytest.mark.parametrize("dask", [None, "local:1"])
def test_slice_that_another_builder_is_at_comes_last_and_is_counted(
    home: Path, tree: dict[str, Any], plain: TokenCache, tmp_path: Path, shown: list[StageProgress], dask: str | None
) -> None:
    with other_builder_of_first_slice(plan_of(tree), tmp_path / "plain/tokens/.slices") as are_there:
        assert run(tree, dask=dask).manifest == plain.manifest
    assert are_there == [True], "nothing waited for the slice while others were missing"
    assert [record["made"] for record in records(resolve_home(None))] == [True] * 8
    assert (shown[-1].done, shown[-1].total) == (30, 30)
    assert shown[-1].message.startswith("8 of 8 slices made")


def test_rows_of_a_slice_that_is_tried_again_count_once(
    home: Path,
    tree: dict[str, Any],
    plain: TokenCache,
    shown: list[StageProgress],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_pieces = making.write_pieces
    attempts: list[Any] = []

    def break_once(*given: Any) -> None:
        write_pieces(*given)
        attempts.append(given)
        if len(attempts) == 2:
            raise OSError("disk lost")

    monkeypatch.setattr(making, "write_pieces", break_once)
    monkeypatch.setattr(tokenise_slice, "retry_delay_seconds", 0)
    assert run(tree).manifest == plain.manifest
    assert len(attempts) == 9
    assert "tokenise failed: OSError: disk lost" in caplog.text
    assert max(state.done for state in shown) == shown[-1].done == 30


def test_seconds_of_a_slice_leave_out_what_it_waited_for_other_threads(
    tree: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def make(*given: Any, **more: Any) -> bool:
        now[0] += 1.5
        return True

    monkeypatch.setattr(slice_task, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(slice_task, "_tokeniser", lambda plan: SimpleNamespace(make=make))
    plan = plan_of(tree)
    made: list[dict[str, Any]] = []
    waiting = threading.Thread(
        target=lambda: made.append(make_slice(plan.slices[0], plan, wait=True, threads=None, so_far=None))
    )
    with slice_task._one_at_a_time:
        waiting.start()
        time.sleep(0.1)
        now[0] = 100.0
    waiting.join()
    assert made[0]["seconds"] == 1.5


def test_a_bad_row_fails_at_once_and_what_was_made_stays(home: Path, tree: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "chat.jsonl", 14, last={"messages": [{"text": "no role"}]})
    seen: set[Any] = set()
    new_tasks(seen)
    with pytest.raises(BadRow, match=r"line 15 of .*chat.jsonl"):
        run(tree)
    assert [task.run_count for task in new_tasks(seen)] == [1, 1, 1, 1]
    assert len(list((resolve_home(None) / "tokens/.slices").glob("*/*.arrow"))) == 3
    write(tmp_path / "chat.jsonl", 15)
    assert run(tree).manifest.rows == 15
    assert [task.name for task in new_tasks(seen)] == ["tokenise slice 4/4"]


def test_dask_without_its_extra_says_what_to_install(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *given: Any, **more: Any) -> Any:
        if name == "prefect_dask":
            raise ImportError(name)
        return found(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadParameter, match=r'pip install "dflash-train\[dask\]"'):
        run(tree, dask="local:2")


@pytest.mark.parametrize("dask", ["2", "local:0", "local", "http://x:1"])
def test_a_wrong_place_is_refused_by_name(tree: dict[str, Any], dask: str) -> None:
    with pytest.raises(BadParameter, match="dask: "):
        check_parameters(prepare.fn, tree | {"dask": dask})
