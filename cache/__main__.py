"""Token caches from the command line.

python -m cache build SOURCE --vocabulary 151936     make the token cache of some rows, or find it made
python -m cache inspect CACHE --tokenizer DIR        what is in it, and a row with its mask in colour
python -m cache verify CACHE                         read every byte and compare checksums
python -m cache list                                 all caches of a home, with sizes
python -m cache remove CACHE                         take one away; asks first
python -m cache remove --slices                      drop the tokenised slices of conversations, which builds make again

CACHE is the first letters of a key under `--home` ($DFLASH_HOME, else var/), or a directory, such as ./a.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from cache.build import build
from cache.config import RowsConfig, default_home
from cache.disk.removal import drop_slices, entries, entry_at, remove, slice_files, users, why_not_ours
from cache.disk.store import TokenCache
from cache.elsewhere.places import fetched
from cache.errors import CacheError, CacheIncomplete, CacheMismatch
from cache.plain_errors import one_line, report
from cache.progress_bar import progress_bar
from cache.show import listing, row, size_of, summary


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 when it did what was asked."""
    parser = argparse.ArgumentParser("python -m cache", description=__doc__, formatter_class=_Formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments_of in _ARGUMENTS.items():
        command = commands.add_parser(name)
        command.add_argument("--home", type=Path, default=default_home(), help="directory of all data")
        for flags, options in arguments_of:
            command.add_argument(*flags, **options)
    given = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    try:
        code: int = _COMMANDS[given.command](given, console)
    except CacheError as error:
        line = f"{type(error).__name__}: {error}"
    except ValidationError as error:
        line = one_line(error)
    except KeyboardInterrupt:
        line = "Stopped. The same command goes on from the slices that are made."
    except Exception as error:
        line = report(error, given.home)
    else:
        return code
    Console(stderr=True, soft_wrap=True).print(line, style="red", markup=False, highlight=False)
    return 1


def _build(given: argparse.Namespace, console: Console) -> int:
    rows: dict[str, Any] = {"source": given.source, "vocabulary": given.vocabulary}
    for setting in given.set:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise CacheError(f"--set {setting}: expected field=value, such as --set max_tokens=2048.")
        try:
            rows[name] = json.loads(value)
        except ValueError:
            rows[name] = value
    with console.status("looking at the source") as status:
        local = fetched(
            RowsConfig(**rows),
            given.home,
            lambda told: status.update(f"fetching {told.source}: {told.done / 1e6:,.0f} of {told.total / 1e6:,.0f} MB"),
        )
    with progress_bar(console) as progress:
        path = build(local, home=given.home, tokenizer=given.tokenizer, vocabulary=None, progress=progress)
    console.print(str(path), highlight=False)
    return 0


def _inspect(given: argparse.Namespace, console: Console) -> int:
    cache = TokenCache.open(_find(given.cache, given.home))
    if not 0 <= given.row < cache.manifest.rows:
        raise CacheError(f"--row {given.row}: expected 0..{cache.manifest.rows - 1}, the rows of {cache.path}.")
    console.print(summary(cache), row(cache, given.row, given.tokenizer), sep="\n\n")
    return 0


def _verify(given: argparse.Namespace, console: Console) -> int:
    cache = TokenCache.open(_find(given.cache, given.home))
    cache.verify()
    console.print(f"{cache.path}: all {len(cache.manifest.arrays)} arrays are what the manifest says.")
    return 0


def _list(given: argparse.Namespace, console: Console) -> int:
    console.print(listing(entries(given.home), slice_files(given.home), users(given.home)))
    return 0


def _remove(given: argparse.Namespace, console: Console) -> int:
    if given.slices == (given.cache is not None):
        raise CacheError("remove: expected a CACHE or --slices, one of them.")
    if given.slices:
        return _remove_slices(given, console)
    path = _find(given.cache, given.home)
    why_not = why_not_ours(path, given.home)
    if why_not is not None:
        raise CacheMismatch(f"{path}: {why_not}. Only token caches of {given.home / 'tokens'} are removed.")
    entry = entry_at(path)
    rows = f"{entry.manifest.rows:,} rows" if entry.manifest else f"does not open: {entry.problem}"
    console.print(f"{entry.path}: {rows}, {size_of(entry.size_bytes)}")
    if not _is_agreed(given.yes, console):
        return 1
    remove(entry.path, given.home)
    console.print("Removed.")
    return 0


def _remove_slices(given: argparse.Namespace, console: Console) -> int:
    found = slice_files(given.home)
    size = size_of(sum(one.size_bytes for one in found))
    console.print(f"{len(found)} slices of tokenised conversations, {size}: a later build makes again what it needs.")
    if not found or not _is_agreed(given.yes, console):
        return 0 if not found else 1
    dropped, freed = drop_slices(given.home)
    console.print(f"Removed {dropped} slices, {size_of(freed)}.")
    return 0


def _is_agreed(yes: bool, console: Console) -> bool:
    """Asks only where somebody can answer."""
    if yes:
        return True
    if not sys.stdin.isatty():
        console.print("Kept: add --yes to remove without being asked.")
        return False
    if input("Remove? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    console.print("Kept.")
    return False


def _find(name: str, home: Path) -> Path:
    """A cache by the first letters of its key, which come first, or by its directory."""
    found = []
    if name and not re.search(r"[/*?\[]", name):
        found = [path for path in (home / "tokens").glob(f"{name}*") if path.is_dir() and path.name[:1] != "."]
    if not found and "/" in name and Path(name).is_dir():
        return Path(name).resolve()
    if len(found) != 1:
        what = f"{len(found)} caches begin so" if found else "no such cache"
        raise CacheIncomplete(
            f"{name}: {what} under {home / 'tokens'}, expected one. `python -m cache list` shows what there is."
        )
    return found[0]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


_CACHE: tuple[tuple[str, ...], dict[str, Any]] = (("cache",), {"help": "directory, or first letters of a key"})
_TOKENIZER: tuple[tuple[str, ...], dict[str, Any]] = (
    ("--tokenizer",),
    {"type": Path, "help": "directory of the target's tokenizer"},
)
_ARGUMENTS: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "build": [
        (("source",), {"nargs": "+", "help": "paths or globs: datasets directory, Arrow, Parquet or JSONL"}),
        _TOKENIZER,
        (("--vocabulary",), {"type": int, "help": "number of the target's token ids"}),
        (("--set",), {"action": "append", "default": [], "metavar": "field=value", "help": "a field of `rows`"}),
    ],
    "inspect": [_CACHE, _TOKENIZER, (("--row",), {"type": int, "default": 0, "help": "row to show"})],
    "verify": [_CACHE],
    "list": [],
    "remove": [
        (("cache",), {"nargs": "?", "help": "directory, or first letters of a key"}),
        (("--slices",), {"action": "store_true", "help": "instead: all slices of tokenised conversations"}),
        (("--yes",), {"action": "store_true", "help": "do not ask"}),
    ],
}
_COMMANDS = {"build": _build, "inspect": _inspect, "verify": _verify, "list": _list, "remove": _remove}

if __name__ == "__main__":
    sys.exit(main())
