"""The open token cache: read-only memory maps and a manifest that vouches for them."""

import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int64, Shaped, UInt8, UInt16
from numpy import ndarray

from cache.disk.manifest import ARRAYS, Manifest
from cache.disk.shard import shard_bytes
from cache.errors import CacheCorrupt, CacheIncomplete, CannotLock
from cache.locks import try_lock

READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TokenCache:
    """Rows of a finished token cache: row `i` is `ids[offsets[i]:offsets[i + 1]]`. Pickles as its path."""

    path: Path
    manifest: Manifest
    ids: Shaped[ndarray, "T"]  # uint16 or uint32
    mask: UInt8[ndarray, "T"]
    offsets: Int64[ndarray, "ends"]  # R + 1
    split: UInt8[ndarray, "R"]  # 0 train, 1 held out
    group: UInt16[ndarray, "R"]  # index into manifest.group_names
    source_row: Int64[ndarray, "R"]
    _maps: dict[str, mmap.mmap] = field(repr=False)

    @classmethod
    def open(cls, path: Path | str) -> "TokenCache":
        """Map a cache; checks layout, dtypes, file sizes and offsets, but reads no token (`verify` does)."""
        path = Path(path)
        manifest = read_manifest(path)
        arrays: dict[str, Any] = {}
        maps: dict[str, mmap.mmap] = {}
        for name in ARRAYS:
            arrays[name] = _map(path, name, manifest, maps)
        cache = cls(path, manifest, **arrays, _maps=maps)
        cache._check_rows()
        return cache

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def lengths(self) -> Int64[ndarray, "R"]:
        return np.diff(self.offsets)

    def rows(self, split: int) -> Int64[ndarray, "n"]:
        """Ids of the rows of one split: 0 train, 1 held out."""
        return np.flatnonzero(self.split == split).astype(np.int64, copy=False)

    def will_need(self, starts: Int64[ndarray, "B"], stops: Int64[ndarray, "B"]) -> None:
        """Ask the kernel to read these token ranges into memory; returns at once."""
        for name, array in (("ids", self.ids), ("mask", self.mask)):
            size = array.dtype.itemsize
            low = starts * size // mmap.PAGESIZE * mmap.PAGESIZE
            for begin, length in zip(low.tolist(), (stops * size - low).tolist(), strict=True):
                self._maps[name].madvise(mmap.MADV_WILLNEED, begin, length)

    def verify(self) -> None:
        """Read every file and compare its checksum with the manifest's; raises `CacheCorrupt`."""
        for name, facts in self.manifest.arrays.items():
            for file, expected in ((chunk_path(name), facts.xxh3), (f"{name}/zarr.json", facts.metadata_xxh3)):
                try:
                    found = file_xxh3(self.path / file)
                except FileNotFoundError:
                    raise CacheIncomplete(f"{self.path / file}: missing. {_AGAIN}") from None
                if found != expected:
                    raise CacheCorrupt(f"{self.path / file}: checksum {found}, expected {expected}. {_AGAIN}")

    def _check_rows(self) -> None:
        file = self.path / chunk_path("offsets")
        ends = int(self.offsets[0]), int(self.offsets[-1])
        if ends != (0, self.manifest.tokens):
            raise CacheCorrupt(
                f"{file}: offsets go from {ends[0]} to {ends[1]}, expected 0 to {self.manifest.tokens}. {_AGAIN}"
            )
        falling = np.flatnonzero(self.offsets[1:] < self.offsets[:-1])
        if falling.size:
            raise CacheCorrupt(f"{file}: offsets fall after row {falling[0]}, expected them to rise. {_AGAIN}")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCache.open, (self.path,)


_AGAIN = "The file was changed or damaged: remove the cache (python -m cache remove) and prepare the rows again."


def chunk_path(name: str) -> str:
    return f"{name}/c/0"


def read_manifest(path: Path) -> Manifest:
    """The manifest of a cache, checked against its own checksum."""
    file = path / "zarr.json"
    try:
        content = json.loads(file.read_bytes())
        attributes = content["attributes"]
        is_group = content["zarr_format"] == 3 and content["node_type"] == "group"
    except FileNotFoundError:
        what = "no zarr.json in it" if path.is_dir() else "no such directory"
        raise CacheIncomplete(f"{path}: {what}, expected a finished token cache. Prepare the rows first.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheCorrupt(f"{file}: not a manifest ({error}). {_AGAIN}") from None
    if not is_group or not isinstance(attributes, dict):
        raise CacheCorrupt(f"{file}: not the metadata of a Zarr v3 group. {_AGAIN}")
    return Manifest.from_json(attributes, str(file))


def file_xxh3(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _share(descriptor: int, path: Path) -> bool:
    """Keep a cache from being taken away while it is mapped: the map keeps the file open, and with it this lock.

    False when somebody is just taking it away. A file system without locks keeps nobody from reading.
    """
    try:
        return try_lock(descriptor, path, shared=True)
    except CannotLock:
        return True


def _map(path: Path, name: str, manifest: Manifest, maps: dict[str, mmap.mmap]) -> Shaped[ndarray, "..."]:
    """Map the flat buffer that is the front of a shard's file."""
    file = path / chunk_path(name)
    dtype, size = np.dtype(manifest.dtypes()[name]), manifest.sizes()[name]
    facts = manifest.arrays.get(name)
    expected = shard_bytes(size, dtype.itemsize)
    if facts is None or facts.size_bytes != expected:
        raise CacheCorrupt(f"{path}: the manifest gives {facts} for {name}, expected {expected} bytes. {_AGAIN}")
    try:
        with file.open("rb") as opened:
            found = opened.seek(0, 2)
            if name == "ids" and not _share(opened.fileno(), path):
                raise CacheIncomplete(f"{path}: it is being taken away. Prepare the rows again.")
            if found == expected:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CacheIncomplete(f"{file}: missing, expected {expected} bytes. {_AGAIN}") from None
    if found < expected:
        raise CacheIncomplete(f"{file}: {found} bytes, expected {expected}: it was cut short. {_AGAIN}")
    if found > expected:
        raise CacheCorrupt(f"{file}: {found} bytes, expected {expected}: it has grown. {_AGAIN}")
    maps[name] = mapped
    return np.frombuffer(mapped, dtype=dtype, count=size)
