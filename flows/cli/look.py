"""`dflash-train ls`, `status NAME` and `logs NAME`: how runs stand, also while they train, over SSH, without a server.

dflash-train ls
dflash-train status demo
dflash-train logs demo -f          # all stages, until Ctrl-C
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cache.json_file import read_json
from flows.errors import BadParameter
from flows.runs.directory import newest_checkpoint
from flows.runs.ledger import LEDGER
from flows.runs.parameters import resolve_home, run_directory
from flows.show.progress import StageProgress, duration
from flows.show.standing import Standing, busy, errors, seconds_left, standing, standings, tail, text_tail, warnings
from flows.show.tables import number, with_error

FOLLOW_EVERY_S = 0.5


def ls(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=f"{program} ls", description="Lists the runs, the latest first.")
    add_home(parser)
    home = resolve_home(parser.parse_args(arguments).home)
    found = standings(home)
    if not found:
        print(f"No runs in {home / 'runs'}. `{program} --help` lists what to start.")
        return 0
    rows = [("run", "state", "epoch", "loss", "tau", "last sign of life", "at work")]
    rows += [
        (one.name, one.state, _epochs(one), number(one.loss), _tau(one), _ago(one.seen), one.holder or "")
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def status(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=f"{program} status", description="Says how a run stands.")
    add_run(parser)
    run = named_run(parser.parse_args(arguments))
    for what, value in _status(standing(run)):
        print(f"{what:<11}  {value}")
    return 0


def logs(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=f"{program} logs", description="Shows what the stages of a run printed.")
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as more is printed, until Ctrl-C")
    parser.add_argument("-n", "--lines", type=int, default=20, help="last lines of each log; default: %(default)s")
    parser.add_argument("--stage", help="only this stage's, such as train")
    options = parser.parse_args(arguments)
    directory = named_run(options) / "logs"
    pattern = f"{options.stage or '*'}.log"
    found = sorted(directory.glob(pattern), key=lambda log: log.stat().st_mtime)
    if not found and not options.follow:
        known = ", ".join(sorted(log.stem for log in directory.glob("*.log"))) or "none"
        raise BadParameter(f"logs {options.name}: nothing in {directory / pattern}. Stages that have a log: {known}.")
    places = {log: log.stat().st_size for log in found}
    for log in found:
        _print(log, text_tail(log)[-options.lines :] if options.lines > 0 else [])
    with contextlib.suppress(KeyboardInterrupt):
        while options.follow:
            sys.stdout.flush()
            time.sleep(FOLLOW_EVERY_S)
            for log in sorted(directory.glob(pattern)):
                _print(log, _more(log, places))
    return 0


def track(arguments: list[str], program: str) -> int:
    from dflash.training.trackers import TRACKERS
    from dflash.training.trackers import track as send

    parser = argparse.ArgumentParser(
        prog=f"{program} track", description="Sends a tracking service what it does not have of a run's curves."
    )
    add_run(parser)
    parser.add_argument("--to", required=True, choices=TRACKERS, help="the service; its package has to be installed")
    options = parser.parse_args(arguments)
    send(named_run(options), options.to, lambda _: True)
    return 0


def add_home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", default=None, help="directory of all data; default: $DFLASH_HOME, or var/ here")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the run, as `ls` lists it")
    add_home(parser)


def named_run(options: argparse.Namespace) -> Path:
    return known_run(options.name, options.home)


def known_run(name: str, home: str | None) -> Path:
    """The directory of a run. Raises BadParameter naming those that there are."""
    run = run_directory(name, home)
    if not run.is_dir():
        known = ", ".join(one.name for one in standings(resolve_home(home))) or "none"
        raise BadParameter(f"{name}: there is no such run in {run.parent}. There are: {known}.")
    return run


def _status(one: Standing) -> list[tuple[str, str]]:
    run, lines = one.path, tail(one.path / "metrics.jsonl")
    left = seconds_left(run, one.state) if one.is_at_work else None
    rows = [
        ("run", f"{one.name}, {run}"),
        ("state", one.state + (f", {one.holder}" if one.is_at_work else "")),
        ("seen", _ago(one.seen)),
        ("epoch", _epochs(one)),
        ("loss", number(one.loss)),
        ("tau", _tau(one) + (f" at {one.tau['checkpoint']}" if one.tau and "checkpoint" in one.tau else "")),
        ("time left", "–" if left is None else f"{duration(left)} of this stage"),
        ("stages", ", ".join(_stages(run)) or "none has worked yet"),
    ]
    if one.is_at_work and (progress := StageProgress.read(run / f"progress-{one.state}.json")) is not None:
        rows.append(("now", str(progress)))
    if lines:
        rows.append(("busy", ", ".join(f"{name} {share:.0%}" for name, share in busy(lines[-1]).items())))
        rows.append(("", str(lines[-1].get("bottleneck", ""))))
        rows.append(("speed", f"{number(lines[-1].get('tokens_per_s'))} tokens/s"))
    newest = newest_checkpoint(run)
    made = "none" if newest is None else f"{newest.name}, {_ago(newest.stat().st_mtime)}"
    rows.append(("checkpoint", made))
    rows += [("failed", f"{stage}: {message.splitlines()[0]}") for stage, message in errors(run)]
    said = warnings(run)
    return rows + [("warnings" if i == 0 else "", line) for i, line in enumerate(said)]


def _stages(run: Path) -> list[str]:
    ledger = read_json(run / LEDGER) or {}
    return [
        f"{stage} {duration(entry['seconds'])}{' (done)' if 'fingerprint' in entry else ''}"
        for stage, entry in ledger.items()
    ]


def _epochs(one: Standing) -> str:
    done = f"{one.epoch:.2f}".rstrip("0").rstrip(".")
    return done if one.epochs is None else f"{done}/{one.epochs}"


def _tau(one: Standing) -> str:
    return "–" if one.tau is None else with_error(one.tau)


def _ago(moment: float) -> str:
    return f"{duration(max(0.0, time.time() - moment))} ago"


def _more(log: Path, places: dict[Path, int]) -> list[str]:
    """Whole lines that were added since; a log that has become shorter begins anew."""
    start, size = places.get(log, 0), log.stat().st_size
    start = 0 if size < start else start
    with log.open("rb") as stream:
        stream.seek(start)
        added = stream.read(size - start)
    whole = added[: added.rfind(b"\n") + 1]
    places[log] = start + len(whole)
    return whole.decode(errors="replace").splitlines()


def _print(log: Path, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{log.stem}: {line}")
