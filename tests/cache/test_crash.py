"""A builder that dies anywhere leaves nothing that opens; the next build is whole; two builders make one cache."""

import errno
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_rows import rows_of, table

from cache import build as writer
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadSource, CacheError
from cache.locks import beside

ROWS = [[i % 900, i % 7, 3, 4] for i in range(3000)]
DATA = table(ROWS)
CONFIG = RowsConfig(source="in memory", vocabulary=1000, held_out=0.0)

# Whatever changes the disk passes through one of these: each call is a place to die.
STEPS = [(os, name) for name in ("open", "pwrite", "ftruncate", "fsync", "rename", "replace", "mkdir")]


def build(home: Path, data: Any = DATA, config: RowsConfig = CONFIG) -> Path:
    return writer.build(config, home=home, tokenizer=None, vocabulary=None, data=data)


def at_step(step: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> list[int]:
    """Do `action` at the given call of `STEPS`, counted over all of them; returns the counter."""
    count = [0]
    lock = threading.Lock()

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with lock:
                count[0] += 1
                reached = count[0] == step
            if reached:
                action()
            return inner(*args, **kwargs)

        return counted

    for module, name in STEPS:
        patch.setattr(module, name, wrap(getattr(module, name)))
    return count


def in_child(body: Callable[[], None], timeout_s: float = 60) -> int:
    """Run in a forked process; returns its exit status as `waitpid` gives it."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the builder hangs")


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: dozens of builds need not wait for a disk to flush."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def steps_of_a_build(home: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        count = at_step(-1, lambda: None, patch)
        build(home)
    return count[0]


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "tokens").iterdir() if ".tmp-" in path.name]


def test_killed_at_every_step_nothing_false_opens_and_the_next_build_is_whole(fast: Path) -> None:
    whole = fast / "whole"
    total = steps_of_a_build(whole)
    reference = next(path for path in (whole / "tokens").iterdir() if not path.name.startswith("."))
    assert total > 40
    finished = 0
    for step in range(1, total + 1):
        home = fast / f"home-{step}"

        def die(home: Path = home, step: int = step) -> None:
            with pytest.MonkeyPatch.context() as patch:
                at_step(step, lambda: os.kill(os.getpid(), signal.SIGKILL), patch)
                build(home)

        status = in_child(die)
        assert os.WIFSIGNALED(status), f"step {step} was not reached"
        final = home / "tokens" / reference.name
        if final.exists():  # died after the rename: then it is whole
            TokenCache.open(final).verify()
            finished += 1
        path = build(home)
        cache = TokenCache.open(path)
        cache.verify()
        assert cache.manifest.arrays == TokenCache.open(reference).manifest.arrays
        assert leftovers(home) == []
    assert 0 < finished < 5  # only the last steps come after the rename


def test_whoever_sees_a_cache_sees_all_of_it(fast: Path) -> None:
    many = table([[i % 900] * 50 for i in range(20_000)])
    for number in range(3):
        home = fast / str(number)
        child = os.fork()
        if child == 0:
            build(home, many)
            os._exit(0)
        found: list[Path] = []
        while not found:
            found = [path for path in home.glob("tokens/*") if len(path.name) == 32]
        TokenCache.open(found[0]).verify()
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_every_step_is_raised_and_leaves_nothing(fast: Path, code: int) -> None:
    total = steps_of_a_build(fast / "whole")
    raised = 0
    for step in range(1, total + 1, 2):
        home = fast / f"home-{step}"

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        with pytest.MonkeyPatch.context() as patch:
            at_step(step, fail, patch)
            try:
                path = build(home)
            except (OSError, CacheError):
                raised += 1
                path = None
        if (home / "tokens").exists():
            assert leftovers(home) == []
        if path is not None:
            TokenCache.open(path).verify()
        assert rows_of(TokenCache.open(build(home))) == ROWS
    assert raised > total / 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mounting a tmpfs is refused here: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_says_so_and_leaves_nothing(small_disk: Path) -> None:
    many = table([[i % 900] * 100 for i in range(3000)])
    with pytest.raises(CacheError, match=r"No space left on device while the token cache was written.*Free some space"):
        build(small_disk, many)
    assert leftovers(small_disk) == []
    assert rows_of(TokenCache.open(build(small_disk, table(ROWS[:10])))) == ROWS[:10]


def test_leftovers_of_killed_builds_are_swept_but_not_those_of_live_ones(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    dead, live = beside(tokens / ("0" * 32)), beside(tokens / ("1" * 32))
    for path in (dead, live):
        (path / "ids").mkdir(parents=True)
    (tokens / ".locks").mkdir()
    with (tokens / ".locks" / ("1" * 32)).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(tmp_path)
        assert not dead.exists()
        assert live.exists()
    build(tmp_path, table(ROWS[:5]))
    assert not live.exists()


def test_a_spoilt_cache_is_built_again_in_its_place(tmp_path: Path) -> None:
    path = build(tmp_path)
    opened = TokenCache.open(path)
    (path / "mask/c/0").unlink()
    assert build(tmp_path) == path
    TokenCache.open(path).verify()
    assert rows_of(opened) == ROWS  # who had it open keeps the old files
    assert leftovers(tmp_path) == []


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line for each build that really wrote something, also in other processes."""
    log = tmp_path / "builds"
    make = writer._make

    def counted(*args: Any) -> None:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.2)  # long enough for every other builder to wait
        make(*args)

    monkeypatch.setattr(writer, "_make", counted)
    return log


def test_many_threads_make_one_build_and_all_get_it(tmp_path: Path, builds: Path) -> None:
    barrier = threading.Barrier(6)
    found: list[Path] = []

    def run() -> None:
        barrier.wait()
        found.append(build(tmp_path / "home"))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert builds.read_text() == "built\n"


def test_many_processes_make_one_build_and_all_get_it(tmp_path: Path, builds: Path) -> None:
    home = tmp_path / "home"
    children = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            try:
                good = rows_of(TokenCache.open(build(home))) == ROWS
            except BaseException:
                good = False
            os._exit(0 if good else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    assert builds.read_text() == "built\n"


def test_a_waiting_builder_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            at_step(20, lambda: time.sleep(60), patch)
            build(home)
        os._exit(0)
    while not list(home.glob("tokens/*.tmp-*")):
        time.sleep(0.01)
    waiting = threading.Thread(target=build, args=(home,))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert rows_of(TokenCache.open(build(home))) == ROWS


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.arrow"

    def put(rows: list[list[int]]) -> None:
        data = table(rows)
        with pa.ipc.new_file(path, data.schema) as file:
            file.write_table(data)

    put(ROWS)
    write = writer.write_rows

    def changed(*args: Any) -> None:
        put(ROWS[:-1])
        write(*args)

    monkeypatch.setattr(writer, "write_rows", changed)
    with pytest.raises(BadSource, match="changed while it was read"):
        build(tmp_path, None, CONFIG.model_copy(update={"source": str(path)}))
    assert leftovers(tmp_path) == []


def test_a_later_build_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (TokenCache.open(build(tmp_path / name)) for name in "ab")
    assert first.manifest == second.manifest


@pytest.mark.parametrize("direct", [True, False])
def test_where_direct_writes_are_refused_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    reference = TokenCache.open(build(tmp_path / "reference")).manifest
    pwrite, refused = os.pwrite, [0]

    def refusing(fd: int, data: Any, position: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and not direct:
            refused[0] += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data[: max(4096, len(data) // 8192 * 4096)], position)  # and never all at once

    monkeypatch.setattr(os, "pwrite", refusing)
    cache = TokenCache.open(build(tmp_path / "home"))
    assert cache.manifest == reference
    cache.verify()
    assert direct or refused[0]
