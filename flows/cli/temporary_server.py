"""A Prefect server of this process's own, for runs without one.

Prefect would start one itself, but in this process's group: Ctrl-C, or a SIGTERM to the group, ends it together with
the stage, and the flow then waits minutes to tell it so. This one has a session of its own and dies with this process.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from flows.errors import FlowError
from flows.stage.process import dies_with_parent

START_TIMEOUT_S = 120.0


def choose_server() -> str | None:
    """Points Prefect to a free port here, unless a server is set; None then. Comes before all other use of Prefect."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
    os.environ["PREFECT_API_URL"] = url
    refresh_global_settings_context()
    return url


def start_server(url: str, log: Path) -> None:
    """Starts the server at the url that `choose_server` chose, and returns when it answers.

    Nothing here stops it: Prefect sends its last logs and events while this process exits, and only when it is gone
    does the kernel tell the server to stop.
    """
    port = url.removesuffix("/api").rpartition(":")[2]
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--no-ui", "--no-services"]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        server = subprocess.Popen(
            dies_with_parent([*command, "--host", "127.0.0.1", "--port", port], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    _wait_until_healthy(server, url, log)


def _wait_until_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            raise FlowError(
                f"Prefect's temporary server did not start within {START_TIMEOUT_S:.0f} s. {log} says why. "
                "Or start one with `prefect server start` and set PREFECT_API_URL."
            )
        time.sleep(0.1)
