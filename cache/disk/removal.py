"""What lies under a home's `tokens/`, how large it is, and how it is taken away: only what is ours and not in use."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cache.disk.commit import is_another_hosts
from cache.disk.manifest import ARRAYS, Manifest
from cache.disk.store import TokenCache, chunk_path
from cache.errors import CacheError, CacheInUse, CacheMismatch
from cache.json_file import read_json
from cache.locks import beside, final_name, held, lock_of, try_lock

LEDGER = "stages.json"  # of a run: which cache it is trained on, among others
_KEY = re.compile(r"[0-9a-f]{32}")
_OURS = {*ARRAYS, "zarr.json"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory of `tokens/`."""

    path: Path
    size_bytes: int
    manifest: Manifest | None
    problem: str | None  # why it does not open


@dataclass(frozen=True, slots=True)
class SliceFile:
    """A slice of tokenised conversations, or what a builder writes of one or has left."""

    path: Path
    size_bytes: int
    used: float  # by a build, in seconds since 1970


def entries(home: Path) -> list[Entry]:
    """Every cache under `home`, and what builds left or are writing now; by name."""
    tokens = home / "tokens"
    if not tokens.is_dir():
        return []
    return [entry_at(path) for path in sorted(tokens.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def users(home: Path) -> dict[str, list[str]]:
    """Names of the runs that are trained on each cache, by its key."""
    found: dict[str, list[str]] = {}
    for ledger in sorted(home.glob(f"runs/*/{LEDGER}")):
        with contextlib.suppress(ValueError, AttributeError):
            key = (read_json(ledger) or {}).get("prepare", {}).get("key")
            found.setdefault(str(key), []).append(ledger.parent.name)
    return found


def entry_at(path: Path) -> Entry:
    size = size_bytes(path)
    if ".tmp-" in path.name:
        return Entry(path, size, None, "not finished")
    try:
        return Entry(path, size, TokenCache.open(path).manifest, None)
    except CacheError as error:
        return Entry(path, size, None, str(error))


def size_bytes(directory: Path) -> int:
    """Of all files below; what goes away meanwhile counts nothing."""
    total = 0
    for parent, _, files in os.walk(directory):  # unlike rglob, it goes on where a directory has gone
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def remove(path: Path, home: Path) -> None:
    """Take a cache away, or what a killed build left: out of sight in one rename, then file by file.

    Raises CacheMismatch for what is no cache of this home, CacheInUse while one builds or reads it.
    """
    why_not = why_not_ours(path, home)
    if why_not is not None:
        raise CacheMismatch(f"{path}: {why_not}. Only token caches of {home / 'tokens'} are removed.")
    with _nobodys(path):
        take_away(path, beside(path.with_name(final_name(path.name))))


def why_not_ours(path: Path, home: Path) -> str | None:
    """None for what a build made under this home; else what speaks against it."""
    tokens = home / "tokens"
    if path.parent.resolve() != tokens.resolve():
        return "not a directory right below the tokens of this home"
    if path.is_symlink() or not path.is_dir():
        return "not a directory"
    if not _KEY.fullmatch(final_name(path.name)):
        return "its name is no key"
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _OURS)
    return f"holds {', '.join(foreign[:3])}, which no build writes" if foreign else None


@contextlib.contextmanager
def _nobodys(path: Path) -> Iterator[None]:
    """Hold all locks of a cache: the one of its builders, and the one of its readers (`TokenCache.open`)."""
    if ".tmp-" in path.name and is_another_hosts(path):
        raise CacheInUse(f"{path}: another machine wrote to it within a day, so it is kept.")
    with ExitStack() as stack:
        if not stack.enter_context(held(lock_of(path), wait=False)):
            raise CacheInUse(f"{path}: a process builds it now, so it is kept. Try again when that has ended.")
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context((path / chunk_path("ids")).open("rb"))
            if not try_lock(file.fileno(), path):
                raise CacheInUse(f"{path}: a process reads it now, so it is kept. Try again when that has ended.")
        yield


def take_away(path: Path, aside: Path) -> None:
    """A directory out of sight in one rename, then file by file; who has a file of it open keeps what is mapped."""
    path.rename(aside)
    shutil.rmtree(aside)


def slice_files(home: Path) -> list[SliceFile]:
    """Every slice under `home`, by name, finished or not."""
    found = []
    for path in sorted(home.glob("tokens/.slices/*/*.arrow*")):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append(SliceFile(path, stat.st_size, stat.st_mtime))
    return found


def drop_slices(home: Path, unused_s: float = 0.0) -> tuple[int, int]:
    """Delete slices that no build has used for so long, unless one is being made: how many, and their bytes.

    A build that reads slices makes those again that are gone. Locks stay: somebody may just have opened one.
    """
    dropped = freed = 0
    before = time.time() - unused_s
    for one in slice_files(home):
        with held(lock_of(one.path), wait=False) as is_nobodys, contextlib.suppress(FileNotFoundError):
            if is_nobodys and one.path.stat().st_mtime <= before:
                one.path.unlink()
                dropped, freed = dropped + 1, freed + one.size_bytes
    return dropped, freed
