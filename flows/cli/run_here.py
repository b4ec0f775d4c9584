"""Runs a flow in this process, with a server of its own unless one is set, and speaks of it plainly."""

import argparse
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from flows.cli.look import add_run, named_run
from flows.cli.overrides import check_parameters, with_overrides
from flows.cli.own_file import part_for
from flows.cli.presets import Tree, load_flow
from flows.cli.temporary_server import choose_server, start_server
from flows.runs.directory import read_parameters
from flows.runs.parameters import Parameters, repository, resolve_home, run_directory
from flows.runs.start import started_as
from flows.show.progress import console

OUR_LOGGERS = ("flows", "cache", "dflash")


def run_here(entrypoint: str, tree: Tree, *, is_dry: bool = False, is_shown: bool = False, whole: bool = True) -> int:
    """Checks the parameters, then runs the flow, or says what it would take or be given.

    `whole`: the tree is this flow's alone; else it may hold parameters of other flows, too.
    """
    os.chdir(repository())  # Prefect reads prefect.toml from the working directory only
    os.environ.setdefault("DO_NOT_TRACK", "1")  # and says on terminals that it tracks, whatever that file says
    server = choose_server()
    flow = load_flow(entrypoint)
    if not whole:
        tree = part_for(tree, frozenset(inspect.signature(flow.fn).parameters))
    parameters = check_parameters(flow.fn, tree)
    if is_shown:
        print(yaml.safe_dump(resolved(parameters), sort_keys=False, allow_unicode=True), end="")
        return 0
    _speak_plainly()
    if is_dry:
        from flows.cli.dry_run import dry_run

        return dry_run(flow.fn, parameters)
    _require_inputs(parameters)
    if server is not None:
        console.print("Starting Prefect's temporary server (about 15 s).")
        start_server(server, resolve_home(parameters.get("home")))
    flow(**parameters)
    return 0


def resolved(parameters: Tree) -> Tree:
    """The parameters with all defaults and with absolute paths, as plain values."""
    plain = {
        name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        for name, value in parameters.items()
    }
    if {"name", "rows", "target", "drafter"} <= parameters.keys():
        own = {name: value for name, value in parameters.items() if name in Parameters.model_fields}
        plain |= Parameters(**own).resolved().model_dump(mode="json")
    return plain


def resume(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{program} resume",
        description="Goes on with a run as it was started, from its newest checkpoint: nothing is typed again.",
    )
    add_run(parser)
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help="change a parameter")
    parser.add_argument(
        "--override", action="store_true", help="accept changed settings that change the curve, on record"
    )
    options = parser.parse_args(arguments)
    entrypoint, tree = started_as(named_run(options))
    tree = with_overrides(tree, options.set, Path.cwd()) | {"override": options.override}
    return run_here(entrypoint, tree)


def _require_inputs(parameters: dict[str, Any]) -> None:
    """A path that leads nowhere is found before a server is started for it."""
    from flows.prepare import require_inputs  # imports Prefect

    if parameters.keys() & {"evaluation", "export"} and "rows" not in parameters:
        read_parameters(run_directory(parameters["name"], parameters.get("home")))  # a run that is not there
    if {"rows", "target"} <= parameters.keys():
        require_inputs(parameters["rows"], parameters["target"], resolve_home(parameters.get("home")))


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
