"""`dflash-train clean`: what of a home no run needs, listed, and deleted once that is agreed.

    dflash-train clean                   # lists, and asks where somebody can answer
    dflash-train clean --yes             # deletes without asking
    dflash-train clean --run old         # also the run `old`, and what only it needed

Token caches and targets that no run refers to go once nothing has used them for a week: rows may be prepared days
before they are trained on. So do slices of tokenised conversations. Runs go by name only. What a process is at is kept.
"""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from cache.disk.removal import drop_slices, remove, size_bytes, slice_files, take_away, why_not_ours
from cache.errors import CacheInUse
from cache.json_file import read_json
from cache.locks import beside, held, lock_of
from flows.errors import BadParameter
from flows.runs.ledger import LEDGER
from flows.runs.parameters import resolve_home, run_directory
from flows.show.progress import console

UNUSED_DAYS = 7.0


def main(arguments: list[str], program: str = "dflash-train") -> int:
    parser = argparse.ArgumentParser(prog=f"{program} clean", description=__doc__.splitlines()[0])
    parser.add_argument("--yes", action="store_true", help="delete what is listed without asking")
    parser.add_argument("--run", action="append", default=[], metavar="NAME", help="also delete this run")
    parser.add_argument(
        "--days", type=float, default=UNUSED_DAYS, help="keep what was used in so many days; default: %(default)s"
    )
    parser.add_argument("--home", default=None, help="directory of all data; default: $DFLASH_HOME, or var/ here")
    options = parser.parse_args(arguments)
    home, runs = resolve_home(options.home), frozenset(options.run)
    refuse_unknown(home, runs)
    listed = unneeded_directories(home, runs, options.days)
    for directory in listed:
        console.print(f"{size_bytes(directory) / 1e9:8.2f} GB  {directory}", markup=False, soft_wrap=True)
    before = time.time() - 86_400 * options.days
    slices = [one for one in slice_files(home) if one.used <= before]
    if slices:
        size = sum(one.size_bytes for one in slices) / 1e9
        console.print(f"{size:8.2f} GB  {len(slices)} slices in {slices[0].path.parent}", markup=False, soft_wrap=True)
    found = f"{len(listed)} directories and {len(slices)} slices"
    if not (listed or slices) or not (options.yes or _is_agreed(found)):
        console.print(f"{found} are not needed; nothing was deleted. {'' if options.yes else 'Add --yes to delete.'}")
        return 0
    deleted = _delete(home, runs, options.days, listed)
    dropped, _ = drop_slices(home, 86_400 * options.days)
    console.print(f"{deleted} directories and {dropped} slices deleted.")
    return 0 if deleted == len(listed) else 1


def _is_agreed(found: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"Delete {found}? [y/N] ").strip().lower() in ("y", "yes")


def _delete(home: Path, runs: frozenset[str], days: float, listed: list[Path]) -> int:
    """How many went. Asked anew before each, since time has passed; what a process is at is kept, and said."""
    deleted = 0
    for directory in listed:  # runs come first: of one that is kept, what it needs is kept, too
        if directory not in unneeded_directories(home, runs, days):
            console.print(f"Kept: {directory} is used.", markup=False, soft_wrap=True)
            continue
        try:
            if directory.parent.name == "tokens":
                remove(directory, home)
            else:
                _remove_other(directory)
            deleted += 1
        except CacheInUse as error:
            runs -= {directory.name}
            console.print(f"Kept: {error}", markup=False, soft_wrap=True)
    return deleted


def _remove_other(directory: Path) -> None:
    """A run, or a target; CacheInUse while a process is at it."""
    with contextlib.ExitStack() as stack:
        trains = directory / "lock"
        for lock in (lock_of(directory), *([trains] if trains.exists() else [])):
            if not stack.enter_context(held(lock, wait=False)):
                raise CacheInUse(f"{directory}: a process is at it now. Try again when that has ended.")
        take_away(directory, beside(directory.with_name(f".removed-{directory.name}")))


def refuse_unknown(home: Path, runs: frozenset[str]) -> None:
    """Raises BadParameter for what is no run of this home."""
    for name in runs:
        directory = run_directory(name, str(home))
        if directory.is_symlink() or not directory.is_dir():
            raise BadParameter(f"--run {name}: there is no such run in {home / 'runs'}.")
        if not (directory / "config.json").is_file():
            raise BadParameter(f"--run {name}: {directory} holds no config.json, so no run made it. It is kept.")


def unneeded_directories(home: Path, runs: frozenset[str], days: float) -> list[Path]:
    """The named runs, and what no other run refers to: only what is ours, by its place and what it holds."""
    going = {home / "runs" / name for name in runs}
    kept = {
        config.parent for place in ("runs", "answers") for config in home.glob(f"{place}/[!.]*/config.json")
    } - going
    needed = {path for run in kept for path in needed_by(run, home)}
    before = time.time() - 86_400 * days
    unneeded = [
        path for path in candidates(home) if path not in needed and _changed(path) <= before and not path.is_symlink()
    ]
    return sorted([*unneeded, *going])


def candidates(home: Path) -> list[Path]:
    """Whatever of a home is made again when it is missed, and what killed processes left."""
    tokens = [path for path in home.glob("tokens/[!.]*") if why_not_ours(path, home) is None]
    targets = [path for path in home.glob("targets/*") if (path / "source.json").is_file() or ".tmp-" in path.name]
    left = [path for pattern in ("runs/.dry-run-*", "*/.removed-*") for path in home.glob(pattern)]
    return [path for path in (*tokens, *targets, *left) if path.is_dir()]


def needed_by(run: Path, home: Path) -> list[Path]:
    """The token cache and the target of a run."""
    prepared = (read_json(run / LEDGER) or {}).get("prepare", {}).get("key")
    config = read_json(run / "config.json") or {}
    target = Path(config.get("target", {}).get("model", ""))
    return [home / "targets" / target.name, *([home / "tokens" / prepared] if prepared else [])]


def _changed(directory: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return directory.stat().st_mtime
    return time.time()
