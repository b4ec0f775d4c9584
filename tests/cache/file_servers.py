"""Small servers of files: the web's with etags and ranges, and as much of the hub as a data set's download asks for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse


@dataclass
class Web:
    """`files` by path; a path in `cut` breaks off after so many bytes, once."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    commit: str = "0" * 40
    has_etags: bool = True
    address: str = ""

    def api(self, path: str) -> Any:
        """What the hub's API says, None for other paths."""
        if not path.startswith("/api/datasets/own/rows/"):
            return None
        if "/tree/" in path:
            return [
                {"type": "file", "path": name.lstrip("/"), "size": len(data), "oid": sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
        return {"id": "own/rows", "sha": self.commit, "siblings": []}


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlparse(self.path).path)
            asked = self.headers.get("Range")
            web.asked.append((self.command, path, asked))
            told = web.api(path)
            file = path.removeprefix(f"/datasets/own/rows/resolve/{web.commit}")
            data = json.dumps(told).encode() if told is not None else web.files.get(file)
            if data is None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            etag = sha1(data).hexdigest()
            start, stop = 0, len(data)
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last or stop) + 1, stop)
            body = data[start:stop]
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("X-Repo-Commit", web.commit)
            if told is not None:
                self.send_header("Content-Type", "application/json")
            if web.has_etags:
                self.send_header("ETag", f'"{etag}"')
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.end_headers()
            if with_body:
                limit = web.cut.get(file)
                if limit is not None and start + len(body) > limit:
                    del web.cut[file]
                    self.wfile.write(body[: max(0, limit - start)])
                    self.close_connection = True
                    return
                self.wfile.write(body)

    return Handler


@contextmanager
def served() -> Iterator[Web]:
    web = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(web))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    web.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
