"""Benchmarks that nobody has run for a while still run: those whose smallest sizes take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Runs a script where some libraries cannot be found.
WITHOUT = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
absent = sys.argv.pop(1).split(",")
importlib.util.find_spec = lambda name, *rest: None if name in absent else find(name, *rest)
class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def result(*command: str) -> dict[str, Any]:
    """The last line of what a command prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


def test_the_script_for_a_gpu_needs_only_torch_transformers_and_numpy() -> None:
    absent = "jaxtyping,pydantic,accelerate,zarr,pyarrow,xxhash,prefect"
    said = result("-c", WITHOUT, absent, str(BENCHMARKS / "gpu.py"), "--smoke")
    assert said["smoke"]
    assert said["texts_identical"] == 2
    assert said["step_s"] > 0


def test_decoding_is_compared_with_plain_decoding() -> None:
    said = result(str(BENCHMARKS / "decode.py"), "--prompts", "2", "--max-new-tokens", "12", "--threads", "1")
    assert said["identical"] == said["prompts"] == 2
    assert said["tau"] > 1
    assert said["speedup"] > 0
