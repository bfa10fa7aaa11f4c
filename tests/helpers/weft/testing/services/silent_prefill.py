"""A prefill worker that takes fills and says nothing, as a process that stands still does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from weft.v1 import kv_pb2, prefill_pb2_grpc

_FOR_EVER_S = 600


class SilentPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill worker that never answers and counts the calls."""

    def __init__(self) -> None:
        self.num_fills = 0

    async def Fill(self, requests: Any, context: Any) -> AsyncIterator[kv_pb2.FillEvent]:
        """See prefill.proto."""
        self.num_fills += 1
        await asyncio.sleep(_FOR_EVER_S)
        yield kv_pb2.FillEvent()

    async def FillStatus(self, request: Any, context: Any) -> kv_pb2.FillStatusResponse:
        """See prefill.proto."""
        await asyncio.sleep(_FOR_EVER_S)
        return kv_pb2.FillStatusResponse()


@asynccontextmanager
async def silent_prefill() -> AsyncIterator[tuple[SilentPrefill, str]]:
    """Runs such a worker; returns it and its address."""
    servicer, server = SilentPrefill(), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
