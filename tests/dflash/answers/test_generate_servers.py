"""Answers by the engine `openai`: a scripted server that fails in every way, and a real `transformers serve`."""

import importlib.util
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import answering
import pytest
from answering import lines_of, make_answers
from toy import A, E, U

from dflash.answers import servers
from dflash.answers.generate import generate
from dflash.answers.servers import ServersDown
from dflash.errors import ConfigMismatch

ROWS = 12


class Script:
    """What the server does. Its model says the first letters of the last user turn, backwards."""

    def __init__(self) -> None:
        self.fail: Callable[[int], Any] = lambda number: None  # number of the request → status, or "drop", or "garbage"
        self.gives_ids = True
        self.refuses_more = False  # fields that OpenAI's protocol does not have
        self.finish = "stop"
        self.opens_with: list[int] = []  # what its own template writes first
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.pause_s = 0.0


class Handler(BaseHTTPRequestHandler):
    script: Script

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with script.lock:
            number = len(script.seen)
            script.seen.append(body)
            script.keys.append(self.headers.get("Authorization"))
            script.under_way += 1
            script.most_under_way = max(script.most_under_way, script.under_way)
        time.sleep(script.pause_s)
        with script.lock:
            script.under_way -= 1
        what = script.fail(number)
        if what is None and script.refuses_more and {"return_token_ids", "stop_token_ids"} & body.keys():
            what = 422
        if what == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif what == "garbage":
            self._send(200, b"<html>not now</html>")
        elif what is not None:
            self._send(what, b'{"error": "as asked"}', {"Retry-After": "0.02"} if what == 429 else {})
        else:
            self._send(200, json.dumps(self._answer(body)).encode())

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        script = self.script
        prompt = body["prompt"] if "prompt" in body else [*script.opens_with, *rendered(body["messages"])]
        last = bytes(prompt[len(prompt) - 1 - prompt[::-1].index(U) + 1 : -2])
        said = last[:3][::-1]
        ids = [*said, E] if script.finish == "stop" else [*said]
        choice: dict[str, Any] = {"finish_reason": script.finish, "index": 0}
        more = {"token_ids": ids, "prompt_token_ids": prompt} if script.gives_ids and "return_token_ids" in body else {}
        if "prompt" in body:
            return {"choices": [choice | {"text": said.decode()} | more]}
        value = {"choices": [choice | {"message": {"role": "assistant", "content": said.decode()}}]}
        if more:
            value["choices"][0]["token_ids"] = more["token_ids"]
            value["prompt_token_ids"] = more["prompt_token_ids"]
        return value

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def rendered(messages: list[dict[str, str]]) -> list[int]:
    """The toy template, on the server's side."""
    ids = [i for m in messages for i in (A if m["role"] == "assistant" else U, *m["content"].encode(), E)]
    return [*ids, A]


@contextmanager
def server(script: Script) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answering.make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{chr(97 + i)}bc {i}"}) + "\n" for i in range(ROWS)))
    return file


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(servers, "LONGEST_REST_S", 0.05)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


@pytest.fixture
def ask(talker: Path, prompts: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(*urls: str, **given: Any) -> Path:
        source = given.pop("source", prompts)
        path = make_answers(
            tmp_path / given.pop("name", "answers"), talker, source, engine="openai", urls=list(urls), **given
        )
        generate(path)
        return path

    return make


def expected(row: int, *, end: bool = True) -> tuple[list[int], list[int]]:
    prompt = [U, *f"{chr(97 + row)}bc {row}".encode(), E, A]
    answer = [*f"cb{chr(97 + row)}".encode(), *([E] if end else [])]
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


def check(path: Path, ids_from: str, *, end: bool = True) -> None:
    lines = lines_of(path)
    assert [line["row"] for line in lines] == list(range(ROWS))
    for line in lines:
        assert (line["input_ids"], line["loss_mask"]) == expected(line["row"], end=end)
        assert line["ids_from"] == ids_from
        assert line["finished"] is end
    stored = [json.loads(line)["row"] for line in (path / "shard-00000.jsonl").read_text().splitlines()]
    assert sorted(stored) == list(range(ROWS))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_ids_are_the_servers_own(api: str, ask: Callable[..., Path]) -> None:
    script = Script()
    with server(script) as url:
        check(ask(url, api=api, temperature=0.7, top_p=0.9, top_k=5, seed=3), "server")
    body = script.seen[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) == (0.7, 0.9, 5, 12)
    assert len({body["seed"] for body in script.seen}) == ROWS, "equal prompts are to get answers of their own"
    assert set(script.keys) == {"Bearer secret"}


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_ids_are_tokenised_and_marked_where_the_server_gives_none(api: str, ask: Callable[..., Path]) -> None:
    refusing, silent = Script(), Script()
    refusing.refuses_more = True
    silent.gives_ids = False
    with server(refusing) as url:
        check(ask(url, api=api, name="refusing", concurrency=1), "tokenised")
    assert len(refusing.seen) == ROWS + 1, "the question that it refuses is asked once"
    with server(silent) as url:
        check(ask(url, api=api, name="silent"), "tokenised")


@pytest.mark.parametrize("gives_ids", [True, False])
def test_no_end_of_turn_is_invented_for_a_cut_answer(gives_ids: bool, ask: Callable[..., Path]) -> None:
    script = Script()
    script.finish, script.gives_ids = "length", gives_ids
    with server(script) as url:
        check(ask(url), "server" if gives_ids else "tokenised", end=False)


def test_the_prompt_is_the_one_that_the_server_saw(ask: Callable[..., Path]) -> None:
    script = Script()
    script.opens_with = [256]
    with server(script) as url:
        lines = lines_of(ask(url, api="chat"))
    assert [line["input_ids"] for line in lines] == [[256, *expected(row)[0]] for row in range(ROWS)]


def test_every_failure_is_tried_again(ask: Callable[..., Path]) -> None:
    script, chance = Script(), random.Random(0)
    ways = [503, 500, 429, 408, "drop", "garbage", None, None, None]
    script.fail = lambda number: ways[number] if number < len(ways) else chance.choice(ways)
    with server(script) as url:
        check(ask(url, retries=30, concurrency=3), "server")
    assert len(script.seen) > ROWS + 5


def test_several_servers_share_the_work_and_one_may_be_down(ask: Callable[..., Path]) -> None:
    first, second = Script(), Script()
    with server(first) as one, server(second) as two:
        check(ask(one, two, name="both", concurrency=2), "server")
    assert min(len(first.seen), len(second.seen)) >= ROWS // 3
    third = Script()
    with server(third) as url:
        check(ask("http://127.0.0.1:9/v1", url, name="one", retries=2), "server")  # nobody listens on port 9


def test_a_server_that_fails_rests(ask: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_REST_S", 60.0)
    monkeypatch.setattr(servers, "LONGEST_REST_S", 60.0)
    down, up = Script(), Script()
    down.fail = lambda number: 503
    with server(down) as one, server(up) as two:
        check(ask(one, two, concurrency=1), "server")
    assert (len(down.seen), len(up.seen)) == (1, ROWS)


def test_requests_under_way(ask: Callable[..., Path]) -> None:
    script = Script()
    script.pause_s = 0.03
    with server(script) as url:
        ask(url, concurrency=4)
    assert 2 <= script.most_under_way <= 4


def test_servers_that_stay_down_end_the_run_and_a_rerun_goes_on(ask: Callable[..., Path], tmp_path: Path) -> None:
    script = Script()
    script.fail = lambda number: None if number < 5 else 503
    with server(script) as url:
        with pytest.raises(ServersDown, match=r"was sent 3 times .* run the same again"):
            ask(url, retries=2, concurrency=1)
        assert (tmp_path / "answers/shard-00000.jsonl").read_text().count("\n") == 5
        asked = len(script.seen)
        script.fail = lambda number: None
        check(ask(url, retries=2, concurrency=1), "server")
        assert len(script.seen) == asked + ROWS - 5


def test_a_request_that_servers_never_take_is_a_mistake_and_stores_nothing(
    ask: Callable[..., Path], tmp_path: Path
) -> None:
    script = Script()
    script.fail = lambda number: 400
    with server(script) as url:
        with pytest.raises(ConfigMismatch, match=r"refuse the first 8 requests: server_refuses: 400 .*as asked"):
            ask(url, concurrency=1)
        assert (tmp_path / "answers/shard-00000.jsonl").read_text() == ""
        script.fail = lambda number: 404
        with pytest.raises(ConfigMismatch, match=r"generation\.urls: .*served_model"):
            ask(url)
    with pytest.raises(ConfigMismatch, match=r"generation\.urls is empty"):
        ask()


def test_one_row_that_the_server_refuses_is_counted(ask: Callable[..., Path]) -> None:
    script = Script()
    script.fail = lambda number: 400 if b"ebc" in bytes(i for i in script.seen[number]["prompt"] if i < 256) else None
    with server(script) as url:
        path = ask(url, concurrency=1)
    assert [line["row"] for line in lines_of(path)] == [0, 1, 2, 3, *range(5, ROWS)]
    assert json.loads((path / "answers.json").read_text())["refused"] == {
        'server_refuses: 400 {"error": "as asked"}': 1
    }


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_turn_by_turn_in_one_row(api: str, ask: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    turns = [{"role": role, "content": text} for role, text in (("user", "abc"), ("assistant", "?"), ("user", "def"))]
    source.write_text(json.dumps({"messages": turns}) + "\n")
    script = Script()
    with server(script) as url:
        (line,) = lines_of(ask(url, api=api, source=source))
    assert line["input_ids"] == [U, *b"abc", E, A, *b"cba", E, U, *b"def", E, A, *b"fed", E]
    assert line["loss_mask"] == [0] * 6 + [1] * 4 + [0] * 6 + [1] * 4
    assert [message["content"] for message in line["messages"]] == ["abc", "cba", "def", "fed"]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("openai", "fastapi", "uvicorn")),
    reason="transformers serve needs transformers[serving]",
)
def test_a_real_server_gives_the_same_text_as_our_own_engine(talker: Path, prompts: Path, tmp_path: Path) -> None:
    own = make_answers(tmp_path / "own", talker, prompts)
    generate(own)
    with transformers_serve(talker, tmp_path / "serve.log") as url:
        chat = make_answers(
            tmp_path / "chat", talker, prompts, engine="openai", urls=[url], api="chat", concurrency=2, timeout_s=60.0
        )
        generate(chat)
        # It takes text only as a prompt, and says so; ours are ids.
        with pytest.raises(ConfigMismatch, match=r"prompt must be a string.*generation\.api=chat"):
            generate(make_answers(tmp_path / "ids", talker, prompts, engine="openai", urls=[url]))
    pairs = list(zip(lines_of(own), lines_of(chat), strict=True))
    assert {line["ids_from"] for _, line in pairs} == {"tokenised"}
    for generated, served in pairs:
        assert served["messages"] == generated["messages"]
        # The server calls an answer cut that ended with its last token, and then says nothing of that token.
        is_edge = generated["finished"] and sum(generated["loss_mask"]) == 12
        assert served["finished"] is (generated["finished"] and not is_edge)
        assert served["input_ids"] == (generated["input_ids"][:-1] if is_edge else generated["input_ids"])
    assert Counter(served["finished"] for _, served in pairs).keys() == {True, False}


@contextmanager
def transformers_serve(model: Path, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model)]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    f"http://127.0.0.1:{port}/health", timeout=5
                )
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()
