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
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import google_crc32c
import numpy as np
import xxhash
from jaxtyping import Shaped, UInt8
from numpy import ndarray

from cache.disk.manifest import INNER_CHUNK

PIECE = 1 << 16  # elements that are checked, narrowed and hashed while they are in the processor's cache
PASS_BYTES = 1 << 20  # handed over at once where nothing is copied: still in the cache when it is written
MOST_PASSED = 8
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
    """Writes one array's file front to back while it is being made; `submit` starts a write in another thread.

    Direct writes want aligned memory: values are copied into a double buffer, one half of which is filled while the
    other is written. Through the page cache, values that need no narrowing are written from where they lie.
    """

    def __init__(
        self, path: Path, dtype: str | np.dtype[Any], *, submit: Submit, buffer_bytes: int, direct: bool = True
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.size = 0  # elements written so far
        self._dtype = np.dtype(dtype)
        self._submit = submit
        self._fd, self._direct = _open(path, direct)
        self._halves = [_aligned(buffer_bytes), _aligned(buffer_bytes)]
        self._using: list[Pending | None] = [None, None]  # the write that still reads a half
        self._passed: deque[Pending] = deque()  # writes of values where they lie
        self._half, self._fill, self._position = 0, 0, 0
        self._digest = xxhash.xxh3_64()

    def write(self, values: Shaped[ndarray, "n"], limit: int | None = None) -> None:
        """Append values, narrowed to the file's dtype; each must be in 0..limit-1 where a limit is given."""
        bound = _bound(values.dtype, limit)
        unsigned = values.view(f"u{values.dtype.itemsize}")
        if not self._direct and unsigned.dtype.itemsize == self._dtype.itemsize and values.nbytes >= PASS_BYTES:
            self._pass(unsigned, bound)
        else:
            self._copy(unsigned, bound)
        self.size += values.size

    def close(self, *, durable: bool = True) -> tuple[int, str]:
        """Pad the last inner chunk, append the index, wait for the disk; returns the file's size and checksum."""
        size, itemsize = self.size, self._dtype.itemsize
        padding = -size % inner_chunk(size) if size else 1
        self._copy(np.zeros(padding, dtype=self._dtype), None)
        self._append(np.frombuffer(shard_index(size, itemsize), dtype=np.uint8))
        self._flush()
        for pending in (*self._using, *self._passed):
            if pending is not None:
                pending.result()
        os.ftruncate(self._fd, self._position)  # the last direct write was padded to whole blocks
        if durable:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        assert self._position == shard_bytes(size, itemsize)
        return self._position, self._digest.hexdigest()

    def abandon(self) -> None:
        """Let go of the file after a failure; what it holds is worth nothing."""
        for pending in (*self._using, *self._passed):
            with contextlib.suppress(Exception):  # the failure that led here is being raised already
                if pending is not None:
                    pending.result()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _copy(self, unsigned: Shaped[ndarray, "n"], bound: int | None) -> None:
        """Check, narrow and hash piece by piece, while a piece is in the processor's cache."""
        itemsize, done = self._dtype.itemsize, 0
        while done < unsigned.size:
            room = (self._halves[0].size - self._fill) // itemsize
            piece = unsigned[done : done + min(PIECE, room)]
            _check(piece, bound, done)
            end = self._fill + piece.size * itemsize
            target = self._halves[self._half][self._fill : end]
            np.copyto(target.view(self._dtype), piece, casting="unsafe")
            self._digest.update(target.data)
            self._fill = end
            done += piece.size
            if end == self._halves[0].size:
                self._flush()

    def _pass(self, unsigned: Shaped[ndarray, "n"], bound: int | None) -> None:
        """Check and hash, and have it written from where it lies; holds the values until that is done."""
        self._flush()
        step = PASS_BYTES // unsigned.itemsize
        for begin in range(0, unsigned.size, step):
            part = unsigned[begin : begin + step]
            for done in range(0, part.size, PIECE):
                piece = part[done : done + PIECE]
                _check(piece, bound, begin + done)
                self._digest.update(piece.data)
            if len(self._passed) == MOST_PASSED:
                self._passed.popleft().result()
            self._passed.append(self._submit(_write_all, self._fd, part.view(np.uint8), self._position))
            self._position += part.nbytes

    def _append(self, raw: UInt8[ndarray, "n"]) -> None:
        while raw.size:
            part = raw[: self._halves[0].size - self._fill]
            self._halves[self._half][self._fill : self._fill + part.size] = part
            self._digest.update(part.data)
            self._fill += part.size
            raw = raw[part.size :]
            if self._fill == self._halves[0].size:
                self._flush()

    def _flush(self) -> None:
        """Have the filled half written, and go on with the other once nothing reads it any more."""
        if not self._fill:
            return
        half, fill = self._halves[self._half], self._fill
        whole = -(-fill // BLOCK) * BLOCK if self._direct else fill  # only the last direct write is not full
        half[fill:whole] = 0
        self._using[self._half] = self._submit(_write_all, self._fd, half[:whole], self._position)
        self._position += fill
        self._half, self._fill = 1 - self._half, 0
        other = self._using[self._half]
        if other is not None:
            other.result()


def _check(piece: Shaped[ndarray, "n"], bound: int | None, position: int) -> None:
    if bound is not None and int(piece.max()) >= bound:
        wrong = int(np.argmax(piece >= bound))
        signed = piece.view(f"i{piece.itemsize}")[wrong]  # -1 is what people look for, not 4294967295
        raise IdOutOfRange(position + wrong, int(signed))


def _bound(dtype: np.dtype[Any], limit: int | None) -> int | None:
    """What the values, read as unsigned, must stay below: a negative one then reads as too large."""
    if limit is None:
        return None
    return min(limit, 1 << (8 * dtype.itemsize - 1)) if dtype.kind == "i" else limit


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    """A new file, and whether it takes direct writes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644), hasattr(os, "O_DIRECT")
        except OSError as error:  # tmpfs and some network file systems have no direct writes
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # Linux makes the file before it refuses the flag
    return os.open(path, flags, 0o644), False


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
