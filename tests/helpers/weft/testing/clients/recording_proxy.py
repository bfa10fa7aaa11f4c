"""A proxy in front of a mesh that remembers what unmodified clients asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

_HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding", "accept-encoding"}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call and the start of its answer."""

    path: str
    body: dict[str, Any]
    status: int
    warnings: str
    """Header `x-weft-warnings`."""


@dataclass(slots=True)
class RecordingProxy:
    url: str = ""
    calls: list[Call] = field(default_factory=list)


@contextmanager
def recording_proxy(upstream: str) -> Iterator[RecordingProxy]:
    """Passes all calls on to `upstream` on a port of its own."""
    proxy = RecordingProxy()
    client = httpx.Client(base_url=upstream, trust_env=False, timeout=300)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            with client.stream(self.command, self.path, content=content, headers=kept) as answer:
                self._remember(content, answer)
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

        def _remember(self, content: bytes, answer: httpx.Response) -> None:
            body = json.loads(content) if content else {}
            warnings = answer.headers.get("x-weft-warnings", "")
            proxy.calls.append(Call(self.path, body, answer.status_code, warnings))

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()
