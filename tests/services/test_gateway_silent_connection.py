"""A connection that nobody answers any more, as one that a firewall forgot, is dialled anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from weft.common.channel import open_channel
from weft.gateway import session
from weft.gateway.session import DecodeSession
from weft.v1 import decode_pb2, decode_pb2_grpc


class Worker(decode_pb2_grpc.DecodeServiceServicer):
    async def Session(self, request_iterator: Any, context: Any) -> None:
        async for request in request_iterator:
            if request.HasField("hello"):
                welcome = decode_pb2.SessionEvent.Welcome(worker_id="w", worker_epoch=1)
                await context.write(decode_pb2.SessionEvent(welcome=welcome))
            elif request.HasField("ping"):
                pong = decode_pb2.SessionEvent.Pong(nonce=request.ping.nonce)
                await context.write(decode_pb2.SessionEvent(pong=pong))


class Proxy:
    """Passes connections on; one that is silent takes bytes, and passes none."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.silent: list[bool] = []
        """Of each connection, in their order."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.silent)
        self.silent.append(False)
        behind, to_worker = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(OSError):
            await asyncio.gather(
                self._pass(number, reader, to_worker), self._pass(number, behind, writer)
            )

    async def _pass(
        self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(1 << 16):
            if not self.silent[number]:
                target.write(data)
                await target.drain()
        target.close()


@asynccontextmanager
async def worker_behind_proxy() -> AsyncIterator[tuple[Proxy, str]]:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Worker(), server)
    proxy = Proxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    try:
        yield proxy, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.stop(None)


async def test_a_session_dials_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WELCOME_TIMEOUT_S", 1.0)
    async with worker_behind_proxy() as (proxy, address):
        channel = open_channel(address, "decode", None)
        lost = list[bool]()
        opened = DecodeSession(
            channel,
            "gateway",
            1,
            ping_interval_s=0.2,
            dead_after_s=0.6,
            on_lost=lambda: lost.append(True),
            expects_constraints=lambda: False,
            on_silence=channel.renew,
        )
        running = asyncio.create_task(opened.run())
        try:
            async with asyncio.timeout(30):
                while not opened.is_open:
                    await asyncio.sleep(0.01)
                proxy.silent[0] = True
                while opened.is_open:
                    await asyncio.sleep(0.01)
                while not opened.is_open:
                    await asyncio.sleep(0.01)
            assert lost == [True]
            assert len(proxy.silent) == 2
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()
