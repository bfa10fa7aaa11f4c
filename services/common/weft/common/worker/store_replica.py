"""Calls to one replica of the KV store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc
from opentelemetry.trace import Span, SpanKind
from weft.common.telemetry.spans import (
    REQUEST_ID_KEY,
    Tracer,
    remote_parent,
    traceparent_of,
)
from weft.common.worker.fill_client import FillClient
from weft.contract.clock import Clock, monotonic
from weft.contract.codec.pairs import HELD, HOLD, LOOKUP, PUT
from weft.contract.errors import InvalidRequest
from weft.contract.handle import DATA_CHUNK_BYTES
from weft.contract.store import Offer, PutOrder, StoreHeld, StoreHold, StoreLookup, StorePut
from weft.v1 import kvstore_pb2, kvstore_pb2_grpc

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.08
PUT_TIMEOUT_S = 10.0
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
REST_S = 1.0
"""Seconds for which a replica that did not answer is not asked."""
MAX_LATE_RESTS = 3
"""A replica counts as away after this many rests in a row for late lookups. A lookup has little
time, and a store that is busy for a moment can still take pages.
"""


class StoredRange(NamedTuple):
    """A replica's answer to a lookup."""

    num_pages: int
    """Number of leading pages of the request that the replica holds."""
    store_id: str
    epoch: int


class Stored(NamedTuple):
    """A replica's answer to a put."""

    num_pages: int
    wants_data: bool


class StoreReplica:
    """A worker's client of one replica at `address`, host:port.

    Args:
        fills: Owns the channels.
        epoch: Epoch of this worker's incarnation.
        page_bytes: Bytes of a page of this worker's pool.
        tracer: Keeps spans of lookups.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        fills: FillClient,
        address: str,
        worker_id: str,
        epoch: int,
        page_bytes: int,
        tracer: Tracer,
        clock: Clock = monotonic,
    ) -> None:
        self.address = address
        self._fills = fills
        self._worker_id = worker_id
        self._epoch = epoch
        self._page_bytes = page_bytes
        self._tracer = tracer
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(fills.channel(address, "kvstore"))
        self._store_id = ""
        self._store_epoch = 0
        self._rests_until = 0.0
        self._num_late_rests = 0
        self._clock = clock

    @property
    def is_resting(self) -> bool:
        """Whether the replica failed to answer a moment ago. It gets no lookups then."""
        return self._clock() < self._rests_until

    @property
    def is_away(self) -> bool:
        """Whether the replica is not offered pages either: it is resting, and not just after a few
        late lookups.
        """
        return self.is_resting and self._num_late_rests >= MAX_LATE_RESTS

    async def look_up(self, lookup: StoreLookup, keys: Sequence[bytes]) -> StoredRange | None:
        """The leading keys that it holds; None: it does not answer."""
        trace = _LookupTrace(self._tracer, lookup, len(keys))
        request = LOOKUP.encode(lookup, keys=keys)
        held: StoredRange | None = None
        try:
            response = await self._stub.Lookup(
                request, timeout=LOOKUP_TIMEOUT_S, metadata=trace.metadata
            )
            if response.num_pages:
                await self._identify(response.epoch)
            held = StoredRange(min(response.num_pages, len(keys)), self._store_id, response.epoch)
            self._num_late_rests = 0
        except grpc.aio.AioRpcError as error:
            self._failed("look up a prompt", error, may_be_busy=True)
            trace.error = error.code().name
        trace.end(held.num_pages if held else 0)
        return held

    async def put(self, put: StorePut, indices: Sequence[int]) -> Stored | None:
        """Offers some of a put's pages; None: it does not answer."""
        header = self._header(put, indices)
        try:
            if put.source is not None:
                response = await self._stub.Put(header, timeout=PUT_TIMEOUT_S)
            else:
                parts = _parts(header, [put.data[index] for index in indices])
                answer = await self._stub.PutData(parts, timeout=PUT_TIMEOUT_S)
                response = answer.result
            self._num_late_rests = 0
            return Stored(response.stored_pages, response.send_data)
        except grpc.aio.AioRpcError as error:
            self._failed("take pages", error)
            return None

    async def hold(self, order: StoreHold) -> AsyncIterator[StoreHeld]:
        """Its answer, if it gives one; it keeps the pages still until the iteration ends."""
        try:
            async for found in self._stub.Hold(HOLD.encode(order)):
                yield HELD.decode(found, hold=order.hold)
        except grpc.aio.AioRpcError as error:
            self._failed("hold pages", error)
        except InvalidRequest as error:
            logger.warning("the KV store at %s: %s", self.address, error.message)

    def _failed(self, what: str, error: grpc.aio.AioRpcError, *, may_be_busy: bool = False) -> None:
        if error.code() not in AWAY:
            logger.info("the KV store at %s would not %s: %s", self.address, what, error.details())
            return
        if not self.is_resting:
            # Lookups that were late together count once.
            self._num_late_rests += 1
            logger.warning(
                "the KV store at %s did not %s: %s", self.address, what, error.code().name
            )
        if not may_be_busy or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            self._num_late_rests = MAX_LATE_RESTS
        self._rests_until = self._clock() + REST_S
        if self.is_away and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._fills.unanswered(self.address, "kvstore")

    async def _identify(self, epoch: int) -> None:
        """Learns the stable id of the incarnation that answered."""
        if epoch != self._store_epoch:
            info = await self._stub.GetStoreInfo(
                kvstore_pb2.GetStoreInfoRequest(), timeout=LOOKUP_TIMEOUT_S
            )
            self._store_id, self._store_epoch = info.store_id, info.epoch

    def _header(self, put: StorePut, indices: Sequence[int]) -> kvstore_pb2.PutRequest:
        order = PutOrder(
            source_id=self._worker_id,
            source_epoch=self._epoch,
            namespace=put.namespace,
            page_bytes=self._page_bytes,
            offers=[
                Offer(put.keys[index], put.digests[index], put.pages[index], put.parents[index])
                for index in indices
            ],
            source=put.source,
        )
        return PUT.encode(order)


class _LookupTrace:
    def __init__(self, tracer: Tracer, lookup: StoreLookup, num_keys: int) -> None:
        self._tracer = tracer
        self._span: Span | None = None
        self.error = ""
        self.metadata: tuple[tuple[str, str], ...] | None = None
        if tracer.is_on and lookup.traceparent:
            self._span = tracer.start(
                "lookup",
                remote_parent(lookup.traceparent),
                lookup.request_id,
                kind=SpanKind.CLIENT,
                attributes={"weft.pages_asked": num_keys},
            )
            self.metadata = (
                ("traceparent", traceparent_of(self._span)),
                (REQUEST_ID_KEY, lookup.request_id),
            )

    def end(self, num_pages: int) -> None:
        if self._span is not None:
            self._span.set_attribute("weft.pages", num_pages)
            self._tracer.end(self._span, self.error)


async def _parts(
    header: kvstore_pb2.PutRequest, pages: Sequence[bytes]
) -> AsyncIterator[kvstore_pb2.PutDataRequest]:
    yield kvstore_pb2.PutDataRequest(header=header)
    for index, content in enumerate(pages):
        for offset in range(0, len(content), DATA_CHUNK_BYTES):
            data = content[offset : offset + DATA_CHUNK_BYTES]
            yield kvstore_pb2.PutDataRequest(index=index, offset=offset, data=data)
