"""Files of S3, Google Storage and the web, by fsspec: a directory for each state of a source, whole or absent.

`sources/<address>/<state>/` holds the files under their names, and `source.json` beside them says what they are. The
state is the hash of all names, sizes and etags, so a file that changes elsewhere makes a new directory; what has not
changed is linked from an earlier one. A download that was cut off goes on where it ended.
"""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.elsewhere.download import FetchProgress, Report, refuse_without_room
from cache.errors import BadSource
from cache.json_file import read_json, write_json
from cache.locks import held, lock_of

BLOCK_BYTES = 1 << 23
FACTS = "source.json"  # beside the directory of a state, as STATE.source.json
_ETAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "generation", "LastModified", "Last-Modified", "mtime", "updated")
_EXTRAS = {"s3": "s3", "gs": "gs"}


@dataclass(frozen=True, slots=True)
class _File:
    """One file elsewhere."""

    path: str  # as its file system calls it
    name: str  # below the source
    size: int | None
    etag: str


@dataclass(slots=True)
class _Watch:
    source: str
    total: int
    report: Report | None
    done: int = 0
    started: float = 0.0

    def add(self, size: int) -> None:
        self.done += size
        if self.report is not None:
            self.report(FetchProgress(self.source, self.done, self.total, time.monotonic() - self.started))


def fetch_files(address: str, sources: Path, report: Report | None) -> Path:
    """The local path of a file, a directory or a glob elsewhere."""
    home = sources / xxhash.xxh3_128_hexdigest(address.encode())
    try:
        system, files = _listed(address)
    except BadSource:
        raise
    except Exception as error:
        raise _named(address, error) from error
    state = xxhash.xxh3_128_hexdigest(canonical([[one.name, one.size, one.etag] for one in files]))
    final = home / state
    if not final.is_dir():
        with held(lock_of(final)):
            if not final.is_dir():
                _make(system, files, address, home, final, report)
    is_file = len(files) == 1 and address.endswith(files[0].name)
    return final / files[0].name if is_file else final


def _listed(address: str) -> tuple[Any, list[_File]]:
    import fsspec

    scheme = address.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        extra = f'pip install "dflash-train[{_EXTRAS[scheme]}]"' if scheme in _EXTRAS else "pip install aiohttp"
        raise BadSource(f"rows.source: {address}: needs another package ({error}). {extra}") from None
    if any(letter in path for letter in "*[") or (scheme.startswith("s3") and "?" in path):
        base = path[: min(path.index(letter) for letter in "*?[" if letter in path)].rpartition("/")[0]
        paths = [one for one in sorted(system.glob(path)) if not system.isdir(one)]
    elif scheme not in ("http", "https") and system.isdir(path):
        base, paths = path.rstrip("/"), sorted(system.find(path))
    else:
        base, paths = path.partition("?")[0].rpartition("/")[0], [path]
    if not paths:
        raise FileNotFoundError(path)
    return system, [_file(system, one, base) for one in paths]


def _file(system: Any, path: str, base: str) -> _File:
    info = system.info(path)
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    size = info.get("size")
    if etag is None:
        raise BadSource(
            f"rows.source: {path}: its server gives neither an etag nor a date, so a change could not be told. "
            "Download the file and name it."
        )
    name = path.partition("?")[0].removeprefix(base).lstrip("/")
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts:
        raise BadSource(f"rows.source: {path}: no name of a file. Name a file.")
    return _File(path, str(PurePosixPath(*parts)), None if size is None else int(size), etag)


def _make(system: Any, files: list[_File], address: str, home: Path, final: Path, report: Report | None) -> None:
    partial = final.with_name(f"{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    _link_known(files, home, partial)
    missing = [one for one in files if not (partial / one.name).exists()]
    have = {one: _part(partial, one).stat().st_size for one in missing if _part(partial, one).exists()}
    total = sum(one.size or 0 for one in missing)
    refuse_without_room(home, total - sum(have.values()), address)
    watch = _Watch(address, total, report, started=time.monotonic())
    try:
        for one in missing:
            _download(system, one, partial, watch)
        system.invalidate_cache()
        for one in files:
            if _file(system, one.path, _base(one)) != one:
                raise BadSource(f"rows.source: {one.path}: changed while it was fetched. Run again.")
    except BadSource:
        raise
    except Exception as error:
        raise _named(address, error) from error
    facts = {"source": address, "files": {one.name: [one.size, one.etag] for one in files}}
    write_json(final.with_name(f"{final.name}.{FACTS}"), facts)
    partial.rename(final)


def _base(one: _File) -> str:
    return one.path.partition("?")[0].removesuffix(one.name).rstrip("/")


def _part(partial: Path, one: _File) -> Path:
    file = partial / one.name
    return file.with_name(f".{file.name}.{xxhash.xxh3_64_hexdigest(one.etag.encode())}.part")


def _download(system: Any, one: _File, partial: Path, watch: _Watch) -> None:
    """One file, from where an earlier download ended."""
    part, file = _part(partial, one), partial / one.name
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as sink, system.open(one.path, "rb", cache_type="none", block_size=BLOCK_BYTES) as stream:
        if sink.tell():
            try:
                stream.seek(sink.tell())
            except (OSError, ValueError):  # a server without ranges
                sink.truncate(0)
            watch.add(sink.tell())
        while block := stream.read(BLOCK_BYTES if one.size is None else min(BLOCK_BYTES, one.size - sink.tell())):
            sink.write(block)
            watch.add(len(block))
        sink.flush()
        os.fsync(sink.fileno())
        if one.size is not None and sink.tell() != one.size:
            raise BadSource(f"rows.source: {one.path}: {sink.tell()} bytes came, expected {one.size}. Run again.")
    part.rename(file)


def _link_known(files: list[_File], home: Path, partial: Path) -> None:
    """Take what earlier states of this source have and has not changed."""
    for facts_file in home.glob(f"*.{FACTS}"):
        facts = read_json(facts_file) or {}
        directory = facts_file.with_name(facts_file.name.removesuffix(f".{FACTS}"))
        for one in files:
            known, file = directory / one.name, partial / one.name
            if facts.get("files", {}).get(one.name) == [one.size, one.etag] and known.is_file() and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(known, file)
                except OSError:  # a file system without links
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(known, _part(partial, one))


def _named(address: str, error: Exception) -> BadSource:
    what = " ".join(str(error).split())[:300]
    if isinstance(error, FileNotFoundError):
        return BadSource(f"rows.source: nothing at {address}. Correct rows.source.")
    return BadSource(
        f"rows.source: {address}: cannot be fetched ({type(error).__name__}: {what}). Check the network, the address "
        "and the credentials (S3: AWS_PROFILE, AWS_ACCESS_KEY_ID or a role, and AWS_ENDPOINT_URL; gs: "
        "GOOGLE_APPLICATION_CREDENTIALS). What has come is kept: the same command goes on from it."
    )


def given_as(path: str) -> str:
    """The address of a source that was fetched to `path`; the path itself for any other."""
    for parent in (Path(path), *Path(path).parents):
        if parent.parent.parent.name == "sources":
            return str((read_json(parent.with_name(f"{parent.name}.{FACTS}")) or {}).get("source", path))
        if parent.parent.name == "snapshots" and parent.parents[2].name == "hub":
            name = parent.parents[1].name.removeprefix("datasets--").replace("--", "/")
            inside = str(Path(path).relative_to(parent))
            return f"hf://datasets/{name}@{parent.name[:12]}" + ("" if inside == "." else f"/{inside}")
    return path
