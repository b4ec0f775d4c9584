"""Data sets of the hub, by huggingface_hub: kept by commit, whole or absent, resumed, below `home/sources/hub/`."""

import time
from pathlib import Path
from typing import Any

from cache.elsewhere.download import FetchProgress, Report, refuse_without_room
from cache.errors import BadSource
from cache.source.walk import NOT_DATA

_LEFT = [f"*{suffix}" for suffix in NOT_DATA] + [".gitattributes", "*.png", "*.jpg", "*.gif", "*.pdf"]


def fetch_data_set(path: str, revision: str | None, sources: Path, report: Report | None) -> Path:
    """`path` is `owner/name`, `owner/name@revision`, or either with files or a directory of it behind."""
    name, at, inside, wanted = _parsed(path, revision)
    if None not in (at, revision) and at != revision:
        raise BadSource(f"rows.revision: {revision!r}, but the source names the revision {at!r}. Name one of them.")
    import huggingface_hub
    from tqdm.auto import tqdm

    options: dict[str, Any] = {
        "repo_type": "dataset",
        "revision": at or revision,
        "cache_dir": str(sources / "hub"),
        "allow_patterns": wanted,
        "ignore_patterns": _LEFT,
    }
    started = time.monotonic()
    state = {"done": 0, "total": 0}

    class Told(tqdm):  # type: ignore[misc]
        """Says how many bytes there are, instead of drawing a bar."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._is_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: Any = 1) -> bool | None:
            if self._is_bytes and report is not None:
                state["done"] += int(n or 0)
                report(FetchProgress(path, state["done"], state["total"], time.monotonic() - started))
            return None

    try:
        planned = huggingface_hub.snapshot_download(name, dry_run=True, **options)
        state["total"] = sum(one.file_size for one in planned if one.will_download)
        refuse_without_room(sources, state["total"], f"hf://datasets/{path}")
    except BadSource:
        raise
    except Exception as error:
        if "dry run" not in str(error).lower() and "offline" not in str(error).lower():
            raise _named(path, error) from error
    try:
        found = Path(huggingface_hub.snapshot_download(name, tqdm_class=Told, **options))
    except Exception as error:
        raise _named(path, error) from error
    return found / inside if inside else found


def _parsed(path: str, revision: str | None) -> tuple[str, str | None, str, list[str] | None]:
    """Repository, revision, what of it is the source, and patterns of the files to fetch."""
    owner, _, rest = path.strip("/").partition("/")
    name, _, inside = rest.partition("/")
    name, _, at = name.partition("@")
    if not owner or not name:
        raise BadSource(f"rows.source: hf://datasets/{path}, expected hf://datasets/OWNER/NAME. Correct rows.source.")
    return f"{owner}/{name}", at or None, inside, [inside, f"{inside}/*"] if inside else None


def _named(path: str, error: Exception) -> BadSource:
    what = " ".join(str(error).split())[:300]
    return BadSource(
        f"rows.source: hf://datasets/{path}: no path here, and no data set of the hub that can be fetched "
        f"({type(error).__name__}: {what}). Correct rows.source or rows.revision, run `hf auth login` where it is "
        "private, or download it and name its directory."
    )
