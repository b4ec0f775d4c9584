"""The layout that machines enforce: what the wheel holds, who imports whom, who starts threads, how long a module."""

import ast
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("cache", "dflash", "flows")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Threads and processes are started in these modules only.
CONCURRENT = (
    "cache/build.py",
    "dflash/training/checkpoint.py",
    "dflash/export/export.py",  # loads back what it wrote in a process that knows nothing
    "dflash/answers/generate.py",
    "dflash/serving/server.py",  # a server is a process of its own
    "dflash/training/trackers.py",  # each in a process of its own
    "dflash/training/provenance.py",  # asks git for the commit
    "dflash/pipeline/",
    "flows/show/artifacts.py",
    "flows/stage/process.py",
    "flows/cli/temporary_server.py",
)
CONCURRENCY = {"multiprocessing", "concurrent", "subprocess", "_thread"}  # and threads, by their class


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def names_used(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module_is_short_and_says_what_it_is_about(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    if path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(text)), "a module starts with a docstring that says its idea"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_threads_and_processes_are_started_in_few_places(path: Path) -> None:
    if not name(path).startswith(CONCURRENT):
        assert not imports(path) & CONCURRENCY
        assert not names_used(path) & {"Thread", "Timer", "ThreadPool", "fork", "forkpty", "posix_spawn"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_of_a_package_have_one_name(package: str) -> None:
    names = Counter(path.name for path in (ROOT / package).rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("__")] == []


def test_prefect_is_imported_in_flows_only() -> None:
    assert [name(path) for path in MODULES if "prefect" in imports(path) and not name(path).startswith("flows/")] == []


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    wheel = next(iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    names = zipfile.ZipFile(wheel).namelist()
    top = {entry.split("/")[0] for entry in names}
    assert {entry for entry in top if not entry.endswith(".dist-info")} == set(PACKAGES)
    assert {name(path) for path in MODULES} == {entry for entry in names if entry.endswith(".py")}


def test_transformers_is_imported_in_one_module_of_cache_and_only_when_needed() -> None:
    """It pulls in torch, which a cached preparation must not load."""
    assert {name(path) for path in MODULES if name(path).startswith("cache/") and "transformers" in imports(path)} <= {
        "cache/chat/tokenizer.py"
    }
    top = ast.parse((ROOT / "cache/chat/tokenizer.py").read_text()).body
    assert not [
        node for node in top if isinstance(node, ast.Import | ast.ImportFrom) and "transformers" in ast.dump(node)
    ]
