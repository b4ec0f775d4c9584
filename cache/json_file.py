"""Small files that are whole or absent: written beside their place, flushed to disk, then renamed over it."""

import json
import os
from pathlib import Path
from typing import Any

from cache.locks import beside


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Replace `path` by indented JSON: a reader, or a crash, sees the old content or the new.

    `durable=False` leaves out the flush, for what is only remembered or shown: after a power cut it may be gone.
    """
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by text, as `write_json` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(path)
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None where there is no such file. Raises ValueError where it is not JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content
