"""`dflash-train NAME`: runs a deployment of prefect.yaml in this process, from any directory, without a server.

dflash-train demo
dflash-train train --set training.epochs=2 --set name=short
dflash-train train --dry-run
dflash-train train -f mine.yaml
dflash-train ls

`python -m flows` does the same, but puts the working directory first on `sys.path`: a `flows/` or `cache.py` of the
user's own that lies there would be imported instead of ours.

Exit codes: 0 done, 1 failed, 2 a mistake in what was typed, 130 stopped by Ctrl-C.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
import textwrap
from pathlib import Path

from cache.errors import CacheError
from cache.plain_errors import report
from dflash.errors import DflashError
from flows.cli.commands import COMMANDS
from flows.errors import BadParameter, FlowError
from flows.runs.parameters import repository, resolve_home


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
    from flows.cli.fields import FLOWS, fields_help
    from flows.cli.overrides import with_overrides
    from flows.cli.own_file import read_file
    from flows.cli.presets import read_deployments
    from flows.cli.run_here import run_here

    deployments = read_deployments(repository())
    listed = {one.name: one.description for one in deployments.values()}
    if not arguments or arguments[0].startswith("-"):
        _overview(listed).parse_args(arguments)
        raise BadParameter(f"Name what to run: {', '.join(listed)}; or a command. `{_program()} --help` says more.")
    name, rest = arguments[0], arguments[1:]
    if name not in listed and name not in FLOWS:
        known = [*COMMANDS, *listed, *FLOWS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(sorted(set(known)))}."
        raise BadParameter(f"{name}: there is no such command or deployment. {hint}")
    parser = _parser(name, listed.get(name, "Runs this flow with the parameters of a file."))
    if {"-h", "--help"} & set(rest):
        entrypoint = deployments[name].entrypoint if name in listed else FLOWS[name]
        parser.epilog = fields_help(entrypoint, deployments[name].parameters if name in listed else {})
    options = parser.parse_args(rest)
    if options.file is None and name not in listed:
        raise BadParameter(f"{name}: no deployment of prefect.yaml has this name. Give its parameters with -f FILE.")
    tree = deployments[name].parameters if options.file is None else read_file(options.file)
    tree = with_overrides(tree, options.set, Path.cwd())
    if options.override:
        tree |= {"override": True}
    entrypoint = deployments[name].entrypoint if name in listed else FLOWS[name]
    whole = options.file is None
    return run_here(entrypoint, tree, is_dry=options.dry_run, is_shown=options.show, whole=whole)


def _program() -> str:
    """What was typed."""
    return "dflash-train" if Path(sys.argv[0]).name == "dflash-train" else "python -m flows"


def _overview(deployments: dict[str, str]) -> argparse.ArgumentParser:
    commands = {name: text for name, (_, text) in COMMANDS.items()}
    return argparse.ArgumentParser(
        prog=_program(),
        usage=f"{_program()} NAME [options]",
        description="Runs a deployment of prefect.yaml in this process, or a command.",
        epilog=f"deployments, each with --help for its fields:\n{_list(deployments)}\n\n"
        f"commands, each with --help:\n{_list(commands)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_program()} {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="take the parameters from this YAML file; `init` writes one"
    )
    parser.add_argument(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="set one of the fields by its path, such as training.epochs=2",
    )
    parser.add_argument("--show", action="store_true", help="print all parameters as they would be used; run nothing")
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
