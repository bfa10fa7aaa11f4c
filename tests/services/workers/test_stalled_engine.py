"""Pages that come as gRPC data for an engine that does not read: they stay where they are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.fill_client import FillClient
from weft.common.worker.frames import HEADER, parse_inbox
from weft.engine.base.config import EngineConfig
from weft.testing.services.fill_commands import fill_command
from weft.v1 import kv_pb2, prefill_pb2_grpc

PIECE = bytes(1 << 20)
NUM_PIECES = 128
MAX_WAITING = 64


class Filler(prefill_pb2_grpc.PrefillServiceServicer):
    """Sends pages as fast as they are taken."""

    num_sent = 0

    async def Fill(self, request_iterator: Any, context: Any) -> AsyncIterator[kv_pb2.FillEvent]:  # type: ignore[override]
        await anext(request_iterator)
        for number in range(NUM_PIECES):
            self.num_sent = number + 1
            yield kv_pb2.FillEvent(data=kv_pb2.FillEvent.Data(chunk=number, data=PIECE))
        yield kv_pb2.FillEvent(done=kv_pb2.FillEvent.Done())


async def read_chunks(connection: socket.socket) -> list[int]:
    """Chunks that an engine is told of, up to the fill's end."""
    reader, writer = await asyncio.open_connection(sock=connection)
    chunks: list[int] = []
    while True:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        for told in parse_inbox(await reader.readexactly(length)).filler_events:
            if told.event.kind == "done":
                writer.close()
                return chunks
            chunks.append(told.event.chunk)
            assert told.event.data == PIECE


async def test_pages_wait_for_an_engine_that_stands_still() -> None:
    filler, server = Filler(), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(filler, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = EngineClient(EngineConfig(model_dir=Path("none")), lambda outbox: None)
    ours, theirs = socket.socketpair()
    await engine.connect(ours)
    fills = FillClient(engine)
    async with asyncio.timeout(240):
        fills.run(fill_command("start", b"a" * 16, f"127.0.0.1:{port}"))
        last = -1
        while last != filler.num_sent or not last:
            last = filler.num_sent
            await asyncio.sleep(0.5)
        assert 0 < last <= MAX_WAITING
        assert await read_chunks(theirs) == list(range(NUM_PIECES))
    await fills.close()
    await server.stop(None)
