"""PrefillService: connects owners' fills with the engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from weft.common.rpc.errors import Context
from weft.common.telemetry.request_log import LoggedPrompt
from weft.common.worker.context import WorkerContext
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.fill_data import event_to_wire, map_memory
from weft.common.worker.fill_streams import FillStreams
from weft.contract.codec.pairs import LEASE_STATES
from weft.contract.errors import InvalidRequest, PeerUnavailable
from weft.contract.fills import FillStart
from weft.contract.handle import LEASE_ID_BYTES
from weft.contract.messages import Inbox, Outbox
from weft.v1 import kv_pb2, prefill_pb2, prefill_pb2_grpc


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Implements weft.v1.PrefillService. Every stream is one lease."""

    # The name comes from the descriptor, since reflection knows only imported files.
    name: str = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name

    def __init__(self, context: WorkerContext) -> None:
        self._info = context.info
        self._queries = context.queries
        memory = map_memory(context.info.outgoing)
        self._streams = FillStreams(_EnginePort(context.engine), context.tracer, memory)

    def add_to(self, server: grpc.aio.Server) -> None:
        fill = grpc.stream_stream_rpc_method_handler(
            self.Fill,
            request_deserializer=kv_pb2.FillControl.FromString,
            response_serializer=event_to_wire,
        )
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)
        server.add_registered_method_handlers(self.name, {"Fill": fill})

    def Fill(
        self, request_iterator: AsyncIterator[kv_pb2.FillControl], context: Context
    ) -> AsyncIterator[kv_pb2.FillEvent]:
        return self._streams.serve(request_iterator)

    async def FillStatus(
        self, request: kv_pb2.FillStatusRequest, context: Context
    ) -> kv_pb2.FillStatusResponse:
        if len(request.lease_id) != LEASE_ID_BYTES:
            raise InvalidRequest(f"lease_id has {len(request.lease_id)} bytes", param="lease_id")
        state = await self._queries.lease_state(request.lease_id)
        return kv_pb2.FillStatusResponse(
            state=LEASE_STATES.numbers[state], filler_epoch=self._info.epoch
        )

    def on_outbox(self, outbox: Outbox) -> None:
        for reply in outbox.fill_replies:
            self._streams.deliver(reply)

    def sizes(self) -> dict[str, int]:
        return {"fill_streams": self._streams.num_open}

    def open_requests(self) -> list[LoggedPrompt]:
        """Empty: fills belong to their owners."""
        return []

    def on_engine_gone(self, reason: str) -> None:
        self._streams.break_all(f"the engine died: {reason}")


class _EnginePort:
    """Implements `FillPort` over the engine process."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def start(self, start: FillStart) -> None:
        self._engine.send(Inbox(fill_starts=[start]))

    def renew(self, lease_id: bytes) -> None:
        self._engine.send(Inbox(fill_renewals=[lease_id]))

    def stop(self, lease_id: bytes) -> None:
        self._engine.send(Inbox(fill_stops=[lease_id]))

    def ended(self, stream: int) -> None:
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(broken_fill_streams=[stream]))

    def taken(self, stream: int, num_events: int) -> None:
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(taken_fill_events=[(stream, num_events)]))
