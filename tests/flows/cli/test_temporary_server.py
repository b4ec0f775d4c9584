"""The server of a run without one: its database under the home, one start at a time, reached past any proxy."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import temporary_server
from flows.errors import FlowError

# Stands in for Prefect's server: ends with 3 where another one is making the same database.
SERVER = """
import http.server, os, sys, time
from pathlib import Path
home = Path(os.environ["PREFECT_HOME"])
home.mkdir(parents=True, exist_ok=True)
making = home / "making"
if making.exists():
    sys.exit(3)
making.write_text("")
time.sleep(0.3)
making.unlink()
(home / "database-of").open("a").write(os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL", "this home") + "\\n")

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Those that a test starts, of the stand-in; ended with it."""
    started: list[Any] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(popen([sys.executable, "-c", SERVER, command[-1]], **options))
        return started[-1]

    monkeypatch.setattr(temporary_server, "dies_with_parent", lambda command, number: command)
    monkeypatch.setattr(temporary_server.subprocess, "Popen", start)
    yield started
    for server in started:
        server.kill()
        server.wait()


@pytest.fixture
def unset() -> Iterator[None]:
    """No server is set, and a proxy that leads nowhere is."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # A test harness of the same process may have set one.
    with pytest.MonkeyPatch.context() as patch, temporary_settings(restore_defaults={PREFECT_API_URL}):
        for name in ("PREFECT_API_URL", "no_proxy", "NO_PROXY"):
            patch.setenv(name, "")  # so that it is put back
            patch.delenv(name)
        for name in ("http_proxy", "HTTP_PROXY"):
            patch.setenv(name, "http://127.0.0.1:1")
        patch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "the user's own")
        yield
    refresh_global_settings_context()


@pytest.mark.usefixtures("unset")
def test_two_at_once_start_one_after_the_other_past_a_proxy_on_the_homes_own_database(
    tmp_path: Path, servers: list[Any]
) -> None:
    url = temporary_server.choose_server()
    assert url is not None
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        urls = [url, f"http://127.0.0.1:{probe.getsockname()[1]}/api"]
    failures: list[BaseException] = []

    def start(url: str) -> None:
        try:
            temporary_server.start_server(url, tmp_path)
        except FlowError as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(servers) == 2
    assert (tmp_path / "prefect" / "database-of").read_text() == "this home\n" * 2


def test_a_server_that_is_set_is_used() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://elsewhere/api"}):
        assert temporary_server.choose_server() is None


def test_a_server_that_ends_is_an_error_that_names_its_log(tmp_path: Path, servers: list[Any]) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "making").write_text("")
    with pytest.raises(FlowError, match=r"did not start .*server\.log says why"):
        temporary_server.start_server("http://127.0.0.1:9/api", tmp_path)
