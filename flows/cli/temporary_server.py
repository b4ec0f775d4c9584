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

from cache.locks import held
from flows.errors import FlowError
from flows.stage.process import dies_with_parent

START_TIMEOUT_S = 120.0
HERE = "127.0.0.1"

_OF_OTHER_SERVERS = ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")


def choose_server() -> str | None:
    """Points Prefect to a free port here, unless a server is set; None then. Comes before all other use of Prefect."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return None
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        url = f"http://{HERE}:{probe.getsockname()[1]}/api"
    os.environ["PREFECT_API_URL"] = url
    for name in ("no_proxy", "NO_PROXY"):  # a proxy of the cluster knows nothing of this machine's ports
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HERE]))
    refresh_global_settings_context()
    return url


def start_server(url: str, home: Path) -> None:
    """Starts the server at the url that `choose_server` chose, and returns when it answers.

    Its database lies under this home, beside what it is about: not in the user's own Prefect, which may be a newer one.

    Nothing here stops it: Prefect sends its last logs and events while this process exits, and only when it is gone
    does the kernel tell the server to stop.
    """
    port = url.removesuffix("/api").rpartition(":")[2]
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--no-ui", "--no-services"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_SERVERS}
    environment["PREFECT_HOME"] = str(home / "prefect")
    log = home / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # One after the other: two that make the tables of one new database at once fail.
    with held(home / "prefect" / "starting.lock"), log.open("ab") as output:
        server = subprocess.Popen(
            dies_with_parent([*command, "--host", HERE, "--port", port], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        _wait_until_healthy(server, url, log)


def _wait_until_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with direct.open(f"{url}/health", timeout=5) as answer:
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
