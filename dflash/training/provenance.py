"""What a start of a run was: code, versions, devices, the command. Facts for history.jsonl; nothing depends on them."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "numpy", "dflash-train")
_REPOSITORY = Path(__file__).resolve().parents[2]
_GIT_TIMEOUT_S = 10.0  # a start never waits long for a slow disk only to be described


def provenance() -> dict[str, Any]:
    """Commit (None outside a git checkout), whether files differ from it, versions, GPUs' names, the command."""
    commit = _git("rev-parse", "HEAD")
    changes = None if commit is None else _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
    }


def gpu_memory() -> dict[str, int]:
    """GPU → most bytes that this process's tensors took there since it began; empty without a GPU."""
    return {f"cuda:{i}": torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git prints of the checkout this file is of; None where there is none, or git does not answer."""
    if not (_REPOSITORY / ".git").exists():
        return None  # installed somewhere inside another project's checkout
    try:
        done = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
