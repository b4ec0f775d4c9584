"""What lies under a home's `tokens/`, how large it is, and how it is taken away."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cache.disk.commit import Site, locked
from cache.disk.manifest import Manifest
from cache.disk.store import TokenCache
from cache.errors import CacheError


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory of `tokens/`."""

    path: Path
    size_bytes: int
    manifest: Manifest | None
    problem: str | None  # why it does not open

    @property
    def is_leftover(self) -> bool:
        return ".tmp-" in self.path.name


def entries(home: Path) -> list[Entry]:
    """Every cache under `home`, and what builds left or are writing now; by name."""
    tokens = home / "tokens"
    if not tokens.is_dir():
        return []
    return [entry_at(path) for path in sorted(tokens.iterdir()) if path.is_dir() and not path.name.startswith(".")]


def entry_at(path: Path) -> Entry:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if ".tmp-" in path.name:
        return Entry(path, size, None, "not finished")
    try:
        return Entry(path, size, TokenCache.open(path).manifest, None)
    except CacheError as error:
        return Entry(path, size, None, str(error))


def remove(path: Path) -> None:
    """Take a cache away: out of sight in one rename, then file by file; who has it open keeps what is mapped."""
    site = Site(path, path.with_name(f"{path.name.split('.tmp-')[0]}.tmp-{os.getpid()}-removed"))
    with locked(Site(path.with_name(path.name.split(".tmp-")[0]), site.temporary)):
        path.rename(site.temporary)
        shutil.rmtree(site.temporary)
