"""How long one batch of 16 rows takes, padded, with its mask, beside what people write first.

    python benchmarks/batches.py [--rows 20000]

Warm, one thread: `gather` copies each row's slice into leased int32 and uint8 buffers. Peers get the same rows from the
same memory maps: slices with `pad_sequence` (a good peer), and lists through `torch.tensor` (what people write first).
Cold: the cache's files are not in memory; a plain map waits for the disk once a page, `prefetch` asks for every row at
once and `gather` then waits for the last. Times are medians over batches of random rows. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # torch's own threads would make the peers slower on a loaded host
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from _rows import MAX_TOKENS, VOCABULARY, arrow_stream, drop_from_memory
from torch.nn.utils.rnn import pad_sequence

from cache.batches.gather import Buffers, gather, prefetch
from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache

ROWS = 16  # of a batch
WARM, COLD = 150, 40  # batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the token cache")
    parser.add_argument("--directory", type=Path, help="where to write (default: var/bench)")
    given = parser.parse_args()
    directory = given.directory or Path(__file__).resolve().parent.parent / "var" / "bench"
    torch.set_num_threads(1)
    source = arrow_stream(directory, given.rows)
    rows = RowsConfig(source=str(source), max_tokens=MAX_TOKENS, vocabulary=VOCABULARY)
    path = build(rows, home=directory, tokenizer=None, vocabulary=None)

    store = TokenCache.open(path)
    out = Buffers(ROWS * MAX_TOKENS)
    batches = [*np.random.default_rng(0).permutation(store.rows(0))[: ROWS * WARM].reshape(-1, ROWS)]
    warm: dict[str, Callable[[np.ndarray], object]] = {
        "gather into leased buffers": lambda batch: gather(store, batch, out),
        "slices and pad_sequence": lambda batch: pad_slices(store, batch),
        "lists and torch.tensor": lambda batch: pad_lists(store, batch),
    }
    for batch in batches:  # bring them into memory
        gather(store, batch, out)
    # In turns, batch by batch, so that all meet the same moments.
    times: dict[str, list[float]] = {name: [] for name in warm}
    for number, batch in enumerate(batches):
        for name, run in warm.items():
            if name != "lists and torch.tensor" or number < WARM // 5:
                times[name].append(timed(run, batch))
    found = {name: statistics.median(measured) * 1e3 for name, measured in times.items()}
    cold = cold_times(path)

    print(f"{ROWS} rows, ids and mask, one thread; {given.rows:,} rows in the cache\n")
    for name, milliseconds in (found | cold).items():
        print(f"{name:34}{milliseconds:9.3f} ms")
    padded = found["gather into leased buffers"]
    result = {
        "padded_ms": round(padded, 4),
        "vs_pad_sequence": round(found["slices and pad_sequence"] / padded, 1),
        "vs_lists": round(found["lists and torch.tensor"] / padded, 1),
        "cold_vs_plain": round(cold["cold, plain map"] / cold["cold, prefetch"], 1),
    }
    print(json.dumps(result))


def pad_slices(store: TokenCache, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    spans = [slice(store.offsets[row], store.offsets[row + 1]) for row in batch]
    ids = [torch.from_numpy(store.ids[span].astype(np.int64)) for span in spans]
    mask = [torch.from_numpy(store.mask[span].astype(np.int64)) for span in spans]
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)


def pad_lists(store: TokenCache, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    spans = [slice(store.offsets[row], store.offsets[row + 1]) for row in batch]
    ids = [torch.tensor(store.ids[span].tolist()) for span in spans]
    mask = [torch.tensor(store.mask[span].tolist()) for span in spans]
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)


def cold_times(path: Path) -> dict[str, float]:
    """Medians over batches that no one has read before, in turns."""
    times: dict[str, list[float]] = {"cold, plain map": [], "cold, prefetch": []}
    out = Buffers(ROWS * MAX_TOKENS)
    rows = np.random.default_rng(1).permutation(TokenCache.open(path).rows(0))
    for number, batch in enumerate(rows[: 2 * COLD * ROWS].reshape(-1, ROWS)):
        for name in ("ids", "mask"):
            drop_from_memory(path / name / "c" / "0")
        store = TokenCache.open(path)  # a new map: pages of an old one are not let go of
        started = time.perf_counter()
        if number % 2:
            prefetch(store, batch)
        gather(store, batch, out)
        times["cold, prefetch" if number % 2 else "cold, plain map"].append(time.perf_counter() - started)
    return {name: statistics.median(measured) * 1e3 for name, measured in times.items()}


def timed(run: Callable[[np.ndarray], object], batch: np.ndarray) -> float:
    started = time.perf_counter()
    run(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
