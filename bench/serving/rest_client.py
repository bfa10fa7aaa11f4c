"""Completions over REST: raw HTTP/1.1 and server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from serving.answers import Answer
from serving.load import LoadError, Raw

GET_TIMEOUT_S = 30.0


def get_json(url: str, path: str) -> Any:
    """Fetches JSON with a GET.

    Raises:
        LoadError: The status is not 200.
        OSError: Nobody answers.
    """
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url + path, timeout=GET_TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise LoadError(f"GET {path}: status {error.code}") from error
    except URLError as error:
        raise OSError(f"GET {url}{path}: {error.reason}") from error


class RestClient:
    """A client of a mesh's REST edge.

    Args:
        url: Base URL without /v1.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._model: str = get_json(url, "/v1/models")["data"][0]["id"]

    def encode(self, prompt: list[int], num_tokens: int, **more: object) -> bytes:
        """See `Client.encode`; `more` are further fields of the body."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "stream": True,
                "stream_options": {"include_usage": True},
                **more,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def exchange(self, body: bytes, raw: Raw, on_piece: Callable[[], None] | None) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.create_connection(
            lambda: _Collector(raw, ended, on_piece), self._host, self._port
        )
        try:
            raw.sent_s = time.perf_counter()
            transport.write(body)
            await ended
        finally:
            transport.close()

    def decode(self, raw: Raw, num_tokens: int) -> Answer:
        text: list[str] = []
        times_s: list[float] = []
        num_counted = 0
        time_s = raw.sent_s
        for message, time_s in messages(raw):
            if "error" in message:
                raise LoadError(f"{message['error']}")
            if usage := message.get("usage"):
                num_counted = usage["completion_tokens"]
            if piece := "".join(choice["text"] for choice in message.get("choices", [])):
                text.append(piece)
                times_s.append(time_s)
        if num_counted != num_tokens:
            raise LoadError(f"{num_counted} tokens came instead of {num_tokens}")
        # Tokens that make no text came at the latest with the end.
        return Answer(None, "".join(text), raw.sent_s, times_s or [time_s])


class _Collector(asyncio.Protocol):
    """Collects the pieces that arrive."""

    def __init__(
        self, raw: Raw, ended: asyncio.Future[None], on_piece: Callable[[], None] | None
    ) -> None:
        self._raw = raw
        self._ended = ended
        self._on_piece = on_piece

    def data_received(self, data: bytes) -> None:
        self._raw.times_s.append(time.perf_counter())
        self._raw.pieces.append(bytes(data))
        if self._on_piece is not None:
            self._on_piece()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            if exc is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(exc)


def messages(raw: Raw) -> Iterator[tuple[dict[str, Any], float]]:
    """The events of a stream with their times of arrival; the last must be `[DONE]`."""
    is_done = False
    pending = b""
    for data, time_s in _chunks(raw):
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            # Lines that begin with a colon are comments, which keep a silent stream open.
            lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
            payload = b"\n".join(line.removeprefix(b"data:").strip() for line in lines)
            if payload == b"[DONE]":
                is_done = True
            elif payload:
                yield json.loads(payload), time_s
    if not is_done:
        raise LoadError("the stream ended without [DONE]")


def _chunks(raw: Raw) -> Iterator[tuple[bytes, float]]:
    """(data, arrival of its last byte) of each chunk of the body."""
    whole = b"".join(raw.pieces)
    head, separator, body = whole.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if b" 200 " not in status + b" " or not separator:
        raise LoadError(f"{status.decode(errors='replace')}: {body[:500]!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        raise LoadError("the answer is not streamed")
    arrivals = zip(raw.pieces, raw.times_s, strict=True)
    num_arrived, time_s = 0, raw.sent_s
    offset = len(head) + len(separator)
    while True:
        line_end = whole.find(b"\r\n", offset)
        if line_end < 0:
            raise LoadError("the answer broke off")
        size = int(whole[offset:line_end].split(b";")[0], 16)
        if size == 0:
            return
        offset = line_end + 2 + size + 2
        while num_arrived < offset - 2:
            piece, time_s = next(arrivals, (b"", time_s))
            if not piece:
                raise LoadError("the answer broke off")
            num_arrived += len(piece)
        yield whole[line_end + 2 : offset - 2], time_s
