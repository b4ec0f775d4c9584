"""A file system that cannot lock is named as such, and names of temporary files meet nobody's."""

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from arrow_rows import table

from cache import locks
from cache.disk.commit import Site, sweep
from cache.disk.store import TokenCache
from cache.errors import CannotLock
from cache.locks import beside, final_name, held


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_reading_goes_on(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    from dflash.training.checkpoint import run_lock

    path = make(data=table([[1, 2, 3]])).path

    def cannot(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", cannot)
    with pytest.raises(CannotLock, match="this file system cannot lock files"):
        make(data=table([[1, 2, 4]]))
    with pytest.raises(CannotLock, match="or set home"), run_lock(tmp_path / "run"):
        raise AssertionError("nobody holds a lock here")
    assert TokenCache.open(path).ids.tolist() == [1, 2, 3]


def test_a_lock_is_held_by_one_and_shared_by_many(tmp_path: Path) -> None:
    with held(tmp_path / "x") as first, held(tmp_path / "x", wait=False) as second:
        assert (first, second) == (True, False)
    with held(tmp_path / "x", shared=True), held(tmp_path / "x", wait=False, shared=True) as both:
        assert both
        with held(tmp_path / "x", wait=False) as alone:
            assert not alone


def test_processes_of_one_number_on_two_machines_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pods each process is number 7, and some file systems show locks on one machine only."""
    key = "0" * 32
    theirs = [beside(tmp_path / "tokens" / key), beside(tmp_path / "tokens" / ("1" * 32))]
    monkeypatch.setattr(locks, "HOST", "another")
    ours = Site.of(tmp_path, key)
    names = {path.name for path in (*theirs, ours.temporary, Site.of(tmp_path, key).temporary)}
    assert len(names) == 4
    assert {final_name(name) for name in names} == {key, "1" * 32}
    for path in (*theirs, ours.temporary):
        path.mkdir(parents=True)
    sweep(ours)
    assert [path.exists() for path in (*theirs, ours.temporary)] == [True, True, False]
    tomorrow = time.time() + 90_000
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    sweep(ours)
    assert not any(path.exists() for path in theirs)
