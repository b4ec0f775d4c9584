"""Rows that the benchmarks of the token cache make for themselves: the same for the same seed, as long as real ones.

Log-normal lengths (σ 0.6, clipped to 16..4096, mean about 2,076), ids below 151,936 as int32, and a mask as int8 whose
last 60 % of each row is supervised; written as an Arrow stream of 1,000-row batches, as `datasets` writes them.
"""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

VOCABULARY = 151_936
MAX_TOKENS = 4096
FULL_ROWS = 902_087
BATCH_ROWS = 1000


def lengths_of(num_rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(7.5225, 0.6, num_rows)), 16, MAX_TOKENS).astype(np.int64)


def arrow_stream(directory: Path, num_rows: int, seed: int = 0) -> Path:
    """The rows as one file, made once for each number of rows."""
    path = directory / f"rows-{num_rows}-{seed}.arrow"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    rng = np.random.default_rng(seed + 1)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
    lengths = lengths_of(num_rows, seed)
    with pa.ipc.new_stream(temporary, schema) as stream:
        for first in range(0, num_rows, BATCH_ROWS):
            length = lengths[first : first + BATCH_ROWS]
            offsets = pa.array(np.concatenate([[0], np.cumsum(length)]).astype(np.int32))
            ids = rng.integers(0, VOCABULARY, int(length.sum()), dtype=np.int32)
            runs = np.stack([length * 2 // 5, length - length * 2 // 5], axis=1).ravel()
            mask = np.repeat(np.tile(np.array([0, 1], np.int8), length.size), runs)
            columns = [pa.ListArray.from_arrays(offsets, values) for values in (pa.array(ids), pa.array(mask))]
            stream.write_batch(pa.record_batch(columns, schema=schema))
    temporary.replace(path)
    return path


def drop_from_memory(path: Path) -> None:
    """Let the next read of a file come from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def bring_into_memory(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 22)
        while file.readinto(buffer):
            pass
