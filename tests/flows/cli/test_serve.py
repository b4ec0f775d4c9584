"""`dflash-train serve NAME`: which files are served, and what is said."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.json_file import write_json
from dflash.errors import ConfigMismatch
from dflash.serving.server import RunningServer, ServerSettings
from flows.cli import serve
from flows.errors import BadParameter
from flows.show.progress import console


def test_the_exported_files_are_served_until_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ServerSettings] = []

    @contextlib.contextmanager
    def served(settings: ServerSettings, log: Path) -> Iterator[RunningServer]:
        def wait() -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it was told to stop")

        asked.append(settings)
        yield RunningServer("http://127.0.0.1:9", wait)

    monkeypatch.setattr(serve, "running", served)
    gguf = {"target": "/t.gguf", "drafter": "/d.gguf", "drafts": 7, "positions": 2048}
    write_json(tmp_path / "runs/tiny/export.json", {"layouts": {"gguf": gguf}})
    with console.capture() as said:
        assert serve.main(["tiny", "--home", str(tmp_path), "--port", "9", "--threads", "3"]) == 0
    assert asked == [ServerSettings(Path("/t.gguf"), Path("/d.gguf"), 7, context=2048, threads=3, port=9)]
    assert "A page to type in: http://127.0.0.1:9\n" in said.get()
    assert "curl http://127.0.0.1:9/v1/chat/completions -H 'Content-Type: application/json' -d '{" in said.get()


def test_a_run_without_an_export_for_the_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match=r"serve tiny: .*/runs/tiny holds no export"):
        serve.main(["tiny", "--home", str(tmp_path)])
    write_json(tmp_path / "runs/tiny/export.json", {"layouts": {"dflash": {}}})
    with pytest.raises(ConfigMismatch, match=r"export\.layouts has no gguf"):
        serve.main(["tiny", "--home", str(tmp_path)])
    monkeypatch.setattr(serve, "is_installed", lambda: False)
    with pytest.raises(BadParameter, match=r"dflash-train\[serve\]"):
        serve.main(["tiny", "--home", str(tmp_path)])
