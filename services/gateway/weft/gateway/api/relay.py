"""Streamed answers of one edge in one stream: a write of gRPC for each step, not for each answer.

    edge opens a relay -> newest: answers begin on it -> retired: they end on it -> ended
                                                    broken: its answers fail

An answer uses the newest relay of the edge that asks, where there is one, else its own call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import Context
from weft.common.tasks import run_together
from weft.contract.errors import PeerUnavailable
from weft.gateway.api.call import call_facts
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.validate import invalid
from weft.v1 import edge_pb2, edge_pb2_grpc

KEY = "weft-relay"
"""Metadata key: of a request EDGE/STREAM, of an answer the relay's number."""
_REQUEST = re.compile(r"([0-9a-f]{32})/([0-9]{1,18})")
_EDGE = re.compile(r"[0-9a-f]{32}")
_MAX_UNREAD_BYTES = 64 << 10
"""Bytes of a stream that the edge may have before its client takes some: as HTTP/2 has it."""
_MAX_MESSAGE_BYTES = 1 << 20
_HELLO_TIMEOUT_S = 5.0
RETIRE_S = 45.0
"""Age at which a relay takes no more answers. A connection that takes no more calls is cut when no
request can be left, and 60 s later; a relay's last answer must have ended by then.
"""


class EdgeRelay:
    """One stream to an edge, with what waits to be written to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_retired = False
        """Whether no more answers may begin on it."""
        self.is_broken = False
        self.streams: dict[int, RelayedStream] = {}
        self._keys: list[int] = []
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._full: list[edge_pb2.RelayResponse] = []
        self._wake = asyncio.Event()

    def push(self, key: int, data: bytes) -> None:
        """Sends data of a stream with the next message; empty: its end."""
        if not self._keys:
            self._wake.set()
        self._keys.append(key)
        self._data.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_MESSAGE_BYTES:
            self._full.append(self._take())

    def retire(self) -> None:
        """Lets it end with the last of its streams."""
        self.is_retired = True
        self._wake.set()

    def break_off(self) -> None:
        """Fails the streams that still use it."""
        self.is_broken = self.is_retired = True
        for stream in list(self.streams.values()):
            stream.wake()

    def _take(self) -> edge_pb2.RelayResponse:
        message = edge_pb2.RelayResponse(streams=self._keys, data=self._data)
        self._keys, self._data, self._num_bytes = [], [], 0
        return message

    async def write(self, context: Context) -> None:
        """Writes what comes until the relay is retired and has no more streams."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._full = self._full, []
            if self._keys:
                messages.append(self._take())
            for message in messages:
                await context.write(message)
            if self.is_retired and not self.streams and not self._keys:
                return

    async def read(self, requests: AsyncIterator[edge_pb2.RelayRequest]) -> None:
        """Takes what the edge tells of its clients, until it closes the relay."""
        async for request in requests:
            for key, count in zip(request.streams, request.bytes, strict=False):
                if (stream := self.streams.get(key)) is not None:
                    stream.passed_on(count)


class RelayedStream:
    """The events of one answer, on a relay. A context manager: leaving it ends them there."""

    __slots__ = ("_key", "_num_unread", "_relay", "_waiter", "headers")

    def __init__(self, relay: EdgeRelay, key: int) -> None:
        self._relay = relay
        self._key = key
        self._num_unread = 0
        self._waiter: asyncio.Future[None] | None = None

        self.headers = ((KEY, str(relay.number)),)
        """Metadata by which the edge knows that the events come on the relay."""

    def __enter__(self) -> Self:
        self._relay.streams[self._key] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._relay.streams[self._key]
        self._relay.push(self._key, b"")

    def send(self, data: bytes) -> bool:
        relay = self._relay
        if relay.is_broken:
            return False
        relay.push(self._key, data)
        self._num_unread += len(data)
        return self._num_unread <= _MAX_UNREAD_BYTES

    async def ready(self) -> None:
        """Waits until the client reads. Raises PeerUnavailable if the relay broke."""
        relay = self._relay
        while self._num_unread > _MAX_UNREAD_BYTES and not relay.is_broken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if relay.is_broken:
            raise PeerUnavailable("the connection to the edge was lost", stage="render")

    def passed_on(self, num_bytes: int) -> None:
        """The client has taken some bytes."""
        self._num_unread -= num_bytes
        self.wake()

    def wake(self) -> None:
        """Has a writer that waits look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PlainStream:
    """The events of one answer, on its own call."""

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, context: Context, content_type: str) -> None:
        self._context = context
        self._content_type = content_type
        self._unsent = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def send(self, data: bytes) -> bool:
        """Only `ready` sends them."""
        self._unsent += data
        return False

    async def ready(self) -> None:
        """Sends the events."""
        data, self._unsent = self._unsent, b""
        if data:
            await self._context.write(HttpBody(content_type=self._content_type, data=data))


class EdgeFace(edge_pb2_grpc.EdgeServiceServicer):
    """Serves relays, and gives answers their places on them; tells endpoint pickers whether a
    request would be admitted.
    """

    def __init__(
        self, ending: asyncio.Event, pipeline: RequestPipeline, retire_s: float = RETIRE_S
    ) -> None:
        """Once `ending` is set no request runs any more, and relays end behind their answers."""
        self._ending = ending
        self._pipeline = pipeline
        self._retire_s = retire_s
        self._newest: dict[str, EdgeRelay] = {}

    def stream_of(self, context: Context, content_type: str) -> RelayedStream | PlainStream:
        """Where the events of a call's answer go. It must be entered at once."""
        for key, value in context.invocation_metadata() or ():
            if key == KEY and isinstance(value, str) and (named := _REQUEST.fullmatch(value)):
                relay, number = self._newest.get(named[1]), int(named[2])
                if relay is not None and not relay.is_retired and number not in relay.streams:
                    return RelayedStream(relay, number)
        return PlainStream(context, content_type)

    async def Relay(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        if first is None or not _EDGE.fullmatch(first.edge):
            raise invalid("edge", "must be 32 hexadecimal digits, in the first message")
        edge, relay = first.edge, EdgeRelay(first.relay)
        before, self._newest[edge] = self._newest.get(edge), relay
        if before is not None:
            before.retire()
        timer = asyncio.get_running_loop().call_later(self._retire_s, relay.retire)
        ending = asyncio.create_task(self._retire_at_the_end(relay))
        try:
            await context.write(edge_pb2.RelayResponse())
            with suppress(ConnectionError, grpc.aio.BaseError):  # the edge has gone
                await run_together(relay.write(context), relay.read(requests))
        finally:
            timer.cancel()
            ending.cancel()
            relay.break_off()
            if self._newest.get(edge) is relay:
                del self._newest[edge]

    async def CheckAdmission(
        self, request: edge_pb2.CheckAdmissionRequest, context: Context
    ) -> edge_pb2.CheckAdmissionResponse:
        await self._pipeline.check_admission(request.model, call_facts(context, "pick"))
        return edge_pb2.CheckAdmissionResponse()

    async def _retire_at_the_end(self, relay: EdgeRelay) -> None:
        await self._ending.wait()
        relay.retire()
