"""Any accepted source → the data files it means, in order, each with its format.

For a `datasets` directory these are the files that its own metadata names, never a glob: a glob also catches the
cache files that map, filter and shuffle leave beside the data.
"""

import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.config import RowsConfig
from cache.errors import BadSource
from cache.source.formats import DataFile, UnknownFormat, data_file
from cache.source.walk import each_once, files_below, refuse_missing_shards, say_once, snapshot_of, told, why_no_data

# A split's name and what belongs to it: train, train_sft, test_gen. A number behind it is a part's.
_SPLIT = re.compile(r"(?:^|[-_.])((?:train|test|validation|valid|val|dev|eval)(?:_[A-Za-z]+)*)(?=[-_.\d]|$)")


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files that are one table, and the files of row numbers that select from it, where there are any."""

    files: tuple[DataFile, ...]
    indices: tuple[DataFile, ...] = ()
    left_out: int = 0  # files beside them that are no data


def find_files(rows: RowsConfig) -> list[SourceFiles]:
    """The data files of `rows.source`, in the order in which their rows count; each file once."""
    given = [rows.source] if isinstance(rows.source, str) else rows.source
    parts: list[SourceFiles] = []
    seen: dict[str, str] = {}  # real path → what named it
    for pattern in given:
        for path in _expand(pattern):
            part = _directory(path, rows.split) if path.is_dir() else SourceFiles((data_file(path),))
            for file in part.files:
                real = os.path.realpath(file.path)
                if seen.setdefault(real, pattern) != pattern:
                    raise BadSource(
                        f"rows.source: {file.path} is named twice, by {seen[real]!r} and by {pattern!r}: its rows "
                        "would count twice. Name it once."
                    )
            parts.append(part)
    if not parts:
        raise BadSource("rows.source: an empty list, expected at least one path.")
    return parts


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.exists():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True))
    if not found and "[" in pattern:  # a bracket of a name, as in "[v2] chat/*.jsonl"
        found = sorted(glob.glob(str(path).replace("[", "[[]"), recursive=True))
    if not found:
        raise BadSource(
            f"rows.source: nothing at {pattern!r} (working directory {Path.cwd()}), expected a datasets directory, "
            "Arrow, Parquet or JSONL files, or a glob of them. Correct rows.source."
        )
    paths = each_once(Path(name) for name in found)
    refuse_missing_shards([name for name in paths if not name.is_dir()], pattern)
    return paths


def _directory(path: Path, split: str | None) -> SourceFiles:
    if (path / "dataset_dict.json").is_file():  # save_to_disk of a DatasetDict
        names = _json(path / "dataset_dict.json")["splits"]
        return _directory(path / _choose(names, split, path), None)
    if (path / "state.json").is_file():  # save_to_disk of a Dataset
        return _saved(path, split)
    if any(path.glob("*.arrow")) and (path / "dataset_info.json").is_file():  # the cache of load_dataset
        return _loaded(path, split)
    return _plain(path, split)


def _saved(path: Path, split: str | None) -> SourceFiles:
    state = _json(path / "state.json")
    own = state.get("_split")
    if split is not None and own is not None and own != split:
        raise BadSource(
            f"rows.split: {split!r}, but {path} holds the split {own!r}. Correct rows.split or rows.source."
        )
    files = tuple(data_file(path / entry["filename"]) for entry in state["_data_files"])
    indices = tuple(data_file(path / entry["filename"]) for entry in state.get("_indices_data_files") or ())
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
    return SourceFiles(tuple(data_file(name) for name in found))


def _plain(path: Path, split: str | None) -> SourceFiles:
    """A directory of data files without metadata, as people download them, with all below it."""
    if (path / "snapshots").is_dir() and (path / "blobs").is_dir():  # of the hub's cache
        return _directory(snapshot_of(path), split)
    found: list[DataFile] = []
    left_out: dict[str, str] = {}
    for file in files_below(path):
        why_not = why_no_data(file)
        if why_not is None:
            try:
                found.append(data_file(file))
                continue
            except UnknownFormat:
                why_not = "of no known format"
        left_out[str(file.relative_to(path))] = why_not
    if not found:
        others = f"; left out: {told(left_out)}" if left_out else ""
        raise BadSource(f"{path}: no data files in it, expected Arrow, Parquet or JSON{others}. Correct rows.source.")
    names = {file: _split_of(file.path.relative_to(path)) for file in found}
    splits = sorted({name for name in names.values() if name is not None})
    if len(splits) > 1 or split is not None:
        chosen = _choose(splits, split, path)
        left_out |= {
            str(file.path.relative_to(path)): "no split in its name" for file, name in names.items() if name is None
        }
        found = [file for file in found if names[file] == chosen]
    refuse_missing_shards([file.path for file in found], str(path))
    if left_out:
        say_once(f"{path}: {len(found):,} files are read, {len(left_out):,} left out: {told(left_out)}")
    return SourceFiles(tuple(found), left_out=len(left_out))


def _split_of(file: Path) -> str | None:
    """By the name of a file, else of the nearest directory that has one."""
    stem = file.name.split(".")[0]
    for name in (stem, *reversed(file.parts[:-1])):
        if match := _SPLIT.search(name):
            return match[1]
    return None


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
