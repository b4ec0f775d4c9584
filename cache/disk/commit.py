"""Where a token cache is built and how it becomes visible: one lock a key, one temporary directory, one rename.

A reader sees a finished cache or none. What a killed build leaves is a directory that no reader opens, and the next
build of any key sweeps it away, once its lock shows that nobody is at it.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.disk.manifest import ARRAYS, Manifest
from cache.disk.metadata import write_manifest
from cache.disk.shard import shard_bytes
from cache.errors import CacheError
from cache.locks import beside, final_name, held, is_of_another_host, lock_of

ANOTHER_HOSTS_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Site:
    """Directories of one key under `home`."""

    final: Path
    temporary: Path

    @classmethod
    def of(cls, home: Path, key: str) -> "Site":
        tokens = home / "tokens"
        return cls(tokens / key, beside(tokens / key))


@contextlib.contextmanager
def locked(site: Site) -> Iterator[None]:
    """Hold the key's lock; waits for another builder. The kernel lets go of it when a builder dies."""
    with held(lock_of(site.final)):
        yield


def sweep(site: Site) -> None:
    """Remove what killed builds left, of this key (whose lock is held) and of others that nobody builds now.

    What another machine writes to is left for a day, in case its locks are not seen here.
    """
    for path in site.final.parent.glob("*.tmp-*"):
        if is_another_hosts(path):
            continue
        if final_name(path.name) == site.final.name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with held(lock_of(path), wait=False) as is_nobodys:
            if is_nobodys:
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


def is_another_hosts(path: Path) -> bool:
    """Whether another machine wrote to this temporary directory within a day."""
    return is_of_another_host(path.name) and time.time() - _last_change(path) < ANOTHER_HOSTS_S


def _last_change(directory: Path) -> float:
    """When something in it was last written, in seconds since 1970: its own time stays while its files grow."""
    times = [0.0]
    for parent, _, files in os.walk(directory):
        for name in (".", *files):
            with contextlib.suppress(FileNotFoundError):
                times.append(os.lstat(os.path.join(parent, name)).st_mtime)
    return max(times)


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
