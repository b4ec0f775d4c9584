"""A mapped source file, and what the kernel is told about it: what is read next, and what is done.

A plain map reads ahead too little for a fast disk, and every page it ever touched counts as resident memory. So the
bytes in front are asked for early, and those behind are let go of; they stay in the page cache for others.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

AHEAD = 1 << 26  # bytes asked for in front of what is being read
BEHIND = 1 << 25  # bytes that stay mapped behind it
UNIT = 1 << 22  # bytes asked for at once, each unit once


class MappedFile:
    """A file mapped read-only, as an Arrow buffer."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.buffer = pa.py_buffer(self._map)
        self._used: deque[tuple[int, int]] = deque()
        self._asked = np.zeros(-(-len(self._map) // UNIT), dtype=bool)

    def __enter__(self) -> "MappedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not closed: arrays may still look into the map. It goes with the last of them.
        del self.buffer

    def share(self, used: Sequence[tuple[int, int]]) -> float:
        """How far into the file these addresses reach, 0..1."""
        return max((self._range(low, high)[1] for low, high in used), default=0) / max(1, len(self._map))

    def will_read(self, used: Sequence[tuple[int, int]]) -> None:
        """Ask for what is used and for what lies in front of it."""
        for low, high in used:
            begin, end = self._range(low, high)
            for unit in range(begin // UNIT, -(-min(end + AHEAD, len(self._map)) // UNIT)):
                if not self._asked[unit]:
                    self._asked[unit] = True
                    size = min(UNIT, len(self._map) - unit * UNIT)
                    self._map.madvise(mmap.MADV_WILLNEED, unit * UNIT, size)

    def done(self, used: Sequence[tuple[int, int]]) -> None:
        """Let go of whole pages that were used some time ago: a writer may still read the last ones."""
        self._used.extend(self._range(low, high) for low, high in used)
        while sum(end - begin for begin, end in self._used) > BEHIND:
            begin, end = self._used.popleft()
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
            if size > 0:
                self._map.madvise(mmap.MADV_DONTNEED, first, size)

    def _range(self, low: int, high: int) -> tuple[int, int]:
        """Addresses as positions in the file; decompressed buffers lie elsewhere and give nothing."""
        base = self.buffer.address
        if not base <= low <= high <= base + len(self._map):
            return 0, 0
        return low - base, high - base


def read_blocks(path: Path, size_bytes: int = UNIT) -> Iterator[memoryview]:
    """A file's bytes, block by block in one buffer, asked for ahead of being read."""
    buffer = memoryview(bytearray(size_bytes))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        position = 0
        os.posix_fadvise(file.fileno(), 0, AHEAD, os.POSIX_FADV_WILLNEED)
        while count := file.readinto(buffer):
            position += count
            os.posix_fadvise(file.fileno(), position + AHEAD - size_bytes, size_bytes, os.POSIX_FADV_WILLNEED)
            yield buffer[:count]
