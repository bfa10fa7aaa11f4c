"""The entry point of fills: their streams, before and after the page size is known."""

from __future__ import annotations

from collections import OrderedDict

from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_streams import FillStreams
from weft.contract.fills import FillReply, FillStart, LeaseQuery
from weft.contract.handle import FillEvent
from weft.kvstore.fills import StoreFills
from weft.pages.fills.filler import MAX_REMEMBERED_LEASES


class FillFront:
    """Implements `FillPort` over the store's fills, once the page size is known."""

    def __init__(self, tracer: Tracer) -> None:
        self.streams = FillStreams(self, tracer)
        self._fills: StoreFills | None = None
        self._queried: OrderedDict[bytes, None] = OrderedDict()

    def open(self, fills: StoreFills) -> None:
        """Starts passing fills on, now that there are pages."""
        self._fills = fills
        for lease_id in self._queried:
            fills.filler.on_query(LeaseQuery(query=0, lease_id=lease_id))
        self._queried.clear()

    def lease_state(self, lease_id: bytes) -> str:
        """State of a lease; stops it. An unknown lease counts as used from now on."""
        if self._fills is not None:
            return self._fills.filler.on_query(LeaseQuery(query=0, lease_id=lease_id))
        self._queried[lease_id] = None
        if len(self._queried) > MAX_REMEMBERED_LEASES:
            self._queried.popitem(last=False)
        return "unknown"

    async def start(self, start: FillStart) -> None:
        if self._fills is not None:
            await self._fills.start(start)
            return
        event = FillEvent(kind="declined", reason="not_held", message="nothing is held yet")
        self.streams.deliver(FillReply(stream=start.stream, event=event))

    def renew(self, lease_id: bytes) -> None:
        if self._fills is not None:
            self._fills.filler.on_renew(lease_id)

    def stop(self, lease_id: bytes) -> None:
        if self._fills is not None:
            self._fills.filler.on_stop(lease_id)

    def ended(self, stream: int) -> None:
        if self._fills is not None:
            self._fills.filler.on_stream_broken(stream)

    def taken(self, stream: int, num_events: int) -> None:
        if self._fills is not None:
            self._fills.filler.on_taken(stream, num_events)
