"""From a finished token cache to the first batch: open, plan an epoch, gather; what the first GPU waits for.

    python benchmarks/startup.py [--rows 902087]

The cache has the size and the offsets of a real one of so many rows, but its token files are sparse: opening reads no
token, planning reads lengths only, and the first batch reads a few rows, so that 9.4 GB need not be written for this.
Each of five runs is a new process; `seconds` is the median of what it takes after the imports. The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from _rows import FULL_ROWS, MAX_TOKENS, VOCABULARY, lengths_of

from cache.batches.epoch import plan_epoch
from cache.batches.gather import Buffers, gather
from cache.batches.passes import PassRoom, cut_passes
from cache.disk.manifest import LAYOUT_VERSION, ArrayFacts, Manifest
from cache.disk.metadata import write_manifest
from cache.disk.shard import shard_bytes
from cache.disk.store import TokenCache, chunk_path
from cache.ragged import offsets_of

TOKENS_PER_STEP = 24_576


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL_ROWS, help="rows of the token cache")
    parser.add_argument("--directory", type=Path, help="where to write (default: var/bench)")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        print(json.dumps(start(given.open)))
        return
    directory = given.directory or Path(__file__).resolve().parent.parent / "var" / "bench"
    path = sparse_cache(directory / f"sparse-{given.rows}", given.rows)
    runs = []
    for _ in range(5):
        command = [sys.executable, __file__, "--open", str(path)]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    shutil.rmtree(path)
    print(f"{given.rows:,} rows, {int(lengths_of(given.rows).sum()):,} tokens; median of five processes\n")
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name in ("open", "plan", "gather"):
        print(f"{name:12}{found[name] * 1e3:9.1f} ms")
    print(json.dumps({"seconds": round(found["seconds"], 3)}))


def start(path: Path) -> dict[str, float]:
    """What a run does before its first step."""
    begin = time.perf_counter()
    store = TokenCache.open(path)
    lengths = store.lengths
    opened = time.perf_counter()
    slots = 16 * np.minimum(512, lengths * 3 // 5)  # of rows that are supervised to 60 %
    plan = plan_epoch(lengths, slots, store.rows(0), tokens_per_step=TOKENS_PER_STEP, seed=0, epoch=0)
    planned = time.perf_counter()
    rows = cut_passes(np.concatenate(plan.step(0)), lengths, slots, PassRoom(TOKENS_PER_STEP, 65_536))[0]
    gather(store, rows, Buffers(max(TOKENS_PER_STEP, MAX_TOKENS)))
    end = time.perf_counter()
    steps = {"open": opened - begin, "plan": planned - opened, "gather": end - planned, "seconds": end - begin}
    return steps


def sparse_cache(path: Path, num_rows: int) -> Path:
    """A cache that opens, with real offsets and row columns, and token files that are all holes."""
    shutil.rmtree(path, ignore_errors=True)
    lengths = lengths_of(num_rows)
    offsets = offsets_of(lengths)
    rows = {
        "offsets": offsets,
        "split": np.zeros(num_rows, dtype=np.uint8),
        "group": np.zeros(num_rows, dtype=np.uint16),
        "source_row": np.arange(num_rows, dtype=np.int64),
    }
    sizes = {"ids": (int(offsets[-1]), 4), "mask": (int(offsets[-1]), 1)}
    sizes |= {name: (array.size, array.itemsize) for name, array in rows.items()}
    for name, (size, itemsize) in sizes.items():
        file = path / chunk_path(name)
        file.parent.mkdir(parents=True)
        with file.open("wb") as opened:
            if name in rows:
                rows[name].tofile(opened)
            opened.truncate(shard_bytes(size, itemsize))
    arrays = {name: ArrayFacts(shard_bytes(*size), "", "") for name, size in sizes.items()}
    manifest = Manifest(
        layout_version=LAYOUT_VERSION,
        key=path.name,
        key_parts={},
        rows=num_rows,
        tokens=int(offsets[-1]),
        supervised_tokens=0,
        answers=0,
        dtype="uint32",
        vocabulary=VOCABULARY,
        arrays=arrays,
        source_rows=num_rows,
        dropped={},
        noted={},
        truncated=0,
        truncated_tokens=0,
        dropped_tokens=0,
        length_histogram=(),
        group_names=["all"],
        tokenizer={},
    )
    write_manifest(path, manifest)
    return path


if __name__ == "__main__":
    main()
