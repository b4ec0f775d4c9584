"""What metrics.jsonl gets, sent to Weights & Biases, MLflow or trackio by a process of its own.

A tracker reads the run's files; nothing waits for it. One that hangs, fails or is killed harms no run, and the next
start of the run, or `dflash-train track NAME --to …`, sends what it has not sent. Standard input is its sign of life:
it ends with the training's process, however that ends.
"""

import contextlib
import importlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cache.json_file import read_json, write_json
from dflash.training.curves import of_line

log = logging.getLogger(__name__)

EVERY_S = 10.0
AFTER_FAILURE_S = 60.0
LAST_WORDS_S = 300  # after the training's end; then the kernel ends the tracker
PROJECT = "dflash-train"


class Tracker(Protocol):
    """One run of a tracking service."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def start_trackers(run: Path, names: list[str]) -> "list[subprocess.Popen[bytes]]":
    """A process for each; they end when the last reference to their pipes does. Never raises what one of them lacks."""
    started = []
    for name in names:
        output = run / "logs" / f"tracker-{name}.log"
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("ab") as stream:
                command = [sys.executable, "-m", "dflash", "track", str(run), "--to", name, "--follow"]
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    start_new_session=True,
                )
            started.append(process)
        except OSError as error:
            log.warning("%s is not told of this run: %s", name, error)
    return started


def until_stdin_ends() -> Callable[[float], bool]:
    """Waits so long at most, and says whether the training's process has ended; some minutes after that, so does this.

    A thread looks for it: a service may hang at any place.
    """
    ended = threading.Event()

    def look() -> None:
        sys.stdin.buffer.read()
        ended.set()
        signal.alarm(LAST_WORDS_S)

    threading.Thread(target=look, name="life sign", daemon=True).start()
    return ended.wait


def track(run: Path, to: str, over: Callable[[float], bool]) -> None:
    """Send all that has not been sent, then what comes, until it is over. Raises what the last try failed with."""
    state = read_json(run / f"tracker-{to}.json") or {"id": secrets.token_hex(8), "step": 0}
    points, tracker, waiting = Points(run), None, 0.0
    left: list[tuple[int, dict[str, float]]] = []
    while True:
        ended = over(waiting)  # before reading: what was written last is read, too
        left += [(step, values) for step, values in points.new() if step > state["step"]]
        try:
            if tracker is None:
                tracker = _open(run, to, state)
                write_json(run / f"tracker-{to}.json", state)
            while left:
                tracker.log(*left[0])
                state["step"] = left.pop(0)[0]
            write_json(run / f"tracker-{to}.json", state, durable=False)
            if ended:
                tracker.close()
                break
            waiting = EVERY_S
        except Exception as error:
            if ended:
                raise
            log.warning("%s failed (%s: %s); tried again in %.0f s", to, type(error).__name__, error, AFTER_FAILURE_S)
            waiting = AFTER_FAILURE_S


@dataclass
class Points:
    """Values by step, as far as they have been written; each is given once."""

    run: Path
    steps: int = 0
    read: dict[str, int] = field(default_factory=dict)

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """In the order of their steps."""
        found: dict[int, dict[str, float]] = {}
        for line in self._lines("metrics.jsonl"):
            self.steps += line["steps"]
            found[self.steps] = {name: value for name, value in of_line(line).items() if value is not None}
        for event in self._lines("history.jsonl"):
            if event["event"] == "tau":
                found.setdefault(event["steps"], {})["tau"] = event["value"]
        yield from sorted(found.items())

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), (self.run / name).open("rb") as stream:
            stream.seek(self.read.get(name, 0))
            whole = stream.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self.read[name] = self.read.get(name, 0) + len(whole)
            yield from map(json.loads, whole.splitlines())


def _open(run: Path, to: str, state: dict[str, Any]) -> Tracker:
    try:
        package = importlib.import_module(to)
    except ImportError as error:
        raise ModuleNotFoundError(f"{error}; pip install 'dflash-train[{to}]'") from None
    settings = _flat(read_json(run / "config.json") or {})
    return _KINDS[to](package, run, settings, state)


class _WandbLike:
    """Weights & Biases, and trackio, which speaks as it does. Their environment variables say where to."""

    def __init__(self, package: Any, run: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
        project = os.environ.get(f"{package.__name__.upper()}_PROJECT", PROJECT)
        own: dict[str, Any] = {}
        if package.__name__ == "wandb":
            own = {"id": state["id"], "dir": str(run.parent.parent)}
        package.init(project=project, name=run.name, config=settings, resume="allow", **own)
        self._package = package

    def log(self, step: int, values: dict[str, float]) -> None:
        self._package.log(values, step=step)

    def close(self) -> None:
        self._package.finish()


class _Mlflow:
    """MLflow, at MLFLOW_TRACKING_URI or in a file below the home."""

    def __init__(self, package: Any, run: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # no longer its first choice, and it needs no SQL
            package.set_tracking_uri((run.parent.parent / "mlruns").absolute().as_uri())
        package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        opened = package.start_run(run_id=state.get("mlflow_id"), run_name=run.name)
        if "mlflow_id" not in state:
            package.log_params({name: str(value)[:500] for name, value in settings.items()})
        state["mlflow_id"] = opened.info.run_id
        self._package = package

    def log(self, step: int, values: dict[str, float]) -> None:
        self._package.log_metrics(values, step=step)

    def close(self) -> None:
        self._package.end_run()


_KINDS: dict[str, Callable[[Any, Path, dict[str, Any], dict[str, Any]], Tracker]] = {
    "wandb": _WandbLike,
    "trackio": _WandbLike,
    "mlflow": _Mlflow,
}
TRACKERS = tuple(_KINDS)


def _flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat
