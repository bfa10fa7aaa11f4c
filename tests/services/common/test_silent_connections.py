"""A connection that nobody answers any more, as one that a firewall forgot, is dialled anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from weft.common.rpc.channel import open_channel
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_client import FillClient
from weft.common.worker.store_replica import StoreReplica
from weft.contract.messages import Inbox
from weft.contract.store import StoreLookup
from weft.gateway.fleet import session
from weft.gateway.fleet.session import DecodeSession
from weft.testing.services.fill_commands import fill_command
from weft.testing.services.silent_prefill import SilentPrefill
from weft.testing.services.silent_proxy import SilentProxy, silent_proxy
from weft.v1 import decode_pb2, decode_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2_grpc

add_decode = decode_pb2_grpc.add_DecodeServiceServicer_to_server
add_store = kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server
add_prefill = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
TIMEOUT_S = 30


class Worker(decode_pb2_grpc.DecodeServiceServicer):
    async def Session(self, request_iterator: Any, context: Any) -> None:
        async for request in request_iterator:
            if request.HasField("hello"):
                welcome = decode_pb2.SessionEvent.Welcome(worker_id="w", worker_epoch=1)
                await context.write(decode_pb2.SessionEvent(welcome=welcome))
            elif request.HasField("ping"):
                pong = decode_pb2.SessionEvent.Pong(nonce=request.ping.nonce)
                await context.write(decode_pb2.SessionEvent(pong=pong))


class Store(kvstore_pb2_grpc.KvStoreServiceServicer):
    async def Lookup(self, request: Any, context: Any) -> kvstore_pb2.LookupResponse:
        return kvstore_pb2.LookupResponse(epoch=1)


@asynccontextmanager
async def behind_proxy(add: Callable[[Any], None]) -> AsyncIterator[tuple[SilentProxy, str]]:
    """A server with one service."""
    server = grpc.aio.server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with silent_proxy(port) as (proxy, address):
            yield proxy, address
    finally:
        await server.stop(None)


async def test_a_session_dials_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WELCOME_TIMEOUT_S", 2.0)
    async with behind_proxy(partial(add_decode, Worker())) as (proxy, address):
        channel = open_channel(address, "decode", None)
        lost = list[bool]()
        opened = DecodeSession(
            channel,
            "gateway",
            1,
            ping_interval_s=0.2,
            dead_after_s=2.0,
            on_lost=lambda: lost.append(True),
            expects_constraints=lambda: False,
            on_silence=channel.renew,
        )
        running = asyncio.create_task(opened.run())
        try:
            async with asyncio.timeout(60):
                while not opened.is_open:
                    await asyncio.sleep(0.01)
                proxy.silent[0] = True
                while opened.is_open:
                    await asyncio.sleep(0.01)
                while not opened.is_open:
                    await asyncio.sleep(0.01)
            # On a busy machine the next connection may seem dead as well.
            assert 0 < len(lost) < len(proxy.silent)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()


class Engine:
    """Takes what a client of fillers has to say."""

    def __init__(self) -> None:
        self.said: list[Inbox] = []

    def send(self, inbox: Inbox) -> None:
        self.said.append(inbox)


async def test_lookups_of_a_store_dial_anew() -> None:
    engine: Any = Engine()
    async with behind_proxy(partial(add_store, Store())) as (proxy, address):
        fills, now = FillClient(engine), 0.0
        tracer = Tracer("decode", is_on=False)
        replica = StoreReplica(fills, address, "decode-0", 1, 64, tracer, lambda: now)

        async def until_answered() -> None:
            nonlocal now
            lookup = StoreLookup(lookup=1, namespace=bytes(32), keys=[bytes(32)])
            async with asyncio.timeout(TIMEOUT_S):
                while await replica.look_up(lookup, lookup.keys) is None:
                    now += 1.0

        await until_answered()
        proxy.silent[0] = True
        await until_answered()
        assert len(proxy.silent) >= 2
        await fills.close()


async def test_questions_about_fills_dial_anew_and_end_no_fill() -> None:
    """The filler may just be slow."""
    engine: Any = Engine()
    filler = SilentPrefill()
    async with behind_proxy(partial(add_prefill, filler)) as (proxy, address):
        fills = FillClient(engine)
        fills.run(fill_command("start", b"a" * 16, address))
        async with asyncio.timeout(TIMEOUT_S):
            while not filler.num_fills:
                await asyncio.sleep(0.01)
            fills.run(fill_command("query", b"a" * 16, address))
            while fills.sizes()["fill_tasks"] > 1:
                await asyncio.sleep(0.01)
            fills.run(fill_command("start", b"b" * 16, address))
            while filler.num_fills < 2:
                await asyncio.sleep(0.01)
        assert len(proxy.silent) == 2
        assert fills.sizes()["fill_calls"] == 2
        assert not engine.said
        await fills.close()


async def test_channels_to_workers_that_are_gone_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers come and go for months, each with an address of its own."""
    monkeypatch.setattr("weft.common.worker.fill_client.MAX_CHANNELS", 4)
    engine: Any = Engine()
    filler = SilentPrefill()
    async with behind_proxy(partial(add_prefill, filler)) as (_, address):
        fills = FillClient(engine)
        store = fills.channel("127.0.0.1:1", "kvstore")
        fills.run(fill_command("start", b"a" * 16, address))
        async with asyncio.timeout(TIMEOUT_S):
            while not filler.num_fills:
                await asyncio.sleep(0.01)
        for port in range(1, 20):
            fills.channel(f"127.0.0.1:{port}", "prefill")
        sizes = fills.sizes()
        assert sizes["channels"] <= 4
        assert sizes["fill_calls"] == 1, "what is open stays"
        assert fills.channel("127.0.0.1:1", "kvstore") is store
        await fills.close()
