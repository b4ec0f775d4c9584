"""Built once for all tests of training: a tiny target and its rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_rows(tmp_path_factory.mktemp("home"))


@pytest.fixture
def make_run(tmp_path: Path, target: Path) -> Callable[..., Path]:
    """`make_run("name", epochs=3, …)`: a run directory with its config.json."""

    def make(name: str, **training: Any) -> Path:
        return tiny.make_run(tmp_path / name, target, **training)

    return make
