"""The gRPC side of a filler: one stream per lease, controls in, events out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from weft.common.rpc.streams import first_message
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_data import data_to_wire
from weft.common.worker.fill_trace import FillTrace
from weft.contract import faults
from weft.contract.codec.pairs import FILL_START, event_to_proto
from weft.contract.errors import InvalidRequest, PeerUnavailable
from weft.contract.fills import FillReply, FillStart
from weft.contract.handle import LAST_EVENTS, FillEvent
from weft.v1 import kv_pb2


class FillPort(Protocol):
    """A filler: receives the owners' messages, and answers through `FillStreams.deliver`."""

    async def start(self, start: FillStart) -> None:
        """Called when a handle arrives on a new stream."""
        ...

    def renew(self, lease_id: bytes) -> None:
        """Called when the owner renews its lease."""
        ...

    def stop(self, lease_id: bytes) -> None:
        """Called when the owner wants no more."""
        ...

    def ended(self, stream: int) -> None:
        """Called when a stream broke, and when a data stream ended in any way, so that no peer
        reads it any more.
        """
        ...

    def taken(self, stream: int, num_events: int) -> None:
        """Called when gRPC has taken all `num_events` events given to a data stream so far."""
        ...


class FillStreams:
    """All open Fill streams of a service. `tracer` keeps the spans of the fills.

    Args:
        memory: Memory for outgoing data, uint8; None: events have their data.
    """

    def __init__(
        self, port: FillPort, tracer: Tracer, memory: NDArray[np.uint8] | None = None
    ) -> None:
        self._port = port
        self._memory = memory
        self._tracer = tracer
        self._streams: dict[int, asyncio.Queue[FillEvent]] = {}
        self._ids = itertools.count(1)

    async def serve(self, requests: AsyncIterator[kv_pb2.FillControl]) -> AsyncIterator[Any]:
        """Serves one Fill call, from `start` to its last event: `FillEvent` messages. Those with
        data from the memory for outgoing ones are serialised already.

        Raises:
            InvalidRequest: The stream does not begin with a `start`, or that is malformed.
            PeerUnavailable: The filler is gone.
            DeadlineExceeded: The `start` does not come in time.
        """
        first = await first_message(requests)
        if first is None or first.WhichOneof("control") != "start":
            raise InvalidRequest("the first message of a Fill is `start`", param="control")
        stream = next(self._ids)
        start = FILL_START.decode(first.start, stream=stream)
        trace = FillTrace(self._tracer, start)
        events: asyncio.Queue[FillEvent] = asyncio.Queue()
        self._streams[stream] = events
        controls: asyncio.Task[None] | None = None
        is_over = False
        is_data, num_taken = False, 0
        try:
            await self._port.start(start)
            controls = asyncio.create_task(self._controls(stream, start.handle.lease_id, requests))
            while not is_over:
                event = await events.get()
                trace.on_event(event)
                is_over = event.kind in LAST_EVENTS
                if event.kind == "accepted":
                    # The filler decides the transport: it may be unable to write to the owner's
                    # memory.
                    is_data = event.transport == "data"
                if event.kind == "broken":
                    raise PeerUnavailable(event.message, stage="fill")
                sent: Sequence[FillEvent] = (event,)
                if faults.FILL_EVENT_OUT.is_armed:
                    sent = await faults.FILL_EVENT_OUT.repeat_async(event)
                for each in sent:
                    if each.num_held and self._memory is not None:
                        yield data_to_wire(each, self._memory)
                    else:
                        yield event_to_proto(each)
                num_taken += 1
                if is_data and events.empty():
                    self._port.taken(stream, num_taken)
        finally:
            if controls is not None:
                controls.cancel()
            del self._streams[stream]
            trace.end()
            if is_data or not is_over:
                self._port.ended(stream)

    def deliver(self, reply: FillReply) -> None:
        """Sends an event on its stream; a stream that is gone has been reported as broken."""
        events = self._streams.get(reply.stream)
        if events is not None:
            events.put_nowait(reply.event)

    def break_all(self, why: str) -> None:
        """Breaks every stream, since the outcomes of their writes cannot be reported any more."""
        for events in self._streams.values():
            events.put_nowait(FillEvent(kind="broken", message=why))

    @property
    def num_open(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    async def _controls(
        self, stream: int, lease_id: bytes, requests: AsyncIterator[kv_pb2.FillControl]
    ) -> None:
        """If the owner's side ends, the lease is broken."""
        async for control in requests:
            kind = control.WhichOneof("control")
            if kind == "renew":
                self._port.renew(lease_id)
            elif kind == "stop":
                self._port.stop(lease_id)
        self._port.ended(stream)
        # From now on no event of the filler is delivered.
        if (events := self._streams.get(stream)) is not None:
            events.put_nowait(FillEvent(kind="broken", message="the owner ended its side"))
