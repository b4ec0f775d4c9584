"""Any accepted source → the data files it means, in order, each with its format.

For a `datasets` directory these are the files that its own metadata names, never a glob: a glob also catches the
cache files that map, filter and shuffle leave beside the data.
"""

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cache.config import RowsConfig
from cache.errors import BadSource

Format = Literal["arrow file", "arrow stream", "parquet", "jsonl"]

COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}  # only lines of JSON come so
SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet", ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".jsonl.zst")
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?:[-_.]|$)")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of the source; `indices` are files of an `_indices` mapping over all files of its part."""

    path: Path
    format: Format


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files that are one table, and the files of row numbers that select from it, where there are any."""

    files: tuple[DataFile, ...]
    indices: tuple[DataFile, ...] = ()


def find_files(rows: RowsConfig) -> list[SourceFiles]:
    """The data files of `rows.source`, in the order in which their rows count."""
    given = [rows.source] if isinstance(rows.source, str) else rows.source
    parts: list[SourceFiles] = []
    for pattern in given:
        for path in _expand(pattern):
            parts += [_directory(path, rows.split)] if path.is_dir() else [SourceFiles((_data_file(path),))]
    if not parts:
        raise BadSource("rows.source: an empty list, expected at least one path.")
    return parts


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.exists():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise BadSource(
            f"rows.source: nothing at {pattern!r} (working directory {Path.cwd()}), expected a datasets directory, "
            "Arrow, Parquet or JSONL files, or a glob of them. Correct rows.source."
        )
    return [Path(name) for name in found]


def _directory(path: Path, split: str | None) -> SourceFiles:
    if (path / "dataset_dict.json").is_file():  # save_to_disk of a DatasetDict
        names = _json(path / "dataset_dict.json")["splits"]
        return _directory(path / _choose(names, split, path), None)
    if (path / "state.json").is_file():  # save_to_disk of a Dataset
        return _saved(path, split)
    if (path / "dataset_info.json").is_file():  # the cache of load_dataset
        return _loaded(path, split)
    return _plain(path, split)


def _saved(path: Path, split: str | None) -> SourceFiles:
    state = _json(path / "state.json")
    own = state.get("_split")
    if split is not None and own is not None and own != split:
        raise BadSource(
            f"rows.split: {split!r}, but {path} holds the split {own!r}. Correct rows.split or rows.source."
        )
    files = tuple(_data_file(path / entry["filename"]) for entry in state["_data_files"])
    indices = tuple(_data_file(path / entry["filename"]) for entry in state.get("_indices_data_files") or ())
    if not files:
        raise BadSource(f"{path}: its state.json names no data files: the data set is empty.")
    return SourceFiles(files, indices)


def _loaded(path: Path, split: str | None) -> SourceFiles:
    info = _json(path / "dataset_info.json")
    splits = info.get("splits") or {}
    chosen = _choose(list(splits), split, path)
    prefix = f"{splits[chosen].get('dataset_name') or info.get('dataset_name') or info.get('builder_name')}-{chosen}"
    counted = re.compile(re.escape(prefix) + r"(-\d{5}-of-(?P<count>\d{5}))?\.arrow")
    found = sorted(name for name in path.iterdir() if counted.fullmatch(name.name))
    shards = len(splits[chosen].get("shard_lengths") or [0])
    if len(found) != shards:
        raise BadSource(f"{path}: {len(found)} files {prefix}*.arrow, expected {shards}. Load the data set again.")
    return SourceFiles(tuple(_data_file(name) for name in found))


def _plain(path: Path, split: str | None) -> SourceFiles:
    """A directory of data files without metadata, as people download them; `data/` in it is looked into, too."""
    found: list[Path] = []
    for directory in (path, path / "data"):
        if not found and directory.is_dir():
            found = sorted(name for name in directory.iterdir() if _is_data(name))
    if not found:
        raise BadSource(f"{path}: no data files in it, expected some of {', '.join(SUFFIXES)}. Correct rows.source.")
    names = {name: (_SPLIT.search(name.name.split(".")[0]) or [None, None])[1] for name in found}
    splits = sorted({name for name in names.values() if name is not None})
    if len(splits) > 1 or split is not None:
        chosen = _choose(splits, split, path)
        found = [name for name in found if names[name] == chosen]
    return SourceFiles(tuple(_data_file(name) for name in found))


def _is_data(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES) and not path.name.startswith((".", "cache-"))


def _choose(names: list[str], split: str | None, path: Path) -> str:
    if split is None and len(names) == 1:
        return names[0]
    if split not in names:
        got = "not set" if split is None else repr(split)
        raise BadSource(
            f"rows.split: {got}, but {path} has the splits {', '.join(names)}. Set rows.split to one of them."
        )
    return split


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise BadSource(f"{path}: not JSON ({error}). Save the data set again.") from None
    if not isinstance(content, dict):
        raise BadSource(f"{path}: a JSON {type(content).__name__}, expected an object. Save the data set again.")
    return content


def _data_file(path: Path) -> DataFile:
    """Tell the format by the first bytes; names lie."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except FileNotFoundError:
        raise BadSource(
            f"{path}: missing, though the data set names it. Save or download the data set again."
        ) from None
    if head.startswith(b"ARROW1"):
        return DataFile(path, "arrow file")
    if head.startswith(b"\xff\xff\xff\xff"):
        return DataFile(path, "arrow stream")
    if head.startswith(b"PAR1"):
        return DataFile(path, "parquet")
    if head.startswith(tuple(COMPRESSED)) or not head.strip() or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        return DataFile(path, "jsonl")
    raise BadSource(
        f"{path}: starts with {head!r}, expected an Arrow file or stream, Parquet, or one JSON object a line. "
        "Write the rows in one of these formats."
    )
