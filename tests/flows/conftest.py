"""A server for flows, started once; a tiny target and rows; and a stand-in for `python -m dflash`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger
from prefect.testing.utilities import prefect_test_harness

from flows import child

FAKE = Path(__file__).with_name("fake_dflash.py")


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """Prefect's own server with a database of its own; 10 to 20 s once."""
    with prefect_test_harness(server_startup_timeout=120):
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
    path = tmp_path / "rows.jsonl"
    lines = [{"input_ids": [i % 250, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 1, 1]} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of a target as preparing needs: its sizes and a byte-level tokenizer."""
    return make_target(tmp_path / "target")


def make_target(directory: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(263)}, unk_token="w0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 263}))
    return directory


@pytest.fixture
def no_run() -> Iterator[None]:
    with disable_run_logger():
        yield
