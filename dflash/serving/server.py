"""llama.cpp's server, which speaks OpenAI's protocol over HTTP, with our drafter beside the target.

Its library runs in the process that calls `serve`; `running` starts such a process and ends it. Its threads spin while
they wait: more of them than free cores make it many times slower.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dflash.errors import ConfigMismatch, DflashError

STOP_TIMEOUT_S = 5  # a server with an open request waits for it, and a request may have no end


class ServerFailed(DflashError):
    """The server ended, or never began to listen."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is served and with what."""

    target: Path
    drafter: Path | None  # None: the target alone
    drafts: int  # most drafts of a round: K − 1
    context: int  # positions of a prompt with its answer, a multiple of 256
    parallel: int = 1  # prompts at once
    threads: int = 1
    port: int = 0  # 0: any free one

    def arguments(self) -> list[str]:
        """For `python -m dflash serve`."""
        given = {name: getattr(self, name) for name in self.__slots__}
        return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def is_installed() -> bool:
    """Whether the extra `serve` is here: the server and the client that asks it."""
    return all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "openai"))


def settings_of(exported: dict[str, Any]) -> ServerSettings:
    """The server of a run, from its export.json. Raises ConfigMismatch where that has no file for it."""
    gguf = exported["layouts"].get("gguf")
    if gguf is None:
        raise ConfigMismatch("export.layouts has no gguf, which llama.cpp reads. Add it and export the run again.")
    return ServerSettings(
        Path(gguf["target"]), Path(gguf["drafter"]), gguf["drafts"], context=min(4096, gguf["positions"])
    )


def program() -> str:
    """The server's name and version."""
    return f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"


def serve(settings: ServerSettings, on_ready: Callable[[str], None], wait: Callable[[], object]) -> None:
    """Serve in this process until `wait` returns, or SIGINT or SIGTERM comes. `on_ready` gets the address.

    Raises ConfigMismatch for a file that is missing, ServerFailed for one that llama.cpp does not load.
    """
    import xllamacpp  # an optional extra

    for file in (settings.target, settings.drafter):
        if file is not None and not file.is_file():
            raise ConfigMismatch(f"there is no file {file}. Export the run again with gguf in export.layouts.")
    params = xllamacpp.CommonParams()
    params.model.path = str(settings.target)
    params.n_ctx, params.n_parallel = settings.context * settings.parallel, settings.parallel
    params.kv_unified = False  # every prompt has its own share of the context
    params.port, params.warmup, params.verbosity = settings.port, False, 3
    threads = [params.cpuparams, params.cpuparams_batch]
    if settings.drafter is not None:
        speculative = params.speculative
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft = speculative.draft
        draft.mparams.path = str(settings.drafter)
        draft.n_max, draft.n_min, draft.p_min = settings.drafts, 0, 0.0
        threads += [draft.cpuparams, draft.cpuparams_batch]
    for one in threads:
        one.n_threads = settings.threads
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise ServerFailed(f"llama.cpp does not serve {settings.target} with {settings.drafter}: {error}") from error
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        on_ready(server.listening_address)
        with contextlib.suppress(KeyboardInterrupt):
            wait()
    finally:
        signal.alarm(STOP_TIMEOUT_S)  # ends this process, whatever the server waits for
        del server  # waits for its threads, and they for open requests
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in another process."""

    url: str
    wait: Callable[[], int]  # until it ends by itself; its exit code


@contextlib.contextmanager
def running(settings: ServerSettings, log: Path) -> Iterator[RunningServer]:
    """A server in a process of its own, which ends with the block, and with this process however that ends.

    What it says goes to `log`. Raises ServerFailed where it does not begin to listen.
    """
    command = [sys.executable, "-m", "dflash", "serve", *settings.arguments()]
    with log.open("ab") as output:
        # It reads its input and ends where that does.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        said = next((line for line in child.stdout if line.startswith(b'{"url"')), None)
        if said is None:
            tail = log.read_bytes()[-1500:].decode(errors="replace")
            raise ServerFailed(f"the server ended with exit code {child.wait()}. The end of {log}:\n{tail}")
        yield RunningServer(json.loads(said)["url"], child.wait)
    finally:
        child.stdin.close()
        try:
            child.wait(2 * STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
