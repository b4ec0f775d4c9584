"""`python -m flows clean`: what of a home no run needs, listed or deleted.

    python -m flows clean --dry-run               # lists
    python -m flows clean                         # deletes what is listed
    python -m flows clean --run old --dry-run     # also the run `old`, and what only it needed

Token caches and targets that no run refers to go once they are a week old: rows may be prepared days before they are
trained on. So do slices of tokenised conversations that no build has used for so long. Runs go by name only.
"""

import argparse
import shutil
import time
from pathlib import Path

from cache.json_file import read_json
from flows.errors import BadParameter
from flows.runs.ledger import LEDGER
from flows.runs.parameters import resolve_home, run_directory
from flows.show.progress import console

UNUSED_DAYS = 7.0
LEFT_BEHIND = ("runs/.dry-run-*",)  # by processes that were killed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows clean", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="list what would be deleted; delete nothing")
    parser.add_argument("--run", action="append", default=[], metavar="NAME", help="also delete this run")
    parser.add_argument(
        "--days", type=float, default=UNUSED_DAYS, help="keep what is younger than this; default: %(default)s"
    )
    parser.add_argument("--home", default=None, help="directory of all data; default: $DFLASH_HOME, or var/ here")
    options = parser.parse_args(arguments)
    home = resolve_home(options.home)
    unneeded = unneeded_directories(home, frozenset(options.run), options.days)
    for directory in unneeded:
        console.print(f"{size_bytes(directory) / 1e9:8.2f} GB  {directory}", markup=False, soft_wrap=True)
        if not options.dry_run:
            shutil.rmtree(directory)
    slices = unused_slices(home, options.days)
    if slices:
        size = sum(path.stat().st_size for path in slices)
        console.print(f"{size / 1e9:8.2f} GB  {len(slices)} slices in {slices[0].parent}", markup=False, soft_wrap=True)
    if not options.dry_run:
        for path in slices:
            path.unlink(missing_ok=True)  # not its lock, which a builder may have opened just now
    verb = "would be deleted" if options.dry_run else "deleted"
    console.print(f"{len(unneeded)} directories and {len(slices)} slices {verb}.")
    return 0


def unneeded_directories(home: Path, runs: frozenset[str], days: float) -> list[Path]:
    """The named runs, and what no other run refers to."""
    for name in runs:
        if not run_directory(name, str(home)).is_dir():
            raise BadParameter(f"--run {name}: there is no such run in {home / 'runs'}.")
    kept = [config.parent for config in (home / "runs").glob("*/config.json") if config.parent.name not in runs]
    needed = {path for run in kept for path in needed_by(run, home)}
    before = time.time() - 86_400 * days
    candidates = [path for place in ("tokens/[!.]*", "targets/[!.]*", *LEFT_BEHIND) for path in home.glob(place)]
    unneeded = [path for path in candidates if path.is_dir() and path not in needed and path.stat().st_mtime < before]
    return sorted([*unneeded, *(home / "runs" / name for name in runs)])


def unused_slices(home: Path, days: float) -> list[Path]:
    """Slices that no build has read for so long, and what killed builders left of some."""
    before = time.time() - 86_400 * days
    return sorted(path for path in home.glob("tokens/.slices/*.arrow*") if path.stat().st_mtime < before)


def needed_by(run: Path, home: Path) -> list[Path]:
    """The token cache and the target of a run."""
    prepared = (read_json(run / LEDGER) or {}).get("prepare", {}).get("key")
    config = read_json(run / "config.json") or {}
    target = Path(config.get("target", {}).get("model", ""))
    return [home / "targets" / target.name, *([home / "tokens" / prepared] if prepared else [])]


def size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
