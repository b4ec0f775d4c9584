"""`python -m dflash COMMAND`: one torch process's work on a run directory, usable without Prefect.

Exit codes: 0 done, 1 failed, 2 a mistake that a retry would repeat, 75 stopped by a signal after a checkpoint.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from cache.errors import CacheError
from cache.json_file import write_json
from dflash.errors import CheckpointCorrupt, ConfigMismatch, RunLocked, TargetMismatch
from dflash.run_directory import CONFIG, report_name

USER_ERRORS = (ConfigMismatch, TargetMismatch, RunLocked, CheckpointCorrupt, CacheError)
STOPPED = 75
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> int:
    """Parse, run, and leave error-COMMAND.json behind when it fails."""
    # OpenMP reads it when torch is loaded: threads that wait give way soon, not after 3 ms of spinning, which costs a
    # run a third of its speed and more where other work wants the cores, too.
    os.environ.setdefault("GOMP_SPINCOUNT", "300")
    _die_with_torchrun()
    arguments = _parser().parse_args()
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING  # one voice for several processes
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return _run(arguments)
    except Exception as error:
        # torchrun sends it to the others of one that failed; all that is left to do here is to say why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        traceback.print_exc()
        _leave_error(arguments, error)
        return 2 if isinstance(error, USER_ERRORS) else 1


def _die_with_torchrun() -> None:
    """The processes that torchrun starts have sessions of their own: where it is killed, only the kernel ends them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _error_file(arguments: argparse.Namespace) -> Path:
    stage = {"dequantise": "target"}.get(arguments.command, arguments.command)
    return Path(arguments.run) / report_name("error", stage)


def _leave_error(arguments: argparse.Namespace, error: BaseException) -> None:
    if getattr(arguments, "run", None) is None or not arguments.run.is_dir():
        return
    file = _error_file(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and file.exists():
        return  # another process of this run failed first, and this one because of it
    kind = type(error)
    value = {
        "type": kind.__name__,
        "module": kind.__module__,
        "message": str(error),
        "errno": getattr(error, "errno", None),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        write_json(file, value)
    except OSError as full:  # the error is on stderr, too
        print(f"{file} could not be written: {full}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("check", "estimate what a run needs and write plan.json"),
        ("train", "train from the newest checkpoint and write train.json"),
        ("evaluate", "measure τ and decoding and write evaluation.json and report.html"),
        ("serve-check", "decode through a real server, without and with the drafter, and write served.json"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("run", type=Path, help="run directory, with config.json")
        command.add_argument("--tokens", type=Path, required=True, help="directory of the token cache")
        _add_config(command)
        if name == "check":
            command.add_argument(
                "--assume",
                metavar="gpus=8,memory_gb=141",
                help="print layouts, days and memory on such a machine instead; also tflops, target_us (of a token), "
                "drafter_us (of a slot), rows",
            )
        if name == "train":
            command.add_argument("--until-epoch", type=int, help="stop once so many epochs of the plan are done")
            command.add_argument("--until-time", type=float, help="stop at this time, in seconds since 1970")
            command.add_argument("--override", action="store_true", help="accept changed settings, on record")
    command = commands.add_parser("export", help="write the newest checkpoint in its served layouts")
    command.add_argument("run", type=Path, help="run directory, with config.json")
    _add_config(command)
    command = commands.add_parser("serve", help="serve GGUF files until standard input ends")
    command.add_argument("--target", type=Path, required=True, help="GGUF file of the target")
    command.add_argument("--drafter", type=Path, help="GGUF file of the drafter")
    for name, default, text in (
        ("drafts", 0, "most drafts of a round"),
        ("context", 4096, "positions of a prompt with its answer"),
        ("parallel", 1, "prompts at once"),
        ("threads", 1, "threads, which spin while they wait"),
        ("port", 0, "port; 0: any free one"),
    ):
        command.add_argument(f"--{name}", type=int, default=default, help=text)
    command = commands.add_parser("track", help="send the run's curves to a tracking service")
    command.add_argument("tracked", metavar="run", type=Path, help="run directory")
    command.add_argument("--to", required=True, choices=("wandb", "mlflow", "trackio"), help="the service")
    command.add_argument("--follow", action="store_true", help="go on until standard input ends")
    command = commands.add_parser("generate", help="answer prompts with the target and write answers.jsonl")
    command.add_argument("run", metavar="answers", type=Path, help="directory of the answers, with config.json")
    _add_config(command)
    command = commands.add_parser("dequantise", help="write a GGUF file as safetensors, once")
    command.add_argument("file", type=Path, help="GGUF file")
    command.add_argument("home", type=Path, help="directory to write below: targets/<sha256>/")
    command.add_argument("run", metavar="reports", type=Path, nargs="?", help="directory for what goes wrong")
    command = commands.add_parser("probe", help="load an exported drafter and write its hidden states of seeded inputs")
    command.add_argument("directory", type=Path, help="exported drafter")
    command.add_argument("out", type=Path, help="safetensors file to write")
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        default=CONFIG,
        metavar="NAME",
        help="file in the run directory to read the parameters from; train makes it config.json once it accepts it",
    )


def _run(arguments: argparse.Namespace) -> int:
    # Imported here: argument errors and --help answer at once, without torch.
    if getattr(arguments, "run", None) is not None:
        _error_file(arguments).unlink(missing_ok=True)
    if arguments.command == "train":
        from dflash.interrupt import Interrupted
        from dflash.training.train import train
        from dflash.training.until import Until

        def last_resort(error: BaseException) -> None:
            _leave_error(arguments, error)
            os._exit(1)

        until, config = Until(arguments.until_epoch, arguments.until_time), arguments.config
        options = {"override": arguments.override, "last_resort": last_resort, "config_name": config}
        try:
            train(arguments.run, arguments.tokens, until, **options)
        except Interrupted:
            return STOPPED
    elif arguments.command == "check":
        if arguments.assume:
            from dflash.training.assumed import Assumed, assumed

            print(assumed(arguments.run, arguments.tokens, Assumed.parse(arguments.assume), arguments.config))
            return 0
        from dflash.training.check import check

        check(arguments.run, arguments.tokens, arguments.config)
    elif arguments.command == "evaluate":
        from dflash.evaluation.evaluate import evaluate

        evaluate(arguments.run, arguments.tokens, arguments.config)
    elif arguments.command == "export":
        from dflash.export.export import export

        export(arguments.run, arguments.config)
    elif arguments.command == "serve-check":
        from dflash.serving.serve_check import serve_check

        serve_check(arguments.run, arguments.tokens, arguments.config)
    elif arguments.command == "serve":
        from dflash.serving.server import ServerSettings, serve

        given = {name: getattr(arguments, name) for name in ServerSettings.__slots__}
        serve(ServerSettings(**given), lambda url: print(json.dumps({"url": url}), flush=True), sys.stdin.buffer.read)
    elif arguments.command == "track":
        from dflash.training.trackers import track, until_stdin_ends

        track(arguments.tracked, arguments.to, until_stdin_ends() if arguments.follow else lambda _: True)
    elif arguments.command == "generate":
        from dflash.answers.generate import generate
        from dflash.interrupt import Interrupted

        try:
            generate(arguments.run, arguments.config)
        except Interrupted:
            return STOPPED
    elif arguments.command == "dequantise":
        from dflash.target.dequantise import dequantise

        print(json.dumps({"path": str(dequantise(arguments.file, arguments.home))}))
    else:
        from safetensors.torch import save_file

        from dflash.export.export import load_any
        from dflash.export.written_out import probe

        save_file(probe(load_any(arguments.directory)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
