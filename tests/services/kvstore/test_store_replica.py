"""A worker and one replica of the KV store that answers late, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from weft.common.telemetry.spans import Tracer
from weft.common.worker.fill_client import FillClient
from weft.common.worker.store_client import StoreClient
from weft.common.worker.store_replica import MAX_LATE_RESTS, REST_S, StoreReplica
from weft.contract.messages import Inbox
from weft.contract.store import StoreLookup, StorePut
from weft.testing.services.fill_commands import nixl_target
from weft.v1 import kvstore_pb2, kvstore_pb2_grpc

KEY = bytes(32)
SOURCE = nixl_target(64, 10)


class BusyStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """A store that takes every page, and answers lookups while it is not busy."""

    def __init__(self) -> None:
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def Lookup(
        self, request: kvstore_pb2.LookupRequest, context: Any
    ) -> kvstore_pb2.LookupResponse:
        await self.is_free.wait()
        return kvstore_pb2.LookupResponse(epoch=1)

    async def Put(self, request: kvstore_pb2.PutRequest, context: Any) -> kvstore_pb2.PutResponse:
        return kvstore_pb2.PutResponse(stored_pages=len(request.pages))


class FakeEngine:
    def __init__(self) -> None:
        self.inboxes: asyncio.Queue[Inbox] = asyncio.Queue()

    def send(self, inbox: Inbox) -> None:
        self.inboxes.put_nowait(inbox)


class Bench:
    """A worker's client of a busy store, on a clock that stands still."""

    def __init__(self, store: BusyStore, server: grpc.aio.Server, address: str) -> None:
        self.store = store
        self.server = server
        self.now = 0.0
        self._engine: Any = FakeEngine()
        self.fills = FillClient(self._engine)
        replica = StoreReplica(
            self.fills, address, "decode-0", 1, 64, Tracer("decode", is_on=False), lambda: self.now
        )
        self.client = StoreClient(self._engine, [replica])

    async def look_up(self, count: int = 1) -> int:
        """Looks a prompt up so many times at once; returns how many were answered."""
        for number in range(count):
            self.client.look_up(StoreLookup(lookup=number, namespace=KEY, keys=[KEY]))
        inboxes = [await self._inbox() for _ in range(count)]
        return sum(bool(inbox.store_answers[0].epochs) for inbox in inboxes)

    async def look_up_until_answered(self) -> None:
        """The machine that runs the test may be busy itself."""
        while not await self.look_up():
            self.now += REST_S

    async def put(self) -> bool:
        """Offers a page; returns whether the store has answered."""
        put = StorePut(
            put=1,
            namespace=KEY,
            keys=[KEY],
            parents=[b""],
            shards=[KEY],
            digests=[0],
            pages=[1],
            source=SOURCE,
            data=[],
        )
        self.client.put(put)
        (result,) = (await self._inbox()).store_put_results
        assert result.stored_pages == result.is_answered
        return result.is_answered

    async def _inbox(self) -> Inbox:
        return await asyncio.wait_for(self._engine.inboxes.get(), 60)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store, server = BusyStore(), grpc.aio.server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    bench = Bench(store, server, f"127.0.0.1:{port}")
    try:
        await bench.look_up_until_answered()
        yield bench
    finally:
        await bench.client.close()
        await bench.fills.close()
        await server.stop(0)


async def test_a_late_answer_to_lookups_holds_up_no_puts(bench: Bench) -> None:
    """Pages of which the store does not hear are not stored, and nobody asks for them again."""
    bench.store.is_free.clear()
    assert await bench.look_up(count=2 * MAX_LATE_RESTS) == 0
    assert await bench.put()
    bench.store.is_free.set()
    assert await bench.look_up() == 0, "it is left alone for a while"
    bench.now = 10 * REST_S
    await bench.look_up_until_answered()


async def test_a_store_that_is_late_again_and_again_is_offered_nothing(bench: Bench) -> None:
    bench.store.is_free.clear()
    for _ in range(MAX_LATE_RESTS):
        assert await bench.look_up() == 0
        bench.now += REST_S
    bench.now -= REST_S / 2
    assert not await bench.put()
    bench.now += REST_S
    assert await bench.put(), "it is tried again"
    assert await bench.look_up() == 0
    assert await bench.put(), "it was there a moment ago"


async def test_a_store_that_is_gone_is_offered_nothing_for_a_while(bench: Bench) -> None:
    await bench.server.stop(0)
    assert await bench.look_up() == 0
    assert not await bench.put()
