"""Room on the disk, asked before anything is fetched."""

import shutil
from pathlib import Path

from cache.errors import BadSource

LEFT_FREE = 1 << 28  # bytes for everything else


def refuse_without_room(directory: Path, size_bytes: int, source: str) -> None:
    """Raise where so many bytes do not fit on the disk of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if size_bytes + LEFT_FREE > free:
        raise BadSource(
            f"rows.source: {source}: {size_bytes / 1e9:.2f} GB to fetch, but {directory} has {free / 1e9:.2f} GB free. "
            "Make room, or set home or $DFLASH_HOME to a larger disk."
        )
