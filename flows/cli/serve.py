"""`dflash-train serve NAME`: llama.cpp's server with the exported drafter of a run, until Ctrl-C.

dflash-train serve demo
dflash-train serve demo --port 8080 --threads 4     # threads spin: not more than there are free cores
"""

import argparse
import contextlib
import json
import signal
from dataclasses import replace
from types import FrameType

from cache.json_file import read_json
from dflash.serving.server import ServerFailed, is_installed, running, settings_of
from flows.errors import BadParameter
from flows.runs.directory import in_use
from flows.runs.parameters import run_directory
from flows.show.progress import console


def main(arguments: list[str], program: str = "dflash-train") -> int:
    parser = argparse.ArgumentParser(prog=f"{program} serve", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="name of the run; it was exported with gguf in export.layouts")
    parser.add_argument("--port", type=int, default=8080, help="port on this machine; 0: any; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="threads of the server; default: %(default)s")
    parser.add_argument("--home", default=None, help="directory of all data; default: $DFLASH_HOME, or var/ here")
    options = parser.parse_args(arguments)
    if not is_installed():
        raise BadParameter("serve: xllamacpp is not installed; pip install 'dflash-train[serve]' brings the server.")
    run = run_directory(options.name, options.home)
    exported = read_json(run / "export.json")
    if exported is None:
        raise BadParameter(f"serve {options.name}: {run} holds no export. Train and export that run first.")
    settings = replace(settings_of(exported), port=options.port, threads=options.threads)
    log = run / "logs" / "serve.log"
    log.parent.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    with in_use(run), contextlib.suppress(KeyboardInterrupt), running(settings, log) as server:
        _say(server.url, options.name)
        code = server.wait()
        raise ServerFailed(f"the server ended by itself with exit code {code}. {log} says what it did last.")
    console.print("Stopped.")
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(url: str, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64}
    for line in (
        f"{name} is served by llama.cpp with its drafter. A page to type in: {url}",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        "Ctrl-C stops it.",
    ):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
