"""A server for flows, started once; a tiny target and rows; and a stand-in for `python -m dflash`."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prefect.testing.utilities import prefect_test_harness
from tiny_inputs import make_target, write_rows

from flows.stage import process as child

FAKE = Path(__file__).with_name("fake_dflash.py")


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """Prefect's own server with a database of its own; 10 to 20 s once."""
    with ExitStack() as stack:
        for last in (False, False, False, True):
            try:
                stack.enter_context(prefect_test_harness(server_startup_timeout=120))
                break
            except httpx.RemoteProtocolError:  # another program took the port that it chose
                if last:
                    raise
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and stages that run the stand-in."""
    monkeypatch.setattr(child, "PROGRAM", (sys.executable, str(FAKE)))
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of tokenised rows."""
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of a target as preparing needs."""
    return make_target(tmp_path / "target")
