"""A fully cached `prepare` costs hardly more than an empty flow.

    python benchmarks/rerun.py        # starts a server of its own; about a minute

Whole processes against a running server, from start to exit, alternating; the medians. Prints one JSON line:
`vs_empty_flow` is the ratio, and at most 1.5. `imports` lists which of torch and transformers the cached run imported.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect.testing.utilities import prefect_test_harness

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 5
LIMIT = 1.5

EMPTY = """
from prefect import flow, task

@task
def nothing():
    return "done"

@flow
def empty():
    return nothing()

empty()
"""

PREPARE = """
import json, sys
from flows.cli.overrides import check_parameters
from flows.prepare import prepare
prepare(**check_parameters(prepare.fn, json.loads(sys.argv[1])))
print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))))
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, prefect_test_harness(server_startup_timeout=120):
        result = measure(Path(directory))
    print(json.dumps(result))
    return 0 if result["vs_empty_flow"] <= LIMIT and not result["imports"] else 1


def measure(directory: Path) -> dict[str, object]:
    from prefect.settings import PREFECT_API_URL

    env = os.environ | {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "DFLASH_HOME": str(directory / "home"),
        "PYTHONPATH": str(ROOT),
    }
    parameters = json.dumps(inputs(directory))

    def seconds(code: str, *arguments: str) -> tuple[float, str]:
        start = time.perf_counter()
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
        return time.perf_counter() - start, done.stdout

    seconds(EMPTY)  # also warms the disk cache
    seconds(PREPARE, parameters)  # builds
    empty, cached, imports = [], [], ""
    for _ in range(ROUNDS):
        empty.append(seconds(EMPTY)[0])
        spent, imports = seconds(PREPARE, parameters)
        cached.append(spent)
    return {
        "benchmark": "rerun",
        "empty_flow_s": round(statistics.median(empty), 3),
        "cached_prepare_s": round(statistics.median(cached), 3),
        "vs_empty_flow": round(statistics.median(cached) / statistics.median(empty), 3),
        "imports": json.loads(imports),
        "rounds": ROUNDS,
    }


def inputs(directory: Path) -> dict[str, object]:
    """Tokenised rows (about 6 MB), and a target without weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    target = directory / "target"
    target.mkdir()
    Tokenizer(WordLevel({f"w{i}": i for i in range(263)}, unk_token="w0")).save(str(target / "tokenizer.json"))
    (target / "config.json").write_text(json.dumps({"vocab_size": 263}))
    rows = directory / "rows.jsonl"
    with rows.open("w") as stream:
        for row in range(20_000):
            ids = [row % 250, *range(7, 90)]
            stream.write(json.dumps({"input_ids": ids, "loss_mask": [0] + [1] * 83}) + "\n")
    return {"rows": {"source": str(rows)}, "target": {"model": str(target)}}


if __name__ == "__main__":
    sys.exit(main())
