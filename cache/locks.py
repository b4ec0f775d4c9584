"""Locks of the operating system, and names that no two processes share, on one machine or on several.

A lock ends with its process, however that ends. Where a file system cannot lock, that is said, and nothing is guessed.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from cache.errors import CannotLock

CANNOT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
HOST = re.sub(r"[^A-Za-z0-9]+", "_", socket.gethostname())[:64]  # as it stands in a name: without dots and dashes


def beside(final: Path) -> Path:
    """A name for what will become `final`: no other process, pod or machine, has the same one."""
    return final.with_name(f"{final.name}.tmp-{HOST}-{os.getpid()}-{secrets.token_hex(4)}")


def final_name(name: str) -> str:
    """What a name that `beside` made is going to be; any other name is itself."""
    return name.split(".tmp-")[0]


def is_of_another_host(name: str) -> bool:
    """Whether a name that `beside` made comes from another machine, whose locks may not be seen here."""
    return f".tmp-{HOST}-" not in name


def lock_of(path: Path) -> Path:
    """The lock file of a directory or a slice, by its final name or a temporary one."""
    return path.parent / ".locks" / final_name(path.name).removesuffix(".arrow")


@contextlib.contextmanager
def held(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock file `path`; False when another process holds it and this one does not wait.

    Raises CannotLock where the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield try_lock(descriptor, path, wait=wait, shared=shared)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, path: Path, *, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file until its last descriptor is closed; False when another process has it. Raises CannotLock."""
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in CANNOT:
            raise CannotLock(
                f"{path}: this file system cannot lock files ({os.strerror(error.errno)}), and without locks two "
                "processes would write one place. Mount it with locks (Lustre: -o flock; NFS: without nolock), or set "
                "home or $DFLASH_HOME to another disk."
            ) from error
        raise
    return True


def holders(path: Path) -> list[int]:
    """Processes of this machine that hold the lock file, as the kernel lists them: looking takes no lock from anybody.

    Empty where nobody holds it, where there is no such file, and where the kernel lists no locks.
    """
    with contextlib.suppress(OSError):
        inode = str(path.stat().st_ino)
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 1: FLOCK  ADVISORY  WRITE 708 fe:00:1234 0 EOF; devices are spelled otherwise there on some file systems
        return [int(it[4]) for it in lines if it[1] == "FLOCK" and it[5].rpartition(":")[2] == inode and it[4] != "-1"]
    return []
