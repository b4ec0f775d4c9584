"""The process of a stage: its errors, its progress, its end, and that nothing of it survives."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.errors import BadRow
from flows.errors import StageError, StageKilled, StageRefused, StageStopped
from flows.show.progress import StageProgress
from flows.stage import process as child
from flows.stage.process import run_command

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
run = pathlib.Path(sys.argv[1])
def fail(kind, module, message, code):
    (run / "error-train.json").write_text(json.dumps(
        {"type": kind, "module": module, "message": message, "traceback": "Traceback of the child"}))
    sys.exit(code)
"""


@pytest.fixture(autouse=True)
def usual_sigint() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(code: str, directory: Path, seen: list[StageProgress] | None = None, grace_s: float = 25.0) -> None:
    show = seen.append if seen is not None else lambda progress: None
    run_command("train", [sys.executable, "-c", PRELUDE + code, str(directory)], directory, show, grace_s)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_success_returns_and_progress_is_seen(tmp_path: Path) -> None:
    seen: list[StageProgress] = []
    run(
        '(run / "progress-train.json").write_text(json.dumps({"stage": "train", "done": 3, "total": 8}))',
        tmp_path,
        seen,
    )
    assert [(progress.done, progress.total) for progress in seen] == [(3.0, 8.0)]


def test_progress_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "progress-train.json").write_text('{"stage": "train", "done": 7, "total": 8}')
    seen: list[StageProgress] = []
    run("", tmp_path, seen)
    assert seen == []


def test_our_error_comes_back_as_its_own_type_with_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="row 17 of x") as caught:
        run('fail("BadRow", "cache.errors", "row 17 of x", 2)', tmp_path)
    assert str(caught.value) == "row 17 of x"
    assert caught.value.__notes__ == [
        f"Traceback of the child\nAll that it printed is in {tmp_path / 'logs/train.log'}."
    ]


def test_refusal_of_another_type_is_told_from_a_failure(tmp_path: Path) -> None:
    with pytest.raises(StageRefused, match="no such option"):
        run('fail("ValueError", "builtins", "no such option", 2)', tmp_path)
    with pytest.raises(StageError, match="OutOfMemoryError: 3 GB"):
        run('fail("OutOfMemoryError", "torch", "3 GB", 1)', tmp_path)


def test_error_of_an_earlier_run_is_not_raised_again(tmp_path: Path) -> None:
    (tmp_path / "error-train.json").write_text('{"type": "BadRow", "module": "cache.errors", "message": "old"}')
    with pytest.raises(StageKilled, match="exit code 1"):
        run("sys.exit(1)", tmp_path)


def test_killed_process_shows_signal_and_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(StageKilled, match=r"SIGKILL.*out of memory(.|\n)*last words"):
        run('print("last words", flush=True); os.kill(os.getpid(), signal.SIGKILL)', tmp_path)


def test_stop_that_was_not_ours_is_told(tmp_path: Path) -> None:
    with pytest.raises(StageStopped):
        run("sys.exit(75)", tmp_path)


def test_stages_run_in_the_main_thread_only(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            run("", tmp_path)
        except AssertionError as error:
            raised.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(raised) == 1


WAIT_FOR_STOP = """
(run / "pid").write_text(str(os.getpid()))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(run / "helper").write_text(str(helper.pid))
count = []
signal.signal(signal.SIGTERM, lambda *a: count.append(1))
(run / "progress-train.json").write_text(json.dumps({"stage": "train", "done": 1, "total": 2}))
while not count: time.sleep(0.01)
time.sleep(1.5)
(run / "signals").write_text(str(len(count)))
sys.exit(75)
"""


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_is_handed_on_once_and_then_takes_effect_here(
    number: signal.Signals, expected: type[BaseException], tmp_path: Path
) -> None:
    def stop() -> None:
        wait_for((tmp_path / "progress-train.json").exists)
        for _ in range(2):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(expected):
            run(WAIT_FOR_STOP, tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "signals").read_text() == "1"
    assert not is_alive(int((tmp_path / "pid").read_text()))
    wait_for(lambda: not is_alive(int((tmp_path / "helper").read_text())), timeout_s=2)


def test_torchrun_is_more_patient_than_what_it_is_told_by() -> None:
    command = child.torchrun(2, 600.5)
    assert "--shutdown-timeout=606" in command


def test_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    threading.Thread(
        target=lambda: (wait_for((tmp_path / "pid").exists), os.kill(os.getpid(), signal.SIGINT)), daemon=True
    ).start()
    with pytest.raises(KeyboardInterrupt):
        run(
            'signal.signal(signal.SIGTERM, signal.SIG_IGN); (run / "pid").write_text(str(os.getpid())); time.sleep(60)',
            tmp_path,
            grace_s=0.5,
        )
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_no_child_survives_the_hard_death_of_the_flow(tmp_path: Path) -> None:
    flow = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "from flows.stage.process import run_command\n"
            "run = pathlib.Path(sys.argv[1])\n"
            "code = 'import os, pathlib, sys, time; "
            'pathlib.Path(sys.argv[1], "pid").write_text(str(os.getpid())); time.sleep(60)\'\n'
            "run_command('train', [sys.executable, '-c', code, str(run)], run, lambda progress: None)",
            str(tmp_path),
        ]
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    flow.kill()
    flow.wait()
    wait_for(lambda: not is_alive(pid), timeout_s=5)
