"""What history.jsonl says of the start of a run."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash.training import provenance as module
from dflash.training.provenance import gpu_memory, provenance


def _commit_all(repository: Path) -> str:
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_whether_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPOSITORY", tmp_path)
    outside = provenance()
    assert outside["commit"] is None
    assert outside["dirty"] is None
    (tmp_path / "code.py").write_text("a = 1\n")
    commit = _commit_all(tmp_path)
    clean = provenance()
    assert (clean["commit"], clean["dirty"]) == (commit, False)
    (tmp_path / "code.py").write_text("a = 2\n")
    assert provenance()["dirty"] is True


def test_versions_devices_and_the_command_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 7 + index)
    value = json.loads(json.dumps(provenance()))
    assert value["devices"] == ["GPU 0", "GPU 1"]
    assert value["command"] == sys.argv
    assert value["versions"]["numpy"] == np.__version__
    assert value["versions"]["transformers"]
    assert gpu_memory() == {"cuda:0": 7, "cuda:1": 8}
