"""KvStoreService: the store over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from opentelemetry.trace import SpanKind
from weft.common.rpc.errors import Context
from weft.common.rpc.streams import first_message
from weft.common.telemetry.spans import REQUEST_ID_KEY, remote_parent
from weft.common.telemetry.tracing import MAX_ID_BYTES
from weft.contract.clock import monotonic
from weft.contract.codec.pairs import HELD, HOLD, LEASE_STATES, LOOKUP, PUT, TIER
from weft.contract.codec.walk import duration
from weft.contract.errors import InvalidRequest
from weft.contract.handle import LEASE_ID_BYTES
from weft.contract.keys import PieceShape
from weft.contract.store import KEY_BYTES
from weft.contract.version import version
from weft.kvstore.holds import HOLD_S
from weft.kvstore.puts import PutOutcome
from weft.kvstore.store import KvStore
from weft.pages.transfer.nixl_binding import nixl_version
from weft.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc


class KvStoreService(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Implements weft.v1.KvStoreService. `admin_port` returns the operators' port; 0: there is
    none.
    """

    name = "weft.v1.KvStoreService"

    def __init__(self, store: KvStore, admin_port: Callable[[], int] = lambda: 0) -> None:
        self._store = store
        self._admin_port = admin_port
        self._versions = _versions()

    async def Lookup(
        self, request: kvstore_pb2.LookupRequest, context: Context
    ) -> kvstore_pb2.LookupResponse:
        start_s = monotonic()
        lookup = LOOKUP.decode(request, lookup=0)
        shape = PieceShape(lookup.block_pages, lookup.window_pages, lookup.state_pages)
        num_pages = await self._store.look_up(lookup.keys, shape)
        self._trace_lookup(context, start_s, len(lookup.keys), num_pages)
        return kvstore_pb2.LookupResponse(num_pages=num_pages, epoch=self._store.epoch)

    def _trace_lookup(
        self, context: Context, start_s: float, num_keys: int, num_pages: int
    ) -> None:
        metadata = dict(context.invocation_metadata() or ())
        traceparent = metadata.get("traceparent")
        tracer = self._store.tracer
        if not tracer.is_on or not isinstance(traceparent, str):
            return
        request_id = str(metadata.get(REQUEST_ID_KEY, ""))[:MAX_ID_BYTES]
        span = tracer.start(
            "lookup",
            remote_parent(traceparent),
            request_id,
            kind=SpanKind.SERVER,
            start_s=start_s,
            attributes={"weft.pages_asked": num_keys, "weft.pages": num_pages},
        )
        tracer.end(span)

    def Fill(
        self, request_iterator: AsyncIterator[kv_pb2.FillControl], context: Context
    ) -> AsyncIterator[kv_pb2.FillEvent]:
        return self._store.front.streams.serve(request_iterator)

    async def FillStatus(
        self, request: kv_pb2.FillStatusRequest, context: Context
    ) -> kv_pb2.FillStatusResponse:
        if len(request.lease_id) != LEASE_ID_BYTES:
            raise InvalidRequest(f"lease_id has {len(request.lease_id)} bytes", param="lease_id")
        state = self._store.front.lease_state(request.lease_id)
        return kv_pb2.FillStatusResponse(
            state=LEASE_STATES.numbers[state], filler_epoch=self._store.epoch
        )

    async def Put(
        self, request: kvstore_pb2.PutRequest, context: Context
    ) -> kvstore_pb2.PutResponse:
        return _put_response(await self._store.put(PUT.decode(request)))

    async def PutData(
        self, request_iterator: AsyncIterator[kvstore_pb2.PutDataRequest], context: Context
    ) -> kvstore_pb2.PutDataResponse:
        first = await first_message(request_iterator)
        if first is None or not first.HasField("header") or first.data:
            raise InvalidRequest("the first message is the header alone", param="header")
        outcome = await self._store.put_data(PUT.decode(first.header), request_iterator)
        return kvstore_pb2.PutDataResponse(result=_put_response(outcome))

    async def Hold(
        self, request: kvstore_pb2.HoldRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.HoldResponse]:
        order = HOLD.decode(request, hold=0, address="")
        async with self._store.hold(order.keys) as held:
            yield HELD.encode(held)
            if held.pages:
                # A caller that has read the pages, or is gone, ends the call.
                await asyncio.sleep(HOLD_S)

    async def ReportCorrupt(
        self, request: kvstore_pb2.ReportCorruptRequest, context: Context
    ) -> kvstore_pb2.ReportCorruptResponse:
        if len(request.key) != KEY_BYTES:
            raise InvalidRequest(f"key has {len(request.key)} bytes, not {KEY_BYTES}", param="key")
        dropped = await self._store.report_corrupt(request.key)
        return kvstore_pb2.ReportCorruptResponse(dropped=dropped)

    async def GetStoreInfo(
        self, request: kvstore_pb2.GetStoreInfoRequest, context: Context
    ) -> kvstore_pb2.GetStoreInfoResponse:
        store = self._store
        return kvstore_pb2.GetStoreInfoResponse(
            store_id=store.store_id,
            epoch=store.epoch,
            arena_bytes=store.arena_bytes,
            page_bytes=store.page_bytes,
            transports=store.transport.names,
            transport_detail=await store.describe_transport(),
            versions=self._versions,
            admin_port=self._admin_port(),
        )

    async def Stats(
        self, request: kvstore_pb2.StatsRequest, context: Context
    ) -> kvstore_pb2.StatsResponse:
        store = self._store
        counts = store.counts()
        return kvstore_pb2.StatsResponse(
            total_pages=counts.total,
            free_pages=counts.free,
            cached_pages=counts.cached,
            pinned_pages=counts.used,
            quarantined_pages=counts.quarantined,
            page_bytes=store.page_bytes,
            counters=store.all_counters(),
            uptime=duration(monotonic() - store.started_at),
            tiers=[TIER.encode(tier) for tier in store.tiers()],
        )


def _versions() -> dict[str, str]:
    return {"weft": version(), "nixl": nixl_version()}


def _put_response(outcome: PutOutcome) -> kvstore_pb2.PutResponse:
    return kvstore_pb2.PutResponse(
        stored_pages=outcome.stored,
        present_pages=outcome.present,
        refused_pages=outcome.refused,
        send_data=outcome.send_data,
    )
