"""`dflash-train NAME`: runs a deployment of prefect.yaml in this process, from any directory, without a server.

dflash-train demo
dflash-train train --set training.epochs=2 --set name=short
dflash-train train --dry-run
dflash-train ls

`python -m flows` does the same, but puts the working directory first on `sys.path`: a `flows/` or `cache.py` of the
user's own that lies there would be imported instead of ours.

Exit codes: 0 done, 1 failed, 2 a mistake in what was typed, 130 stopped by Ctrl-C.
"""

import argparse
import importlib
import os
import signal
import sys
import textwrap
from pathlib import Path

from cache.errors import CacheError
from cache.plain_errors import report
from dflash.errors import DflashError
from flows.errors import BadParameter, FlowError
from flows.runs.parameters import repository, resolve_home

# Name → where its function is, imported only for itself: a look at a run waits for nothing else.
COMMANDS = {
    "ls": ("look.ls", "lists the runs: epoch, loss, tau, who is at work"),
    "status": ("look.status", "says how one run stands: stages, time left, checkpoint, warnings"),
    "logs": ("look.logs", "shows what the stages of a run printed; -f goes on"),
    "resume": ("run_here.resume", "goes on with a run as it was started; nothing is typed again"),
    "serve": ("serve.main", "serves a run's drafter in llama.cpp's server"),
    "clean": ("clean.main", "lists what no run needs, and deletes it once that is agreed"),
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except BadParameter as error:
        print(error, file=sys.stderr)
        return 2
    except (CacheError, DflashError, FlowError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        print(report(error, resolve_home(None)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in COMMANDS:
        module, _, function = COMMANDS[arguments[0]][0].partition(".")
        command = getattr(importlib.import_module(f"flows.cli.{module}"), function)
        return int(command(arguments[1:], _program()))
    from flows.cli.overrides import with_overrides
    from flows.cli.presets import read_deployments
    from flows.cli.run_here import run_here

    deployments = read_deployments(repository())
    listed = {one.name: one.description for one in deployments.values()}
    options = _parser(listed).parse_args(arguments)
    deployment = deployments[options.name]
    tree = with_overrides(deployment.parameters, options.set)
    if options.override:
        tree |= {"override": True}
    return run_here(deployment, tree, is_dry=options.dry_run)


def _program() -> str:
    """What was typed."""
    return "dflash-train" if Path(sys.argv[0]).name == "dflash-train" else "python -m flows"


def _parser(deployments: dict[str, str]) -> argparse.ArgumentParser:
    commands = {name: text for name, (_, text) in COMMANDS.items()}
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Runs a deployment of prefect.yaml in this process.",
        epilog=f"deployments:\n{_list(deployments)}\n\ncommands, each with --help:\n{_list(commands)}\n\n"
        "Parameters: see prefect.yaml.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=list(deployments), help="one of the deployments below")
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="override one parameter by its path, such as training.epochs=2; the value is read as YAML",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print rows, steps, disk, memory and time, from a measured step; train nothing",
    )
    parser.add_argument(
        "--override", action="store_true", help="go on under changed settings that change the curve, on record"
    )
    return parser


def _list(described: dict[str, str]) -> str:
    width = max(map(len, described), default=0)
    return "\n".join(
        textwrap.fill(f"  {name:<{width}}  {text}", 100, subsequent_indent=" " * (width + 4))
        for name, text in described.items()
    )


if __name__ == "__main__":
    sys.exit(main())
