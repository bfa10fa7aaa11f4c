"""Blocks of recurrent layers in the store, and window pages, which are blocks of their own: pages
count up to the last one where all blocks that a request needs are whole.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.keys import block_keys
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.kvstore.store import KvStore
from weft.testing.services.kv_chain import Chain, StoreCaller, random_pages
from weft.testing.services.store_server import store_here
from weft.v1 import kv_pb2, kvstore_pb2

PAGE_BYTES, NUM_PAGES, BLOCK = 4096, 8, 3


async def continuable(caller: StoreCaller, chain: Chain) -> int:
    """Pages behind which the store says that a request can go on."""
    request = kvstore_pb2.LookupRequest(
        namespace=chain.namespace, keys=chain.keys, block_pages=BLOCK
    )
    return int((await caller.stub.Lookup(request, timeout=60)).num_pages)


def block_behind(chain: Chain, border: int) -> Chain:
    """The pages of the block behind the first pages of a chain."""
    block = Chain(BLOCK, namespace=chain.namespace)
    block.keys = block_keys(chain.keys[border - 1], BLOCK)
    return block


async def on_disk(store: KvStore, num_pages: int) -> None:
    async with asyncio.timeout(60):
        while store.tiers()[0].cached_pages < num_pages:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("backend", ["memory", "disk"])
async def test_pages_count_and_come_with_their_block(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk a later store finds what an earlier one had. Few pages are searched at a time."""
    monkeypatch.setattr("weft.kvstore.store.CONTINUABLE_KEYS", random.randint(1, NUM_PAGES))
    settings: dict[str, Any] = {"memory_bytes": 32 * PAGE_BYTES}
    settings |= {"disk_cache_dir": tmp_path} if backend == "disk" else {}
    chain, content = Chain(NUM_PAGES), random_pages(NUM_PAGES, PAGE_BYTES)
    first, last = (random_pages(BLOCK, PAGE_BYTES) for _ in range(2))
    async with store_here(**settings) as (store, address), StoreCaller(address) as caller:
        await caller.put_data(chain, range(NUM_PAGES), content)
        assert (await caller.look_up(chain), await continuable(caller, chain)) == (NUM_PAGES, 0)
        await caller.put_data(block_behind(chain, 3), range(BLOCK), first)
        await caller.put_data(block_behind(chain, 6), range(BLOCK - 1), last[:-1])
        assert await continuable(caller, chain) == 3, "the other block lacks a page"
        await caller.put_data(block_behind(chain, 6), range(BLOCK - 1, BLOCK), last[-1:])
        if backend == "disk":
            await on_disk(store, NUM_PAGES + 2 * BLOCK)
        else:
            await check_fills(caller, chain, [*content[:6], *last])
    if backend == "disk":
        async with store_here(**settings) as (_, address), StoreCaller(address) as caller:
            await check_fills(caller, chain, [*content[:6], *last])


async def check_fills(caller: StoreCaller, chain: Chain, expected: list[Any]) -> None:
    assert await continuable(caller, chain) == 6
    filled = await caller.fill(chain, 2, 6, pages=range(4 + BLOCK))
    assert filled.kinds[-1] == "done"
    assert [bytes(filled.pages[2 + i]) for i in range(4 + BLOCK)] == [
        page.tobytes() for page in expected[2:]
    ]
    declined = await caller.fill(chain, 2, 7, pages=range(5 + BLOCK))
    assert declined.kinds == ["declined"]
    await caller.settled()


async def test_pages_count_up_to_the_last_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition; a fill brings the blocks of the last pages, the last one first."""
    monkeypatch.setattr("weft.kvstore.store.CONTINUABLE_KEYS", random.randint(1, NUM_PAGES))
    chain, content = Chain(NUM_PAGES), random_pages(NUM_PAGES, PAGE_BYTES)
    blocks = [random_pages(BLOCK, PAGE_BYTES) for _ in range(NUM_PAGES)]
    whole: set[int] = set()
    async with (
        store_here(memory_bytes=(2 + BLOCK) * NUM_PAGES * PAGE_BYTES) as (_, address),
        StoreCaller(address) as caller,
    ):
        await caller.put_data(chain, range(NUM_PAGES), content)
        for index in random.sample(range(NUM_PAGES), NUM_PAGES):
            # One page of the block is put last.
            last, found = random.randrange(BLOCK), block_behind(chain, index + 1)
            others = [number for number in range(BLOCK) if number != last]
            await caller.put_data(found, others, blocks[index][others])
            for _ in range(2):
                for window in range(1, NUM_PAGES + 2):
                    right = max(
                        end
                        for end in range(NUM_PAGES + 1)
                        if whole.issuperset(range(max(0, end - window), end))
                    )
                    request = kvstore_pb2.LookupRequest(
                        namespace=chain.namespace,
                        keys=chain.keys,
                        block_pages=BLOCK,
                        window_pages=window,
                    )
                    answer = await caller.stub.Lookup(request, timeout=60)
                    assert answer.num_pages == right, (whole, window)
                if index not in whole:
                    await caller.put_data(found, [last], blocks[index][[last]])
                    whole.add(index)
        end = random.randint(2, NUM_PAGES)
        start, count = random.randrange(end - 1), random.randint(1, end)
        pages = range(end - start + count * BLOCK)
        filled = await caller.fill(chain, start, end, pages=pages, block_pages=BLOCK)
        assert filled.kinds[-1] == "done"
        expected = [*content[start:end]]
        for index in range(end - 1, end - 1 - count, -1):
            expected += [*blocks[index]]
        assert [bytes(filled.pages[start + i]) for i in pages] == [p.tobytes() for p in expected]
        for size in (BLOCK + 1, 2**31):
            if count * BLOCK % size:
                declined = await caller.fill(chain, start, end, pages=pages, block_pages=size)
                assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID
        pages = range(end - start + (end + 1) * BLOCK)
        declined = await caller.fill(chain, start, end, pages=pages, block_pages=BLOCK)
        assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID
        await caller.settled()


async def test_pages_count_where_a_window_and_a_state_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the definition; a fill brings the state's pages before those of the window."""
    monkeypatch.setattr("weft.kvstore.store.CONTINUABLE_KEYS", random.randint(1, NUM_PAGES))
    chain, content = Chain(NUM_PAGES), random_pages(NUM_PAGES, PAGE_BYTES)
    num_states, window = random.randint(1, 3), random.randint(1, 3)
    beside = [random_pages(num_states + BLOCK, PAGE_BYTES) for _ in range(NUM_PAGES)]
    shape = {"block_pages": BLOCK, "state_pages": num_states}
    whole: tuple[set[int], set[int]] = set(), set()
    async with (
        store_here(memory_bytes=(4 + num_states + BLOCK) * NUM_PAGES * PAGE_BYTES) as (_, address),
        StoreCaller(address) as caller,
    ):
        await caller.put_data(chain, range(NUM_PAGES), content)
        pieces = [(index, is_window) for index in range(NUM_PAGES) for is_window in (0, 1)]
        right = 0
        for index, is_window in random.sample(pieces, len(pieces)):
            names = Chain(num_states + BLOCK, namespace=chain.namespace)
            names.keys = block_keys(chain.keys[index], num_states + BLOCK)
            own = range(num_states, num_states + BLOCK) if is_window else range(num_states)
            await caller.put_data(names, own, beside[index][list(own)])
            whole[is_window].add(index)
            right = max(
                end
                for end in range(NUM_PAGES + 1)
                if not end
                or (end - 1 in whole[0] and whole[1].issuperset(range(max(0, end - window), end)))
            )
            request = kvstore_pb2.LookupRequest(
                namespace=chain.namespace, keys=chain.keys, window_pages=window, **shape
            )
            answer = await caller.stub.Lookup(request, timeout=60)
            assert answer.num_pages == right, (whole, window)
        assert right == NUM_PAGES
        end = random.randint(2, NUM_PAGES)
        start, count = random.randrange(end - 1), random.randint(1, end)
        pages = range(end - start + num_states + count * BLOCK)
        filled = await caller.fill(chain, start, end, pages=pages, **shape)
        assert filled.kinds[-1] == "done"
        expected = [*content[start:end], *beside[end - 1][:num_states]]
        for index in range(end - 1, end - 1 - count, -1):
            expected += [*beside[index][num_states:]]
        assert [bytes(filled.pages[start + i]) for i in pages] == [p.tobytes() for p in expected]
        for changes in ({"state_pages": 2**31}, {"state_pages": num_states + 1}):
            declined = await caller.fill(chain, start, end, pages=pages, **(shape | changes))
            assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID
        await caller.settled()


async def test_blocks_of_malformed_handles_are_not_looked_for() -> None:
    """The numbers of a handle are checked before the keys of so many pages are made."""
    chain = Chain(NUM_PAGES)
    async with (
        store_here(memory_bytes=32 * PAGE_BYTES) as (_, address),
        StoreCaller(address) as caller,
    ):
        await caller.put_data(chain, range(NUM_PAGES), random_pages(NUM_PAGES, PAGE_BYTES))
        wrong: list[dict[str, int]] = [
            {"start_token": 2**32 - 16, "end_token": 16, "page_size": 1},
            {"end_token": 2**32 - 16},
            {"page_size": 0},
        ]
        for changes in wrong:
            declined = await caller.fill(chain, 0, 4, **changes)
            assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID
        num_pages = NUM_PAGES + MAX_STORED_BLOCK_PAGES + 1
        declined = await caller.fill(chain, pages=range(num_pages))
        assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_TOO_LONG
