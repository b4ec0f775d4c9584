"""Engine `openai`: requests to servers that speak OpenAI's protocol, taken in turn, tried again, ids kept.

A server that fails rests for a while that doubles, and the next one is asked. With api=completions the prompt is sent
as ids, so the server tokenises nothing; with api=chat it renders the messages itself. Both ask for the ids of what was
generated; a server that refuses such a question is asked without it, and its text is tokenised here.
"""

import http.client
import json
import logging
import os
import random
import threading
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from dflash.answers.dialogue import Prompter, Reply, Request
from dflash.answers.parameters import GenerationConfig
from dflash.errors import ConfigMismatch, DflashError

log = logging.getLogger(__name__)

LONGEST_REST_S = 60.0
FIRST_REST_S = 0.5
REFUSED = "server_refuses"
MISTAKES = {401: "the key", 403: "the key", 404: "the URL or the model's name", 405: "the URL"}


class ServersDown(DflashError):
    """No server answered a request, however often it was sent."""


class Unanswerable(Exception):
    """A server refuses this one request; others may do."""


@dataclass(slots=True)
class _Server:
    url: str
    failures: int = 0  # in a row
    rests_until: float = 0.0
    takes_more: bool | None = None  # whether it takes the question for ids; None: not known yet


class Servers:
    """A worker for any number of threads: answers one request at a time in each."""

    def __init__(
        self,
        generation: GenerationConfig,
        model: str,
        prompter: Prompter,
        arguments: dict[str, Any],
        longest: int,
        stop: threading.Event,
    ) -> None:
        self._longest = longest
        if not generation.urls:
            raise ConfigMismatch("generation.urls is empty; the engine openai needs servers, as [http://gpu1:8000/v1].")
        self._generation, self._model, self._prompter, self._arguments = generation, model, prompter, arguments
        self._servers = [_Server(url.rstrip("/")) for url in generation.urls]
        self._next = 0
        self._lock = threading.Lock()
        self._stop = stop

    def __call__(self, requests: list[Request]) -> list[Reply | str]:
        """A reply, or the reason why there is none, a request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Reply | str:
        for _ in range(self._generation.retries + 1):
            server = self._choose()
            try:
                value = self._ask(server, request)
            except Unanswerable as refused:
                return f"{REFUSED}: {refused}"
            except _Failed as failed:
                self._rest(server, failed)
                continue
            server.failures = 0
            return self._reply(value, request)
        raise ServersDown(
            f"row {request.row} was sent {self._generation.retries + 1} times to {', '.join(self._generation.urls)} "
            "and got no answer; the log says what came back. Start the servers and run the same again: what is "
            "answered is kept. generation.retries says how often a request is sent again."
        )

    def _choose(self) -> _Server:
        """The next one that does not rest; where all do, the one that rests the shortest, after that."""
        with self._lock:
            now = time.monotonic()
            count = len(self._servers)
            order = [self._servers[(self._next + i) % count] for i in range(count)]
            server = next((one for one in order if one.rests_until <= now), None)
            if server is None:
                server = min(order, key=lambda one: one.rests_until)
            self._next = (self._servers.index(server) + 1) % count
            wait = server.rests_until - now
        if wait > 0:
            # Not all at the same moment: a server that comes back would fall again.
            self._stop.wait(wait * (1 + random.random() / 4))
        return server

    def _rest(self, server: _Server, failed: "_Failed") -> None:
        with self._lock:
            if server.rests_until <= time.monotonic():  # requests that failed together count once
                server.failures += 1
                pause = failed.retry_after_s or min(LONGEST_REST_S, FIRST_REST_S * 2 ** (server.failures - 1))
                server.rests_until = time.monotonic() + pause
                log.warning("%s: %s; it rests for %.1f s", server.url, failed, pause)

    def _ask(self, server: _Server, request: Request) -> dict[str, Any]:
        body, extra = self._body(request)
        if server.takes_more is False:
            return self._post(server, body)
        try:
            value = self._post(server, body | extra)
        except Unanswerable:
            if server.takes_more:
                raise
            value = self._post(server, body)  # was it the question for ids?
            log.info("%s does not take %s; the text of its answers is tokenised here", server.url, ", ".join(extra))
            server.takes_more = False
            return value
        server.takes_more = True
        return value

    def _body(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """What any server takes (and must take: a setting that it ignores would be recorded as used), and the rest."""
        given = self._generation
        body: dict[str, Any] = {"model": self._model}
        body["max_tokens"] = min(given.max_new_tokens, self._longest - len(request.ids))
        body |= {"temperature": given.temperature, "top_p": given.top_p}
        body["seed"] = (given.seed + 1_000_003 * request.row + request.answer) % 2**31
        if given.top_k:
            body["top_k"] = given.top_k
        extra: dict[str, Any] = {"return_token_ids": True}
        if given.api == "completions":
            extra["stop_token_ids"] = list(self._prompter.stop_ids)
            return body | {"prompt": request.ids}, extra
        body["messages"] = request.messages
        if request.tools:
            body["tools"] = request.tools
        if self._arguments:
            body["chat_template_kwargs"] = self._arguments
        return body, extra

    def _post(self, server: _Server, body: dict[str, Any]) -> dict[str, Any]:
        path = "/completions" if self._generation.api == "completions" else "/chat/completions"
        status, headers, text = post(server.url + path, body, self._generation.timeout_s)
        if status == 200:
            try:
                value: dict[str, Any] = json.loads(text)
                value["choices"][0]["finish_reason"]
            except (ValueError, LookupError, TypeError):
                raise _Failed(f"an answer that is none: {text[:200]!r}") from None
            return value
        said = f"{status} {text[:200].decode(errors='replace')}"
        if status in MISTAKES:
            raise ConfigMismatch(
                f"generation.urls: {server.url}{path} says {said}. Correct {MISTAKES[status]}; the model asked for is "
                f"{self._model} (generation.served_model), the key $OPENAI_API_KEY."
            )
        if status == 429 or status >= 500 or status == 408:
            raise _Failed(said, _seconds(headers.get("Retry-After")))
        raise Unanswerable(said)

    def _reply(self, value: dict[str, Any], request: Request) -> Reply | str:
        choice = value["choices"][0]
        finish = choice["finish_reason"]
        message = choice.get("message") or {}
        if finish not in ("stop", "length", "tool_calls"):
            return f"finish_reason: {finish}"
        ids = choice.get("token_ids")
        prompt = choice.get("prompt_token_ids") or value.get("prompt_token_ids")
        origin = "server"
        if ids is None:
            if message.get("tool_calls") or message.get("reasoning_content") or message.get("reasoning"):
                return "answer_in_parts: without ids"  # its text as generated is not known
            origin, prompt = "tokenised", None
            text = message.get("content") if "message" in choice else choice.get("text")
            ids = self._prompter.answer_ids(text or "")
        is_cut = finish == "length"
        if not is_cut and ids[-1:] != [self._prompter.end_of_turn] and not set(ids[-1:]) & set(self._prompter.stop_ids):
            ids = [*ids, self._prompter.end_of_turn]  # some servers leave out what ended the answer
        if not ids:
            return "empty_answer"
        return Reply(list(ids), "length" if is_cut else "stop", "server" if origin == "server" else "tokenised", prompt)


class _Failed(Exception):
    """Another try may do better."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


def post(url: str, body: dict[str, Any], timeout_s: float) -> tuple[int, Any, bytes]:
    """Status, headers and content of the answer. Raises `_Failed` where there is none."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", parts.path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _seconds(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks for: it holds a number or a date."""
    if not retry_after:
        return None
    try:
        return min(LONGEST_REST_S, max(0.0, float(retry_after)))
    except ValueError:
        pass
    try:
        return min(LONGEST_REST_S, max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time()))
    except ValueError:
        return None
