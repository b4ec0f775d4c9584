"""Sources that are not on this machine → the same rows with a source on its disk, fetched once into `home/sources/`.

A data set of the hub is kept by its commit; files of S3, Google Storage and the web by their etags. From then on they
are like any local files: told by first bytes, hashed by content, mapped. Credentials are the libraries' own affair
(environment, profile, `hf auth login`); no address with a password in it is taken.
"""

import re
from pathlib import Path

from cache.config import RowsConfig
from cache.elsewhere.download import Report
from cache.errors import BadSource

HUB = "hf://datasets/"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA = re.compile(r"\.(jsonl?|ndjson|arrows?|parquet|gz|zst|bz2|txt)$")
SCHEMES = ("s3", "gs", "https", "http")


def address_of(source: str) -> str | None:
    """The address of a source elsewhere, with the hub's spelled out; None for a path or glob of this machine."""
    if match := _SCHEME.match(source):
        return None if match[1] == "file" else source
    is_name = _HUB_NAME.fullmatch(source) and not _DATA.search(source) and not Path(source).exists()
    return f"{HUB}{source}" if is_name else None


def fetched(rows: RowsConfig, home: Path, report: Report | None = None) -> RowsConfig:
    """The rows with every source on this machine: those that are elsewhere are fetched unless they are here."""
    given = [rows.source] if isinstance(rows.source, str) else rows.source
    addresses = [address_of(source) for source in given]
    if not any(addresses):
        return rows
    local = [
        source if address is None else str(_fetch(address, rows.revision, home, report))
        for source, address in zip(given, addresses, strict=True)
    ]
    return rows.model_copy(update={"source": local[0] if isinstance(rows.source, str) else local})


def check_address(source: str) -> None:
    """Raise what is wrong with a source's address before anything is fetched."""
    address = address_of(source)
    if address is None or address.startswith(HUB):
        return
    match = _SCHEME.match(address)
    assert match is not None
    scheme, rest = match.groups()
    if scheme not in SCHEMES:
        raise BadSource(
            f"rows.source: {source}: {scheme}:// is not read, expected a path, the name of a hub data set, "
            f"hf://datasets/…, {', '.join(f'{one}://…' for one in SCHEMES)}. Correct rows.source."
        )
    if "@" in rest.partition("/")[0] and scheme in ("http", "https"):
        raise BadSource(
            f"rows.source: {scheme}://…@{rest.partition('@')[2]}: a name or password in an address would be kept in "
            "the run's config.json. Put it into ~/.netrc, or download the files and name them."
        )


def _fetch(address: str, revision: str | None, home: Path, report: Report | None) -> Path:
    check_address(address)
    if address.startswith(HUB):
        from cache.elsewhere.hub import fetch_data_set  # what fetches is imported by those who need it only

        return fetch_data_set(address.removeprefix(HUB), revision, home / "sources", report)
    from cache.elsewhere.files import fetch_files

    return fetch_files(address, home / "sources", report)
