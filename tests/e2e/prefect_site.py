"""A Prefect site of its own: server on loopback, work pool, worker, and the deployments of a copy of this project."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 240.0) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)
    return value


class Site:
    """Everything below one directory; processes are started and ended by the tests."""

    def __init__(self, directory: Path, changes: Callable[[dict[str, Any]], None]) -> None:
        self.directory = directory
        self.project = directory / "project"
        self.home = directory / "home"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None
        for name in ("cache", "dflash", "flows"):
            shutil.copytree(ROOT / name, self.project / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("prefect.toml", "pyproject.toml"):
            shutil.copy(ROOT / name, self.project)
        deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())
        changes({entry["name"]: entry for entry in deployments["deployments"]})
        (self.project / "prefect.yaml").write_text(yaml.safe_dump(deployments))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.env = inherited | {
            "PREFECT_HOME": str(directory / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_UI_API_URL": self.url,
            "DFLASH_HOME": str(self.home),
            "PYTHONPATH": str(self.project),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start_server(self) -> None:
        self.server = self._start("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        wait_for("the server", self._is_healthy, timeout_s=180)

    def stop_server(self) -> None:
        assert self.server is not None
        kill_tree(self.server.pid, signal.SIGTERM)
        self.server.wait(60)

    def deploy(self) -> None:
        self.prefect("work-pool", "create", "gpu", "--type", "process")
        self.prefect("deploy", "--all")

    def start_worker(self) -> None:
        self.worker = self._start("worker", "worker", "start", "--pool", "gpu")

    def close(self) -> None:
        for process in (self.worker, self.server):
            if process is not None and process.poll() is None:
                kill_tree(process.pid, signal.SIGKILL)
                process.wait()

    def prefect(self, *arguments: str) -> str:
        return self.python("-m", "prefect", "--no-prompt", *arguments)

    def python(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.project, env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def run_deployment(self, name: str, parameters: dict[str, Any] | None = None) -> str:
        """Asks for a run, as `prefect deployment run` does; its id."""
        known = self.call("GET", f"/deployments/name/{name}")
        asked = {"parameters": parameters or {}, "state": {"type": "SCHEDULED"}}
        return str(self.call("POST", f"/deployments/{known['id']}/create_flow_run", asked)["id"])

    def state(self, flow_run_id: str) -> str:
        return str(self.call("GET", f"/flow_runs/{flow_run_id}")["state_name"])

    def states(self, flow_run_id: str) -> list[str]:
        """Names of all its states, in order."""
        found = self.call("GET", f"/flow_run_states/?flow_run_id={flow_run_id}")
        return [state["name"] for state in sorted(found, key=lambda state: state["timestamp"])]

    def wait_for_state(
        self, flow_run_id: str, *names: str, timeout_s: float = 240.0, started_again: bool = False
    ) -> str:
        """Fails at once when the run ends otherwise; `started_again`: when it crashes, an automation goes on.

        A cancelled run is Crashed, for its own process has ended by a signal, until its worker says why.
        """
        other_ends = {"Completed", "Failed", "Crashed", "Cancelled"} - (
            {"Crashed"} if "Cancelled" in names or started_again else set()
        )

        def reached() -> str | None:
            state = self.state(flow_run_id)
            if state in names:
                return state
            assert state not in other_ends, f"flow run {flow_run_id} is {state}"
            return None

        return str(wait_for(f"flow run {flow_run_id} to be {' or '.join(names)}", reached, timeout_s))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The API's answer; one whose SQLite is busy is asked again, as Prefect's own client does."""
        for _ in range(10):
            try:
                return self._call(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(1)
        return self._call(method, path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _start(self, log: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.directory / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
                cwd=self.project,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _is_healthy(self) -> bool:
        try:
            return bool(self.call("GET", "/health"))
        except OSError:
            return False

    def flow_processes(self) -> list[psutil.Process]:
        """The processes of flows, which the worker starts."""
        return [process for process in psutil.process_iter() if _is_flow(process, self.directory)]

    def training_processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _is_training(process, self.directory)]


def _is_flow(process: psutil.Process, directory: Path) -> bool:
    try:
        command = " ".join(process.cmdline())
        environ = process.environ()
        is_here = environ.get("DFLASH_HOME", "").startswith(str(directory))
        return is_here and "PREFECT__FLOW_RUN_ID" in environ and "-m dflash" not in command
    except psutil.Error:
        return False


def _is_training(process: psutil.Process, directory: Path) -> bool:
    try:
        command = process.cmdline()
        return "dflash" in command and any(part.startswith(str(directory)) for part in command)
    except psutil.Error:
        return False


def kill_tree(pid: int, number: signal.Signals) -> None:
    """The process and those it started, in its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
