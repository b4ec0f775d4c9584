"""Array annotations of `cache` are checked while its tests run: dtype and dimensions, on every call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

install_import_hook("cache", "beartype.beartype")

Build = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Build:
    """Build the cache of some rows and open it: `make(source="…", max_tokens=8)`, or `make(data=table)`."""
    from cache.build import build
    from cache.config import RowsConfig
    from cache.disk.store import TokenCache

    def run(source: Any = "in memory", *, data: Any = None, home: Path | None = None, **rows: Any) -> Any:
        rows = {"vocabulary": 1000, "held_out": 0.0, "max_dropped": 1.0} | rows
        config = RowsConfig(source=source if isinstance(source, list) else str(source), **rows)
        path = build(config, home=home or tmp_path / "home", tokenizer=None, vocabulary=None, data=data)
        cache = TokenCache.open(path)
        cache.verify()
        return cache

    return run
