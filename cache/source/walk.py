"""A directory that people downloaded → its files: which are data, which are missing, and what was left out and why."""

import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cache.errors import BadSource

NOT_ROWS = {  # files beside the data, by name
    "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "metadata.json",
}  # fmt: skip
NOT_DATA = (".md", ".txt", ".py", ".sh", ".yaml", ".yml", ".toml", ".html", ".ipynb", ".lock", ".log", ".csv", ".tsv")
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".tmp")  # downloads
MOST_TOLD = 10  # names of files in one line of the log


_SHARD = re.compile(r"(?P<name>.*?)-?(?P<number>\d+)-of-(?P<count>\d+)")


logger = logging.getLogger(__name__)


def each_once(paths: Iterable[Path]) -> list[Path]:
    """Without those that are another's file or directory by way of a link."""
    return list({os.path.realpath(path): path for path in reversed(list(paths))}.values())[::-1]


def refuse_missing_shards(paths: list[Path], where: str) -> None:
    """Of files numbered 00000-of-00003 all must be there, else a download was not whole."""
    shards: dict[tuple[Path, str, str, str], set[int]] = {}
    for path in paths:
        stem, _, suffix = path.name.partition(".")
        if match := _SHARD.match(stem):
            place = (path.parent, match["name"], match["count"], suffix)
            shards.setdefault(place, set()).add(int(match["number"]))
    for (directory, name, count, suffix), numbers in shards.items():
        first = 0 if 0 in numbers or int(count) not in numbers else 1
        missing = [number for number in range(first, int(count) + first) if number not in numbers]
        if missing:
            told = ", ".join(f"{name}-{number:0{len(count)}d}-of-{count}.{suffix}" for number in missing[:MOST_TOLD])
            raise BadSource(
                f"{directory}: {len(missing)} of {int(count)} numbered files are missing in {where}: {told}. Download "
                "them, or list the files that are meant in rows.source one by one."
            )


def files_below(path: Path) -> Iterator[Path]:
    """All files below a directory in the order of their names, without hidden ones, each file and directory once."""
    seen: set[str] = set()
    for name, directories, files in os.walk(path, followlinks=True):
        real = os.path.realpath(name)
        if real in seen:  # a link that points back
            directories[:] = []
            continue
        seen.add(real)
        if "zarr.json" in files:  # a token cache, such as of a home that lies below
            directories[:] = []
            continue
        directories[:] = sorted(one for one in directories if not one.startswith("."))
        for one in sorted(files):
            file = Path(name, one)
            if one.startswith("."):
                continue
            if file.is_symlink() and not file.exists():
                raise BadSource(
                    f"{file}: a link to {file.readlink()}, which is not there: the download is not whole. Download it "
                    "again."
                )
            if os.path.realpath(file) not in seen:
                seen.add(os.path.realpath(file))
                yield file


def why_no_data(file: Path) -> str | None:
    """Why a file in a directory is not data, told without reading it."""
    if file.name.endswith(UNFINISHED):
        raise BadSource(f"{file}: an unfinished download. Finish it, or remove the file.")
    if file.name in NOT_ROWS:
        return "describes the data"
    if file.name.startswith("cache-"):
        return "left behind by map or filter"
    if file.name.endswith(NOT_DATA) or file.stem in ("README", "LICENSE"):
        return "no data by its name"
    return "empty" if not file.stat().st_size else None


def snapshot_of(path: Path) -> Path:
    """The one snapshot of a repository in the hub's cache, or the one that `main` is."""
    found = sorted(one for one in (path / "snapshots").iterdir() if one.is_dir())
    main = path / "refs" / "main"
    named = [one for one in found if main.is_file() and one.name == main.read_text().strip()]
    if len(named or found) != 1:
        raise BadSource(f"{path}: {len(found)} snapshots, expected one. Name one of them in rows.source.")
    return (named or found)[0]


def told(left_out: dict[str, str]) -> str:
    told = ", ".join(f"{name} ({why})" for name, why in list(left_out.items())[:MOST_TOLD])
    return told + (f" and {len(left_out) - MOST_TOLD:,} others" if len(left_out) > MOST_TOLD else "")


@functools.cache
def say_once(text: str) -> None:
    """Once a process: files are looked for several times a build."""
    logger.warning("%s", text)
