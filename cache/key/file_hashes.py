"""Hash of the source's content, at disk speed, and a sidecar so that an unchanged file is hashed once.

The sidecar remembers size, times and inode beside the hash. A file that changed a moment ago is not remembered: its
clock is too coarse to show that it changed again.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from cache.config import RowsConfig
from cache.json_file import write_json
from cache.source.find import SourceFiles
from cache.source.mapped import read_blocks
from cache.source.open import open_source

SETTLED_S = 2.0  # a file's times tell every change once it is this old

State = tuple[int, ...]


def state_of(path: Path) -> State:
    """What the file system says of a file; equal states of a settled file mean equal content.

    The number of the device is not in it: each machine that shares a disk counts its own.
    """
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def states_of(parts: Iterable[SourceFiles]) -> dict[Path, State]:
    """The state of every file of these sources."""
    return {file.path: state_of(file.path) for part in parts for file in (*part.files, *part.indices)}


def hash_sources(parts: Sequence[SourceFiles], sidecar: Path) -> str:
    """xxh3 over the files' formats and hashes, in order; names and places are not in it, nor who named them.

    Only row numbers belong to the files before them, so only there it counts where a part begins.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        if part.indices:
            digest.update(b"|")
        for role, files in (("rows", part.files), ("indices", part.indices)):
            for file in files:
                digest.update(f"{role}:{file.format}:{hash_file(file.path, sidecar)};".encode())
    return digest.hexdigest()


def hash_file(path: Path, sidecar: Path) -> str:
    """xxh3-128 of a file's content, from the sidecar directory where the file is the one that was hashed."""
    place = str(path.resolve())
    remembered = sidecar / f"{xxhash.xxh3_128_hexdigest(place.encode())}.json"
    state = state_of(path)
    known = _read(remembered)
    if known is not None and known.get("path") == place and known.get("state") == list(state):
        return str(known["xxh3"])
    digest = xxhash.xxh3_128()
    for block in read_blocks(path):
        digest.update(block)
    changed_ns = max(state[1], state[2])
    if state_of(path) == state and time.time_ns() - changed_ns > SETTLED_S * 1e9:
        write_json(remembered, {"path": place, "state": list(state), "xxh3": digest.hexdigest()}, durable=False)
    return digest.hexdigest()


def hash_table(data: Any, rows: RowsConfig) -> str:
    """xxh3 of the columns that are used of a table in memory, chunk by chunk, as Arrow would send them."""
    digest = xxhash.xxh3_128()
    for chunk in open_source([], rows, data).chunks():
        # `take` leaves out what a slice hides, which the IPC format does not promise to do.
        batch = chunk.batch.take(pa.array(np.arange(chunk.batch.num_rows)))
        with pa.ipc.new_stream(pa.PythonFile(_HashSink(digest), mode="w"), batch.schema.remove_metadata()) as stream:
            stream.write_batch(batch.replace_schema_metadata(None))
    return digest.hexdigest()


class _HashSink:
    """A file that only hashes what is written to it."""

    closed = False

    def __init__(self, digest: Any) -> None:
        self._digest, self._position = digest, 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # not there, or half written by a killed process: hash again
    return content if isinstance(content, dict) else None
