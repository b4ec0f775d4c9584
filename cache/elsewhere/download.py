"""What every download does: it asks for room on the disk first, and tells how far it is."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cache.errors import BadSource

LEFT_FREE = 1 << 28  # bytes for everything else


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a download is."""

    source: str
    done: int  # bytes
    total: int
    seconds: float


Report = Callable[[FetchProgress], None]


def refuse_without_room(directory: Path, size_bytes: int, source: str) -> None:
    """Raise where so many bytes do not fit on the disk of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if size_bytes + LEFT_FREE > free:
        raise BadSource(
            f"rows.source: {source}: {size_bytes / 1e9:.2f} GB to fetch, but {directory} has {free / 1e9:.2f} GB free. "
            "Make room, or set home or $DFLASH_HOME to a larger disk."
        )
