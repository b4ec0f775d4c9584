"""Starts and watches `python -m dflash`, one process or several: signals in, progress and typed errors out.

The process has a session of its own, so that a signal to the flow's process group does not cut a step in two: the
first SIGINT or SIGTERM is handed on, and the process then has some seconds (`training.grace_s`) to finish its step and
write a checkpoint. If the flow's process dies hard, the kernel kills the child (PR_SET_PDEATHSIG).
"""

import contextlib
import importlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from cache.plain_errors import HOPELESS_ERRNOS
from dflash.config import GRACE_S
from dflash.run_directory import report_name
from flows.errors import StageError, StageKilled, StageRefused, StageStopped
from flows.runs.parameters import repository
from flows.show.progress import StageProgress

logger = logging.getLogger("flows.stage.process")

PROGRAM = (sys.executable, "-m", "dflash")
WATCH_EVERY_S = 0.5
STOPPED_CLEANLY = 75
REFUSED = 2
OUR_ERRORS = ("cache.errors", "dflash.errors", "flows.errors")

# Runs before the program: asks the kernel to end it with the flow's process, and checks that this is still there.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the flow's process is gone")
os.execv(sys.argv[3], sys.argv[3:])
"""


def run_stage(
    stage: str,
    arguments: Sequence[str],
    directory: Path,
    on_progress: Callable[[StageProgress], None],
    processes: int = 1,
    grace_s: float = GRACE_S,
) -> None:
    """Runs `python -m dflash ARGUMENTS` to its end; `directory` is where it writes progress-STAGE.json and
    error-STAGE.json.

    Several processes are torchrun's: it hands signals on to them, and they die with it (`dflash/__main__.py`).

    Returns when it succeeded. Raises the error it failed with, as the same type. When this process was told to stop,
    the child is told too, and the signal then takes its usual effect here.
    """
    program = PROGRAM if processes == 1 else torchrun(processes, grace_s)
    run_command(stage, [*program, *arguments], directory, on_progress, grace_s)


def torchrun(processes: int, grace_s: float) -> Sequence[str]:
    """`torchrun` on this machine only; it restarts nothing, because the task that called does.

    It would kill its processes by itself; with a longer patience than ours, ours decides.
    """
    python, *program = PROGRAM
    flags = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}", "--max-restarts=0"]
    flags.append(f"--shutdown-timeout={math.ceil(grace_s) + 5}")
    return (python, "-m", "torch.distributed.run", *flags, *program)


def run_command(
    stage: str,
    command: Sequence[str],
    directory: Path,
    on_progress: Callable[[StageProgress], None],
    grace_s: float = GRACE_S,
) -> None:
    # PR_SET_PDEATHSIG fires when the *thread* that started the child ends, and Python handles signals in this one only.
    assert threading.current_thread() is threading.main_thread(), "stages are started from the main thread"
    log = directory / "logs" / f"{stage}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("error", "progress"):
        (directory / report_name(kind, stage)).unlink(missing_ok=True)
    with log.open("ab") as output, _StopSignals() as stop:
        child = subprocess.Popen(
            dies_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=repository(),
        )
        try:
            code = _watch(stage, child, stop, directory, on_progress, grace_s)
        finally:
            _kill_group(child)
    if stop.received is not None:
        signal.raise_signal(stop.received)  # the handler before ours is back: KeyboardInterrupt, or Prefect's own
    if code != 0:
        raise _failure(stage, code, directory, log)


def dies_with_parent(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """The command, started so that the kernel sends it a signal when the thread that started it ends, however hard."""
    return [sys.executable, "-ISc", _DIE_WITH_PARENT, str(os.getpid()), str(int(number)), *command]


def _watch(
    stage: str,
    child: "subprocess.Popen[bytes]",
    stop: "_StopSignals",
    directory: Path,
    on_progress: Callable[[StageProgress], None],
    grace_s: float,
) -> int:
    deadline: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(WATCH_EVERY_S)
            _show(stage, directory, on_progress)
            return code
        _show(stage, directory, on_progress)
        if stop.received is not None and deadline is None:
            logger.warning("%s: stopping after this step, then a checkpoint; at most %.0f s.", stage, grace_s)
            deadline = time.monotonic() + grace_s
            child.send_signal(signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            logger.error("%s did not stop within %.0f s and is killed; the last checkpoint counts.", stage, grace_s)
            _kill_group(child)


def _show(stage: str, directory: Path, on_progress: Callable[[StageProgress], None]) -> None:
    progress = StageProgress.read(directory / report_name("progress", stage))
    if progress is not None:
        on_progress(progress)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    """End the stage's process and every helper that it left in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class _StopSignals:
    """Notes the first SIGINT or SIGTERM in place of the usual handlers, and puts these back at the end."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> "_StopSignals":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def _failure(stage: str, code: int, directory: Path, log: Path) -> Exception:
    try:
        report = json.loads((directory / report_name("error", stage)).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        if code == STOPPED_CLEANLY:
            return StageStopped(
                f"{stage} was asked to stop and wrote a checkpoint. Run the same again to go on from it."
            )
        return StageKilled(f"{stage} {_ending(code)} and left no error. The end of {log}:\n{_tail(log)}")
    kind, module, message = report["type"], report.get("module", ""), report["message"]
    error: Exception
    if module in OUR_ERRORS:
        error = getattr(importlib.import_module(module), kind)(message)
    elif code == REFUSED or report.get("errno") in HOPELESS_ERRNOS:
        error = StageRefused(f"{stage}: {kind}: {message}")
    else:
        error = StageError(
            f"{stage} failed with {kind}: {message}\n"
            f"The whole traceback is in {directory / report_name('error', stage)}."
        )
    error.add_note(f"{report.get('traceback', '')}\nAll that it printed is in {log}.")
    return error


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (often: out of memory)" if -code == signal.SIGKILL else "")


def _tail(log: Path, num_lines: int = 20) -> str:
    text = log.read_bytes()[-8192:].decode(errors="replace")
    return "\n".join(text.splitlines()[-num_lines:])
