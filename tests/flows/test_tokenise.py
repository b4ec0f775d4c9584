"""Slices of conversations as tasks: in this process, on two Dask workers, and what is not made again."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from cache import cuts
from cache.errors import BadRow
from cache.store import TokenCache
from cache.writer import build
from flows.config import resolve_home
from flows.deployments import check_parameters
from flows.errors import BadParameter
from flows.prepare import prepare

sys.path.append(str(Path(__file__).parent.parent / "cache"))  # the toy tokenizer of the cases
import toy

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
    slices = [path.stem for path in (home / "tokens/.slices").glob("*.arrow")]
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


def test_two_dask_workers_make_the_same_cache(home: Path, tree: dict[str, Any], plain: TokenCache) -> None:
    # Slices are cut by the flow; the workers only make them.
    assert run(tree, dask="local:2").manifest == plain.manifest
    made = records(resolve_home(None))
    assert len(made) == 8
    assert len({record["by"] for record in made}) == 2, "both workers have made some"


def test_a_bad_row_fails_at_once_and_what_was_made_stays(home: Path, tree: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "chat.jsonl", 14, last={"messages": [{"text": "no role"}]})
    seen: set[Any] = set()
    new_tasks(seen)
    with pytest.raises(BadRow, match=r"line 15 of .*chat.jsonl"):
        run(tree)
    assert [task.run_count for task in new_tasks(seen)] == [1, 1, 1, 1]
    assert len(list((resolve_home(None) / "tokens/.slices").glob("*.arrow"))) == 3
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
