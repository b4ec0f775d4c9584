"""Directories that are whole or absent: written beside their place, flushed to disk, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def durable_directory(final: Path) -> Iterator[Path]:
    """A temporary directory that becomes `final` when the block ends, and is removed when it raises.

    A directory of that name that is already there is replaced.
    """
    partial = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in sorted(partial.rglob("*")):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        sync_directory(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        sync_directory(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def checksum(path: Path) -> str:
    """xxh3-128 of a file's content, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
