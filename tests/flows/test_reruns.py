"""What repeats a preparation and what does not: edits in a copy of the project, each followed by a new process.

The processes run the flow's own functions on a server that all tests share.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL
from tiny_inputs import make_target, write_rows

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("server")

SCRIPT = """
import json, logging, sys
from pathlib import Path
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
from flows.cli.overrides import check_parameters
from cache import build as writer
from flows import prepare as module
made = []
make = writer._make
writer._make = lambda *a, **k: made.append(1) or make(*a, **k)
directory = module.prepare(**check_parameters(module.prepare.fn, json.loads(sys.argv[1])))
heavy = sorted({"torch", "transformers", "zarr"} & set(sys.modules))
print(json.dumps({"directory": directory, "ran": bool(made), "heavy": heavy, "code": module.__file__}))
"""


class Copy:
    """A copy of the project beside rows, a target and a home."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.project = directory / "project"
        for name in ("cache", "dflash", "flows"):
            shutil.copytree(ROOT / name, self.project / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "prefect.toml", self.project)
        shutil.copy(ROOT / "prefect.yaml", self.project)
        self.rows: dict[str, Any] = {"source": str(directory / "rows.jsonl")}
        self.cwd = self.project

    def start(self) -> "subprocess.Popen[str]":
        tree = {"rows": self.rows, "target": {"model": str(self.directory / "target")}}
        env = os.environ | {
            "PREFECT_API_URL": str(PREFECT_API_URL.value()),
            "DFLASH_HOME": str(self.directory / "home"),
            "PYTHONPATH": str(self.project),
        }
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps(tree)],
            cwd=self.cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def prepare(self) -> dict[str, Any]:
        process = self.start()
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert result["code"].startswith(str(self.project))
        return result

    def edit(self, file: str, change: Callable[[str], str]) -> None:
        path = self.project / file
        before = path.read_text()
        after = change(before)
        assert after != before
        path.write_text(after)


@pytest.fixture
def copy(tmp_path: Path, rows: Path, target: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The key before any edit; the same wherever the files are."""
    directory = tmp_path_factory.mktemp("unedited")
    write_rows(directory / "rows.jsonl")
    make_target(directory / "target")
    return key(Copy(directory))


def with_comment(text: str) -> str:
    return text + "\n# A remark that changes nothing.\n"


def with_statement(text: str) -> str:
    return text + "\n_AN_EDIT = 1\n"


def test_edits_that_change_no_token_repeat_nothing(copy: Copy, tmp_path: Path) -> None:
    first = copy.prepare()
    assert first["ran"]

    copy.edit("dflash/model/loss.py", with_statement)  # training code
    copy.edit("flows/prepare.py", with_statement)  # flow code
    copy.edit("cache/batches/epoch.py", with_statement)  # what reads a token cache
    copy.edit("cache/chat/tokenizer.py", with_comment)  # a comment in what converts
    (tmp_path / "rows.jsonl").touch()
    copy.cwd = tmp_path
    copy.project = copy.project.rename(tmp_path / "moved-checkout")
    second = copy.prepare()
    assert second["directory"] == first["directory"]
    assert not second["ran"]


def test_cached_preparation_imports_nothing_that_only_building_needs(copy: Copy) -> None:
    assert "zarr" in copy.prepare()["heavy"]
    assert copy.prepare()["heavy"] == []


def edit_converter(copy: Copy) -> None:
    copy.edit("cache/build.py", with_statement)


def edit_helper(copy: Copy) -> None:
    copy.edit("cache/ragged.py", with_statement)


def edit_source(copy: Copy) -> None:
    path = copy.directory / "rows.jsonl"
    path.write_text(path.read_text().replace("[39, 7", "[38, 7"))


def edit_tokenizer(copy: Copy) -> None:
    path = copy.directory / "target/tokenizer.json"
    path.write_text(path.read_text().replace('"w5":5,', '"v5":5,').replace('"w5": 5,', '"v5": 5,'))


def edit_policy(copy: Copy) -> None:
    copy.rows["supervise"] = "last"


def edit_lengths(copy: Copy) -> None:
    copy.rows["max_tokens"] = 4


@pytest.mark.parametrize("edit", [edit_converter, edit_helper, edit_source, edit_tokenizer, edit_policy, edit_lengths])
def test_edit_that_may_change_a_token_runs_again(copy: Copy, unedited: str, edit: Callable[[Copy], None]) -> None:
    """By the key alone: a preparation runs when the key is new (`test_edited_helper_runs_the_conversion_again`)."""
    edit(copy)
    assert key(copy) != unedited


def key(copy: Copy) -> str:
    code = (
        "import json, sys; from pathlib import Path\n"
        "from cache.config import RowsConfig; from cache.key.content import content_key\n"
        "print(content_key(RowsConfig(**json.loads(sys.argv[1])), Path(sys.argv[2]), home=Path(sys.argv[3])).hex)"
    )
    arguments = [json.dumps(copy.rows), str(copy.directory / "target"), str(copy.directory / "home")]
    env = os.environ | {"PYTHONPATH": str(copy.project)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=copy.project, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_edited_helper_runs_the_conversion_again(copy: Copy) -> None:
    first = copy.prepare()
    edit_helper(copy)
    second = copy.prepare()
    assert second["ran"]
    assert second["directory"] != first["directory"]


def test_two_flows_at_once_build_once(copy: Copy) -> None:
    processes = [copy.start(), copy.start()]
    results = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        results.append(json.loads(output.splitlines()[-1]))
    assert results[0]["directory"] == results[1]["directory"]
    assert sorted(result["ran"] for result in results) == [False, True]


def test_killed_in_mid_build_the_next_builds(copy: Copy) -> None:
    copy.edit(
        "cache/disk/commit.py",
        lambda text: text.replace(
            "def commit(", "def commit(*a, **k):\n    import os; os.kill(os.getpid(), 9)\n\n\ndef _commit("
        ),
    )
    process = copy.start()
    process.communicate(timeout=120)
    assert process.returncode == -9
    shutil.copy(ROOT / "cache/disk/commit.py", copy.project / "cache/disk/commit.py")
    result = copy.prepare()
    assert result["ran"]
    left = [path.name for path in (copy.directory / "home/tokens").iterdir() if ".tmp" in path.name]
    assert left == []
