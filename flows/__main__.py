"""`dflash-train NAME`: runs a deployment of prefect.yaml in this process, from any directory, without a server.

dflash-train demo
dflash-train train --set training.epochs=2 --set name=short
dflash-train train --dry-run

`python -m flows` does the same, but puts the working directory first on `sys.path`: a `flows/` or `cache.py` of the
user's own that lies there would be imported instead of ours.
"""

import argparse
import logging
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

from cache.errors import CacheError
from cache.plain_errors import report
from dflash.errors import DflashError
from flows.cli import clean
from flows.cli.overrides import check_parameters, with_overrides
from flows.cli.presets import Deployment, read_deployments
from flows.cli.temporary_server import choose_server, start_server
from flows.errors import BadParameter, FlowError
from flows.runs.directory import read_parameters
from flows.runs.parameters import repository, resolve_home, run_directory
from flows.show.progress import console

OUR_LOGGERS = ("flows", "cache", "dflash")


def main(arguments: list[str] | None = None) -> int:
    root = repository()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["clean"]:
            return clean.main(arguments[1:], _program())
        if arguments[:1] == ["serve"]:
            from flows.cli import serve

            return serve.main(arguments[1:], _program())
        deployments = read_deployments(root)
        options = _parser(deployments).parse_args(arguments)
        deployment = deployments[options.name]
        tree = with_overrides(deployment.parameters, options.set)
        os.chdir(root)  # Prefect reads prefect.toml from the working directory only
        os.environ.setdefault("DO_NOT_TRACK", "1")  # and says on terminals that it tracks, whatever that file says
        server = choose_server()
        flow = deployment.load()
        parameters = check_parameters(flow.fn, tree)
        _speak_plainly()
        if options.dry_run:
            from flows.cli.dry_run import dry_run

            return dry_run(flow.fn, parameters)
        _require_inputs(parameters)
        if server is not None:
            console.print("Starting Prefect's temporary server (about 15 s).")
            start_server(server, resolve_home(parameters.get("home")))
        flow(**parameters)
    except BadParameter as error:
        print(error, file=sys.stderr)
        return 2
    except (CacheError, DflashError, FlowError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(report(error, resolve_home(None)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _require_inputs(parameters: dict[str, Any]) -> None:
    """A path that leads nowhere is found before a server is started for it."""
    from flows.prepare import require_inputs  # imports Prefect

    if parameters.keys() & {"evaluation", "export"} and "rows" not in parameters:
        read_parameters(run_directory(parameters["name"], parameters.get("home")))  # a run that is not there
    if {"rows", "target"} <= parameters.keys():
        require_inputs(parameters["rows"], parameters["target"], resolve_home(parameters.get("home")))


def _program() -> str:
    """What was typed."""
    return "dflash-train" if Path(sys.argv[0]).name == "dflash-train" else "python -m flows"


def _parser(deployments: dict[str, Deployment]) -> argparse.ArgumentParser:
    program = _program()
    width = max(map(len, deployments), default=0)
    indent = " " * (width + 4)
    listed = "\n".join(
        textwrap.fill(f"  {one.name:<{width}}  {one.description}", 100, subsequent_indent=indent)
        for one in deployments.values()
    )
    parser = argparse.ArgumentParser(
        prog=program,
        description="Runs a deployment of prefect.yaml in this process.",
        epilog=f"deployments:\n{listed}\n\nParameters: see prefect.yaml. Deleting: see `{program} clean --help`. "
        f"Serving: see `{program} serve --help`.",
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
    return parser


class _Plain(logging.Handler):
    """Our own lines without time stamps, above the live progress line and not across it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "flows.show.progress" and console.is_terminal:
            return  # the live line shows it
        console.print(self.format(record), markup=False, soft_wrap=True)


def _speak_plainly() -> None:
    """Show only our own lines on the terminal; Prefect keeps its own in its database and shows them on its pages."""
    from prefect.logging.handlers import PrefectConsoleHandler

    names = [*logging.root.manager.loggerDict, *OUR_LOGGERS]
    for handler in {handler for name in names for handler in logging.getLogger(name).handlers}:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL)
    for name in OUR_LOGGERS:
        logging.getLogger(name).addHandler(_Plain())


if __name__ == "__main__":
    sys.exit(main())
