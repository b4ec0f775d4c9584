"""Prompts → the target's own answers, their ids beside the text. Killed at any moment, a rerun goes on from there.

    python -m dflash generate $DFLASH_HOME/answers/NAME        config.json in it: rows, target, generation

    questions ─▶ dialogues, rendered ─▶ worker threads: one a device, or one a request under way ─▶ answers on disk

One lock hands out the next batch; finished rows come back through one queue, and this process alone writes them.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.json_file import write_json
from dflash.answers.answer_files import AnswerFiles, read_config, settings_of
from dflash.answers.dialogue import Dialogue, Prompter, Reply, Request
from dflash.answers.engines import Transformers, by_length, devices
from dflash.answers.parameters import AnswersConfig
from dflash.answers.questions import chosen, rows_wanted
from dflash.answers.servers import REFUSED, Servers
from dflash.errors import ConfigMismatch
from dflash.interrupt import Interrupted
from dflash.run_directory import CONFIG, ProgressFile, RunDirectory
from dflash.target.frozen import text_config
from dflash.target.tokenizer import tokenizer_directory
from dflash.training.checkpoint import run_lock

log = logging.getLogger(__name__)

Worker = Callable[[list[Request]], Sequence[Reply | str]]

LAST_WORDS_S = {"transformers": 10.0, "openai": 0.5}  # a batch ends at its next token; a request may take minutes
HOPELESS = 8  # rows that servers refuse before any answer, after which it is the request that is wrong


def generate(path: Path, config_name: str = CONFIG) -> None:
    """Answer what is left and write answers.jsonl and answers.json.

    Raises Interrupted after SIGTERM or SIGINT, RunLocked, ConfigMismatch, ServersDown or a CacheError.
    """
    with run_lock(path):
        config = read_config(path / config_name)
        directory, may_run = tokenizer_directory(config.target), config.target.trust_remote_code
        prompter = Prompter(directory, config.rows, trust_remote_code=may_run)
        longest = int(text_config(config.target).max_position_embeddings)
        answers = AnswerFiles(path, settings_of(config, prompter.templates.source, path))
        RunDirectory(path, config_name).accept_config()
        try:
            wanted = rows_wanted(config.rows, config.generation)
            left = wanted - answers.rows
            log.info("%d rows to answer, %d of them done", len(wanted), len(wanted) - len(left))
            if left:
                dialogues = (Dialogue(one, prompter, longest) for one in chosen(config.rows, left))
                seconds = _answer_all(config, prompter, longest, dialogues, answers, path, len(wanted), len(left))
            else:
                seconds = 0.0
            counts = answers.finish(sorted(wanted), config.rows.max_dropped)
        finally:
            answers.close()
        result = {"path": str(path / "answers.jsonl"), **counts.to_json(), "seconds": seconds}
        write_json(path / "answers.json", result)
        log.info("%d answers to %d rows, %d cut by the limit", counts.answers, counts.rows, counts.cut)


@dataclass(frozen=True, slots=True)
class _Done:
    """A conversation that came to its end."""

    row: int
    lines: list[dict[str, Any]]
    refused: str | None


class _Ended:
    """A worker found nothing left."""


class _Signalled:
    """SIGTERM or SIGINT."""


Event = list[_Done] | _Ended | _Signalled | BaseException


class _Shared:
    """Hands the next batch to whoever asks."""

    def __init__(self, batches: Iterator[list[Dialogue]]) -> None:
        self._batches = batches
        self._lock = threading.Lock()

    def next(self) -> list[Dialogue] | None:
        with self._lock:
            return next(self._batches, None)


def _answer_all(
    config: AnswersConfig,
    prompter: Prompter,
    longest: int,
    dialogues: Iterator[Dialogue],
    answers: AnswerFiles,
    path: Path,
    total: int,
    left: int,
) -> float:
    """Run the workers until nothing is left; seconds it took."""
    stopping = threading.Event()
    workers, batches = _workers(config, prompter, longest, dialogues, stopping)
    shared, events = _Shared(batches), queue.SimpleQueue[Event]()
    start = time.monotonic()
    progress = ProgressFile(RunDirectory(path), "generate", total, "rows", done=total - left)
    threads = [threading.Thread(target=_work, args=(one, shared, events, stopping), daemon=True) for one in workers]
    with _stop_signals(events):
        try:
            for thread in threads:
                thread.start()
            _collect(len(threads), events, answers, progress, total - left)
        finally:
            stopping.set()
            deadline = time.monotonic() + LAST_WORDS_S[config.generation.engine]
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
    return time.monotonic() - start


def _collect(
    running: int, events: "queue.SimpleQueue[Event]", answers: AnswerFiles, progress: ProgressFile, done: int
) -> None:
    """Store finished rows until all workers have ended."""
    held: list[_Done] = []  # refused by servers before any answer: perhaps it is the request that is wrong, no row
    is_answered = False
    tokens, start = 0, time.monotonic()
    while running:
        event = events.get()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, _Signalled):
            raise Interrupted
        if isinstance(event, _Ended):
            running -= 1
            continue
        is_answered = is_answered or any(one.lines for one in event)
        held += event if is_answered else [one for one in event if _is_refused_by_server(one)]
        if not is_answered and len(held) >= HOPELESS:
            break
        ready, held = (held, []) if is_answered else ([one for one in event if not _is_refused_by_server(one)], held)
        for one in ready:
            answers.append(one.row, one.lines, one.refused)
            tokens += sum(sum(line["loss_mask"]) for line in one.lines)
        done += len(ready)
        progress.update(done, f"{tokens / max(1e-9, time.monotonic() - start):,.0f} tokens/s")
    if held:
        raise ConfigMismatch(
            f"the servers refuse the first {len(held)} requests: {held[-1].refused}. Correct generation (some servers "
            "need generation.api=chat, some know no top_k), or the servers' settings. None of these rows was stored."
        )


def _is_refused_by_server(done: _Done) -> bool:
    return done.refused is not None and done.refused.startswith(REFUSED)


def _work(worker: Worker, shared: _Shared, events: "queue.SimpleQueue[Event]", stopping: threading.Event) -> None:
    """A thread: batches of conversations, each turn by turn to its end."""
    try:
        while not stopping.is_set() and (batch := shared.next()) is not None:
            while not stopping.is_set() and batch:
                ended = [dialogue for dialogue in batch if dialogue.request is None]
                if ended:
                    events.put([_Done(one.question.row, one.lines(), one.refused) for one in ended])
                batch = [dialogue for dialogue in batch if dialogue.request]
                requests = [dialogue.request for dialogue in batch if dialogue.request]
                for dialogue, reply in zip(batch, worker(requests) if requests else [], strict=True):
                    if stopping.is_set():
                        break  # the engine was told to hurry, so this is no answer
                    if isinstance(reply, str):
                        dialogue.refuse(reply)
                    else:
                        dialogue.take(reply)
        events.put(_Ended())
    except BaseException as error:
        events.put(error)


def _workers(
    config: AnswersConfig, prompter: Prompter, longest: int, dialogues: Iterator[Dialogue], stopping: threading.Event
) -> tuple[list[Worker], Iterator[list[Dialogue]]]:
    given = config.generation
    if given.engine == "openai":
        model = given.served_model or config.target.model
        servers = Servers(given, model, prompter, config.rows.template_arguments, longest, stopping)
        return [servers] * given.concurrency, ([dialogue] for dialogue in dialogues)
    # One after the other: transformers sets defaults of the whole process while it loads.
    found = [
        Transformers(config.target, given, prompter.stop_ids, prompter.known, replica, longest, stopping)
        for replica in devices(config.target)
    ]
    return list(found), by_length(dialogues, given, longest)


@contextmanager
def _stop_signals(events: "queue.SimpleQueue[Event]") -> Iterator[None]:
    """SIGTERM and SIGINT become an event; `SimpleQueue.put` may be called in the middle of another one."""

    def note(*_: Any) -> None:
        events.put(_Signalled())

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
