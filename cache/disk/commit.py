"""Where a token cache is built and how it becomes visible: one lock a key, one temporary directory, one rename.

A reader sees a finished cache or none. What a killed build leaves is a directory that no reader opens, and the next
build of any key sweeps it away, once its lock shows that nobody is at it.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.disk.manifest import ARRAYS, Manifest
from cache.disk.metadata import write_manifest
from cache.disk.shard import shard_bytes
from cache.errors import CacheError


@dataclass(frozen=True, slots=True)
class Site:
    """Directories of one key under `home`."""

    final: Path
    temporary: Path

    @classmethod
    def of(cls, home: Path, key: str) -> "Site":
        tokens = home / "tokens"
        return cls(tokens / key, tokens / f"{key}.tmp-{os.getpid()}")


@contextlib.contextmanager
def locked(site: Site) -> Iterator[None]:
    """Hold the key's lock; waits for another builder. The kernel lets go of it when a builder dies."""
    with _lock_file(site.final).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(site: Site) -> None:
    """Remove what killed builds left, of this key (whose lock is held) and of others that nobody builds now."""
    for path in site.final.parent.glob("*.tmp-*"):
        key = path.name.split(".tmp-")[0]
        if key == site.final.name:
            shutil.rmtree(path)
            continue
        with _lock_file(path.with_name(key)).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(path, ignore_errors=True)


def commit(site: Site, manifest: Manifest) -> None:
    """Write the manifest, flush every file and directory, and rename; a spoilt cache of the key makes room."""
    write_manifest(site.temporary, manifest)
    for name in ARRAYS:
        _sync(site.temporary / name / "zarr.json", site.temporary / name / "c", site.temporary / name)
    _sync(site.temporary / "zarr.json", site.temporary)
    if site.final.exists():  # it did not open, else it would have been reused; its readers keep their maps
        aside = site.temporary.with_name(site.temporary.name + "-spoilt")
        site.final.rename(aside)
        site.temporary.rename(site.final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        site.temporary.rename(site.final)
    _sync(site.final.parent)


def no_room(site: Site, error: OSError) -> CacheError:
    """What a full disk means for the user."""
    free = shutil.disk_usage(site.final.parent).free
    return CacheError(
        f"{site.final.parent}: {os.strerror(error.errno or 0)} while the token cache was written, {free:,} bytes are "
        "free now. Free some space (python -m cache list shows what the caches take), or set home to a larger disk."
    )


def disk_bytes(tokens: int, rows: int, itemsize: int) -> int:
    """Size of the files of a cache of so many tokens and rows."""
    token_bytes = shard_bytes(tokens, itemsize) + shard_bytes(tokens, 1)
    return token_bytes + shard_bytes(rows + 1, 8) + shard_bytes(rows, 1) + shard_bytes(rows, 2) + shard_bytes(rows, 8)


def _lock_file(final: Path) -> Path:
    locks = final.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / final.name


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
