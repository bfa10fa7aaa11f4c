"""Pages that a store keeps still while another process reads them from its memory."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.nixl_ranges import MemoryRange, RangesReader, RangesTarget
from weft.testing.services.kv_chain import Chain, StoreCaller, random_pages
from weft.testing.services.store_server import store_here, store_process
from weft.v1 import kvstore_pb2

pytestmark = pytest.mark.needs("nixl")
PAGE_BYTES, ARENA_PAGES = 60_008, 40


def hold(caller: StoreCaller, chain: Chain) -> Any:
    return caller.stub.Hold(kvstore_pb2.HoldRequest(keys=chain.keys), timeout=60)


async def settle(caller: StoreCaller) -> Any:
    while (stats := await caller.settled()).counters["open_holds"]:
        pass
    return stats


async def test_held_pages_are_read_from_the_arena_and_stay(tmp_path: Path) -> None:
    flags = ["--memory-bytes", str(ARENA_PAGES * PAGE_BYTES), "--max-fills", "1"]
    with store_process(tmp_path, *flags) as (_, ready):
        async with StoreCaller(str(ready["address"])) as caller:
            chain = Chain(20)
            call = hold(caller, chain)
            assert not (await call.read()).pages  # The store has nothing yet.
            assert await call.read() is grpc.aio.EOF  # So there is nothing to keep.
            contents = random_pages(15, PAGE_BYTES)
            assert (await caller.put_data(chain, range(15), contents)).stored_pages == 15
            call = hold(caller, chain)
            held = await call.read()
            assert len(held.pages) == 15
            assert held.page_bytes == PAGE_BYTES
            assert list(held.digests) == digest_pages(contents, range(15)).tolist()
            assert (await caller.stats()).pinned_pages == 15
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(hold(caller, chain)))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # Others need the whole arena meanwhile.
            for _ in range(3):
                await caller.put_data(Chain(20), range(20), random_pages(20, PAGE_BYTES))
            into = np.zeros((15, PAGE_BYTES), np.uint8)
            reader = RangesReader("pages", most_bytes=0, stall_s=30.0)
            target = RangesTarget(held.nixl_version, held.agent_name, held.agent_metadata)
            reader.open(target, [MemoryRange(into.ctypes.data, into.nbytes, "DRAM", 0)])
            cuts = [0, *sorted(random.sample(range(8, PAGE_BYTES - 8), 3)), PAGE_BYTES]
            for begin, end in pairwise(cuts):
                rows = [
                    [(base + page * PAGE_BYTES + begin, end - begin, 0) for page in pages]
                    for base, pages in (
                        (into.ctypes.data, range(15)),
                        (held.arena_address, held.pages),
                    )
                ]
                reader.copy_rows(*(np.array(one, np.uint64) for one in rows))
            assert np.array_equal(into, contents)
            call.cancel()
            stats = await settle(caller)
            assert stats.counters["held_pages"] == 15
            # A call after the end of the hold: the pages may go now.
            for _ in range(3):
                await caller.put_data(Chain(20), range(20), random_pages(20, PAGE_BYTES))
            assert await caller.look_up(chain) == 0
            assert reader.close()


async def test_a_draining_store_waits_for_holds_and_refuses_others() -> None:
    memory = ARENA_PAGES * PAGE_BYTES
    async with (
        store_here(transport="nixl", memory_bytes=memory) as (store, address),
        StoreCaller(address) as caller,
    ):
        chain = Chain(3)
        await caller.put_data(chain, range(3), random_pages(3, PAGE_BYTES))
        call = hold(caller, chain)
        assert len((await call.read()).pages) == 3
        draining = asyncio.ensure_future(store.drain())
        try:
            await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as refused:
                await anext(aiter(hold(caller, chain)))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not draining.done()
            call.cancel()
            await asyncio.wait_for(draining, 60)
            assert not (await caller.stats()).pinned_pages
        finally:
            draining.cancel()


@pytest.mark.full
async def test_a_store_without_nixl_says_so(tmp_path: Path) -> None:
    memory = str(ARENA_PAGES * PAGE_BYTES)
    with store_process(tmp_path, "--memory-bytes", memory, "--transport", "data") as (
        _,
        ready,
    ):
        async with StoreCaller(str(ready["address"])) as caller:
            chain = Chain(3)
            await caller.put_data(chain, range(3), random_pages(3, PAGE_BYTES))
            with pytest.raises(grpc.aio.AioRpcError, match="does not use NIXL") as refused:
                await anext(aiter(hold(caller, chain)))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            chain.keys[1] = b"short"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(hold(caller, chain)))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not (await settle(caller)).counters["held_pages"]
