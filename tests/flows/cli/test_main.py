"""`python -m flows` from any directory: what it lists, and that a mistake stops it before any work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.presets import read_deployments

ROOT = Path(__file__).resolve().parents[3]


def flows(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env = inherited | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(directory / "prefect"),
        "DFLASH_HOME": str(directory / "home"),
    }
    command = [sys.executable, "-m", "flows", *arguments]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)


def test_help_lists_the_deployments_with_their_descriptions(tmp_path: Path) -> None:
    done = flows(tmp_path, "--help")
    assert done.returncode == 0
    for deployment in read_deployments(ROOT).values():
        assert f"  {deployment.name} " in done.stdout
        assert deployment.description.split()[0] in done.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epoch=3", "training.epoch: there is no such field; did you mean training.epochs?"),
        ("training.lr=-1", "training.lr: Input should be greater than 0; got -1."),
        ("target.model=./nowhere.gguf", "target.model: there is no file {d}/nowhere.gguf"),
    ],
)
def test_mistake_is_named_by_its_field_before_any_work(tmp_path: Path, override: str, message: str) -> None:
    done = flows(tmp_path, "demo", "--set", override)
    assert done.returncode == 2
    assert message.format(d=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "", "no server was started"
    assert not (tmp_path / "home/tokens").exists()


def test_unknown_deployment_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = flows(tmp_path, "dmeo")
    assert done.returncode == 2
    assert "Did you mean demo?" in done.stderr


def test_script_is_not_led_astray_by_files_of_the_users_own(tmp_path: Path) -> None:
    """A Prefect project has a `flows/` as a rule; `python -m` would import it from the working directory."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("raise SystemExit('the flows of another project')")
    (tmp_path / "cache.py").write_text("raise SystemExit('the cache of another project')")
    script = Path(sys.executable).with_name("dflash-train")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([script, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: dflash-train")
