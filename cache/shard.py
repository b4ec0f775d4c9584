"""One array's file: a flat buffer that is also one uncompressed shard of the Zarr v3 sharding codec.

The elements stand back to back, so the front of the file maps as a flat array. Inner chunks are equal pieces of it,
the last one padded with zeros; behind them stands the shard's index (offset and size of each inner chunk, and the
crc32c of that), by which any Zarr reader finds the inner chunk of one row without reading the rest.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import google_crc32c
import numpy as np
import xxhash
from jaxtyping import Shaped, UInt8
from numpy import ndarray

from cache.manifest import INNER_CHUNK

PIECE = 1 << 16  # elements that are checked, narrowed and hashed while they are in the processor's cache
BLOCK = 4096  # what O_DIRECT wants offsets, sizes and addresses to be multiples of


def inner_chunk(size: int) -> int:
    """Elements of an inner chunk of an array of `size`; a small array is one, so that it is not padded to millions."""
    return min(INNER_CHUNK, max(1, size))


def shard_bytes(size: int, itemsize: int) -> int:
    """Size of the file of an array: inner chunks, 16 bytes of index for each, 4 of checksum."""
    inner = inner_chunk(size)
    count = -(-max(1, size) // inner)
    return count * (inner * itemsize + 16) + 4


def shard_index(size: int, itemsize: int) -> bytes:
    inner = inner_chunk(size)
    count = -(-max(1, size) // inner)
    entries = np.empty((count, 2), dtype="<u8")
    entries[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(inner * itemsize)
    entries[:, 1] = inner * itemsize
    index = entries.tobytes()
    return index + int(google_crc32c.value(index)).to_bytes(4, "little")


@runtime_checkable
class Pending(Protocol):
    """A write that may still be going on."""

    def result(self) -> Any: ...


Submit = Callable[..., Pending]


class IdOutOfRange(Exception):
    """A value is below 0 or not below the limit: its position in the array that was written, and what it is."""

    def __init__(self, position: int, value: int) -> None:
        super().__init__(position, value)
        self.position, self.value = position, value


class ShardFile:
    """Writes one array's file front to back through a double buffer: one half is filled while the other is written."""

    def __init__(
        self, path: Path, dtype: str | np.dtype[Any], *, submit: Submit, buffer_bytes: int, direct: bool = True
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.size = 0  # elements written so far
        self._dtype = np.dtype(dtype)
        self._submit = submit
        self._fd = _open(path, direct)
        self._buffers = [_aligned(buffer_bytes), _aligned(buffer_bytes)]
        self._pending: list[Pending | None] = [None, None]
        self._half, self._fill, self._position = 0, 0, 0
        self._digest = xxhash.xxh3_64()

    def write(self, values: Shaped[ndarray, "n"], limit: int | None = None) -> None:
        """Append values, narrowed to the file's dtype; each must be in 0..limit-1 where a limit is given."""
        unsigned = values.view(f"u{values.dtype.itemsize}") if values.dtype.kind in "iu" else values
        bound = _bound(values.dtype, limit)
        itemsize = self._dtype.itemsize
        done = 0
        while done < values.size:
            room = (self._buffers[0].size - self._fill) // itemsize
            piece = unsigned[done : done + min(PIECE, room)]
            if bound is not None and int(piece.max()) >= bound:
                wrong = done + int(np.argmax(piece >= bound))
                raise IdOutOfRange(wrong, int(values[wrong]))
            end = self._fill + piece.size * itemsize
            target = self._buffers[self._half][self._fill : end]
            np.copyto(target.view(self._dtype), piece, casting="unsafe")
            self._digest.update(target.data)
            self._fill = end
            done += piece.size
            if end == self._buffers[0].size:
                self._flush()
        self.size += values.size

    def close(self, *, durable: bool = True) -> tuple[int, str]:
        """Pad the last inner chunk, append the index, wait for the disk; returns the file's size and checksum."""
        inner, itemsize = inner_chunk(self.size), self._dtype.itemsize
        padding = -(-max(1, self.size) // inner) * inner - self.size
        index = shard_index(self.size, itemsize)
        size = self.size
        zeros = np.zeros(min(padding, PIECE), dtype=self._dtype)
        while padding:
            self.write(zeros[: min(padding, PIECE)])
            padding -= min(padding, PIECE)
        self._append(np.frombuffer(index, dtype=np.uint8))
        total = self._position + self._fill
        self._flush()
        for pending in self._pending:
            if pending is not None:
                pending.result()
        os.ftruncate(self._fd, total)  # the last direct write was padded to whole blocks
        if durable:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        assert total == shard_bytes(size, itemsize)
        return total, self._digest.hexdigest()

    def abandon(self) -> None:
        """Let go of the file after a failure; what it holds is worth nothing."""
        for pending in self._pending:
            with contextlib.suppress(Exception):  # the failure that led here is being raised already
                if pending is not None:
                    pending.result()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, raw: UInt8[ndarray, "n"]) -> None:
        while raw.size:
            room = self._buffers[0].size - self._fill
            part = raw[:room]
            self._buffers[self._half][self._fill : self._fill + part.size] = part
            self._digest.update(part.data)
            self._fill += part.size
            raw = raw[room:]
            if self._fill == self._buffers[0].size:
                self._flush()

    def _flush(self) -> None:
        """Hand the filled half to the writer thread and go on with the other, once that one has been written."""
        if not self._fill:
            return
        whole = -(-self._fill // BLOCK) * BLOCK
        half = self._buffers[self._half]
        half[self._fill : whole] = 0
        self._pending[self._half] = self._submit(_write_all, self._fd, half[:whole], self._position)
        self._position += self._fill
        self._half, self._fill = 1 - self._half, 0
        other = self._pending[self._half]
        if other is not None:
            other.result()
            self._pending[self._half] = None


def _bound(dtype: np.dtype[Any], limit: int | None) -> int | None:
    """What the values, read as unsigned, must stay below: a negative one then reads as too large."""
    if limit is None:
        return None
    return min(limit, 1 << (8 * dtype.itemsize - 1)) if dtype.kind == "i" else limit


def _open(path: Path, direct: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:  # tmpfs and some network file systems have no direct writes
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # Linux makes the file before it refuses the flag
    return os.open(path, flags, 0o644)


def _write_all(fd: int, data: UInt8[ndarray, "n"], position: int) -> None:
    """Write all of it: one call takes at most 2 GiB, and a nearly full disk takes less."""
    view = data.data
    while view:
        try:
            count = os.pwrite(fd, view, position)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & getattr(os, "O_DIRECT", 0):
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # opened, but refused: write through the page cache
            continue
        view, position = view[count:], position + count


def _aligned(size_bytes: int) -> UInt8[ndarray, "n"]:
    return np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
