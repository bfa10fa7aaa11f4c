"""The store in this process: what is held, given, refused and forgotten; pages travel as data."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray
from weft.common.rpc.errors import from_rpc_error
from weft.kvstore.store import KvStore
from weft.pages.transfer.digest import digest_pages_numpy
from weft.testing.services.kv_chain import (
    PAGE_SIZE,
    Chain,
    StoreCaller,
    fill_handle,
    put_header,
    random_pages,
)
from weft.testing.services.store_server import store_here
from weft.v1 import kv_pb2, kvstore_pb2

PAGE_BYTES = 4104
Here = tuple[KvStore, StoreCaller]


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Here]:
    async with store_here() as (store, address), StoreCaller(address) as caller:
        yield store, caller


async def put_chain(caller: StoreCaller, num_pages: int) -> tuple[Chain, NDArray[np.uint8]]:
    """A chain that is held, and its content."""
    chain, contents = Chain(num_pages), random_pages(num_pages, PAGE_BYTES)
    result = await caller.put_data(chain, range(num_pages), contents)
    assert (result.stored_pages, result.present_pages, result.refused_pages) == (num_pages, 0, 0)
    return chain, contents


def reason(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> str:
    return from_rpc_error(error.value).reason


def corrupt(store: KvStore, content: NDArray[np.uint8]) -> None:
    """Flips one bit of the page with this content, in the arena."""
    start = store._arena.tobytes().find(content.tobytes())
    assert start >= 0
    store._arena.setflags(write=True)
    store._arena[start + random.randrange(PAGE_BYTES)] ^= 1 << random.randrange(8)


async def test_what_was_put_is_found_and_filled(here: Here) -> None:
    _, caller = here
    chain, contents = await put_chain(caller, 9)
    assert await caller.look_up(chain) == 9
    assert await caller.look_up(chain, first=4) == 5
    assert await caller.look_up(Chain(3)) == 0
    for start, end in ((0, 9), (3, 7), (8, 9)):
        filled = await caller.fill(chain, start, end)
        assert filled.kinds[0] == "accepted"
        assert filled.last.done.timings.bytes == (end - start) * PAGE_BYTES
        assert filled.last.done.timings.computed_tokens == 0
        assert {k: bytes(v) for k, v in filled.pages.items()} == {
            index: contents[index].tobytes() for index in range(start, end)
        }
        digests = digest_pages_numpy(contents, range(start, end)).tolist()
        assert [filled.digests[index] for index in range(start, end)] == digests
    stats = await caller.settled()
    assert (stats.cached_pages, stats.page_bytes) == (9, PAGE_BYTES)
    assert stats.counters["bytes_in"] == 9 * PAGE_BYTES
    assert stats.counters["bytes_out"] == (9 + 4 + 1) * PAGE_BYTES


async def test_a_fill_ends_where_the_chain_does(here: Here) -> None:
    _, caller = here
    chain, contents = Chain(10), random_pages(10, PAGE_BYTES)
    await caller.put_data(chain, [0, 1, 2, 3, 6, 7], contents[[0, 1, 2, 3, 6, 7]])
    filled = await caller.fill(chain, 1, 10)
    accepted = filled.events[0].accepted
    assert (accepted.start_token, accepted.end_token) == (1 * PAGE_SIZE, 4 * PAGE_SIZE)
    assert sorted(filled.pages) == [1, 2, 3]
    beyond_the_gap = await caller.fill(chain, 6, 10)
    assert {k: bytes(v) for k, v in beyond_the_gap.pages.items()} == {
        index: contents[index].tobytes() for index in (6, 7)
    }
    declined = await caller.fill(chain, 4, 10)
    assert declined.kinds == ["declined"]
    assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_NOT_HELD
    await caller.settled()


async def test_before_the_first_put_there_is_nothing(here: Here) -> None:
    store, caller = here
    chain = Chain(2)
    assert await caller.look_up(chain) == 0
    asked = secrets.token_bytes(16)
    status = await caller.stub.FillStatus(kv_pb2.FillStatusRequest(lease_id=asked))
    assert status.state == kv_pb2.LEASE_STATE_UNKNOWN
    assert (await caller.fill(chain)).last.declined.reason == kv_pb2.DECLINE_REASON_NOT_HELD
    assert not (await caller.stub.ReportCorrupt(report(chain.keys[0], 1))).dropped
    assert await store.flush() == 0
    assert (await caller.stats()).total_pages == 0
    chain, _ = await put_chain(caller, 2)
    # A lease that was asked about is used up, also after the store has got its pages.
    late = await caller.fill(chain, lease_id=asked)
    assert late.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID


async def test_a_page_with_a_wrong_digest_is_not_held(here: Here) -> None:
    _, caller = here
    chain, contents = Chain(5), random_pages(5, PAGE_BYTES)
    digests = digest_pages_numpy(contents, range(5)).tolist()
    digests[2] ^= 1 << random.randrange(64)
    result = await caller.put_data(chain, range(5), contents, digests)
    assert (result.stored_pages, result.refused_pages) == (4, 1)
    assert await caller.look_up(chain) == 2
    assert await caller.look_up(chain, first=3) == 2
    stats = await caller.settled()
    assert (stats.cached_pages, stats.counters["digest_mismatches"]) == (4, 1)
    again = await caller.put_data(chain, range(5), contents)
    assert (again.stored_pages, again.present_pages) == (1, 4)


async def test_a_held_key_with_another_digest_is_already_there(here: Here) -> None:
    _, caller = here
    chain, contents = await put_chain(caller, 3)
    other = random_pages(3, PAGE_BYTES)
    result = await caller.put_data(chain, range(3), other)
    assert (result.stored_pages, result.present_pages) == (0, 3)
    filled = await caller.fill(chain)
    assert bytes(filled.pages[1]) == contents[1].tobytes()


async def test_a_corrupt_page_is_seen_by_its_reader_and_dropped_when_reported(here: Here) -> None:
    store, caller = here
    chain, contents = await put_chain(caller, 4)
    healthy = (await caller.fill(chain)).digests
    corrupt(store, contents[2])
    filled = await caller.fill(chain)
    found = {
        index: digest_pages_numpy(np.frombuffer(page, np.uint8)[None], [0]).tolist()[0]
        for index, page in filled.pages.items()
    }
    # The digest that is told is that of the page as it came.
    assert filled.digests == healthy
    assert [index for index in range(4) if found[index] != filled.digests[index]] == [2]
    for index, is_dropped in ((1, False), (2, True), (2, False)):
        answer = await caller.stub.ReportCorrupt(report(chain.keys[index], healthy[index]))
        assert answer.dropped is is_dropped
    assert await caller.look_up(chain) == 2
    stats = await caller.settled()
    assert (stats.cached_pages, stats.counters["corrupt_pages"]) == (3, 1)
    assert (await caller.put_data(chain, range(4), contents)).stored_pages == 1
    assert bytes((await caller.fill(chain)).pages[2]) == contents[2].tobytes()


async def test_eviction_never_touches_what_is_read() -> None:
    num_pages = 16
    async with (
        store_here(memory_bytes=(num_pages + 1) * PAGE_BYTES) as (_, address),
        StoreCaller(address) as caller,
    ):
        chain, contents = await put_chain(caller, 6)
        # A reader that does not read: the first chunk waits in its stream, the rest is pinned.
        handle = fill_handle(chain, 0, 6, caller.epoch)
        call = await caller.open_fill(handle)
        assert (await call.read()).WhichOneof("event") == "accepted"
        for _ in range(5):
            pressing = Chain(20)
            result = await caller.put_data(pressing, range(20), random_pages(20, PAGE_BYTES))
            assert result.stored_pages in (10, num_pages)
            assert result.stored_pages + result.refused_pages == 20
            await caller.stats()
        call.cancel()
        await caller.settled()
        if await caller.look_up(chain) == 6:
            assert bytes((await caller.fill(chain)).pages[5]) == contents[5].tobytes()


async def test_pins_hold_while_a_slow_reader_takes_its_time() -> None:
    """Pages of many chunks stay what they were until the last one is out."""
    num_pages, page_bytes = 24, 1 << 18
    memory = (num_pages + 9) * page_bytes
    async with (
        store_here(memory_bytes=memory, chunk_bytes=page_bytes) as (_, address),
        StoreCaller(address) as caller,
    ):
        chain, contents = Chain(num_pages), random_pages(num_pages, page_bytes)
        await caller.put_data(chain, range(num_pages), contents)
        call = await caller.open_fill(fill_handle(chain, 0, num_pages, caller.epoch))
        pages: dict[int, bytes] = {}
        evictions = 0
        while (event := await call.read()) is not grpc.aio.EOF:
            if event.WhichOneof("event") == "data":
                pages[event.data.page_start_token // PAGE_SIZE] = event.data.data
                if len(pages) % 6 == 0:
                    other = await caller.put_data(Chain(8), range(8), random_pages(8, page_bytes))
                    evictions += other.stored_pages
        assert pages == {index: contents[index].tobytes() for index in range(num_pages)}
        assert evictions > 8
        await caller.settled()


async def test_a_reader_that_does_not_read_fills_no_queues() -> None:
    num_pages, page_bytes = 40, 1 << 20
    async with (
        store_here(memory_bytes=(num_pages + 2) * page_bytes, chunk_bytes=page_bytes) as (_, to),
        StoreCaller(to) as caller,
    ):
        chain = Chain(num_pages)
        await caller.put_data(chain, range(num_pages), random_pages(num_pages, page_bytes))
        call = await caller.open_fill(fill_handle(chain, 0, num_pages, caller.epoch))
        assert (await call.read()).WhichOneof("event") == "accepted"
        async with asyncio.timeout(60):
            while not (await caller.stats()).counters["filled_pages"]:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        stats = await caller.stats()
        assert stats.counters["filled_pages"] < num_pages // 2
        assert stats.pinned_pages == num_pages
        num_events = 0
        while await call.read() is not grpc.aio.EOF:
            num_events += 1
        assert num_events == 2 * num_pages + 1
        await caller.settled()


async def test_flush_forgets_what_nobody_reads(here: Here) -> None:
    store, caller = here
    chain, _ = await put_chain(caller, 5)
    assert await store.flush() == 5
    assert await caller.look_up(chain) == 0
    stats = await caller.stats()
    assert stats.free_pages == stats.total_pages


async def test_pages_of_another_size_are_refused_with_a_reason(here: Here) -> None:
    _, caller = here
    await put_chain(caller, 2)
    with pytest.raises(grpc.aio.AioRpcError, match="restart it") as error:
        await put_header_only(caller, 2 * PAGE_BYTES)
    assert reason(error) == "PAGE_SIZE_MISMATCH"
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await caller.settled()).counters["puts_refused"] == 1


async def test_without_nixl_a_put_is_asked_for_as_data(here: Here) -> None:
    _, caller = here
    header = put_header(Chain(2), range(2), [1, 2], [0, 1], PAGE_BYTES)
    header.source.CopyFrom(kv_pb2.NixlTarget(version="1"))
    response = await caller.stub.Put(header)
    assert (response.send_data, response.refused_pages) == (True, 2)
    header.ClearField("source")
    with pytest.raises(grpc.aio.AioRpcError, match="source is missing"):
        await caller.stub.Put(header)


async def test_two_puts_of_the_same_pages_store_them_once(here: Here) -> None:
    _, caller = here
    chain, contents = Chain(12), random_pages(12, PAGE_BYTES)
    results = await asyncio.gather(*(caller.put_data(chain, range(12), contents) for _ in range(6)))
    assert sum(result.stored_pages for result in results) == 12
    assert sum(result.present_pages for result in results) == 5 * 12
    assert await caller.look_up(chain) == 12
    assert (await caller.settled()).cached_pages == 12


async def test_too_many_puts_are_refused_and_may_come_again() -> None:
    async with store_here(max_puts=1) as (_, address), StoreCaller(address) as caller:
        await put_chain(caller, 1)
        chain = Chain(1)
        slow = caller.stub.PutData()
        await slow.write(part_header(chain))
        await until(lambda stats: stats.pinned_pages == 1, caller)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await put_header_only(caller)
        failure = from_rpc_error(error.value)
        assert (failure.reason, failure.retryable) == ("OVERLOADED", True)
        assert failure.retry_after_s
        slow.cancel()
        await caller.settled()
        await put_chain(caller, 1)


async def test_a_broken_stream_leaves_nothing_behind(here: Here) -> None:
    _, caller = here
    held, _ = await put_chain(caller, 1)
    chain, contents = Chain(3), random_pages(3, PAGE_BYTES)
    before = await caller.settled()

    cut = caller.stub.PutData()
    await cut.write(part_header(chain, 3))
    await cut.write(kvstore_pb2.PutDataRequest(index=0, data=contents[0].tobytes()))
    await until(lambda stats: stats.pinned_pages == 3, caller)
    cut.cancel()
    await caller.settled()

    short = caller.stub.PutData()
    await short.write(part_header(chain, 3))
    await short.write(kvstore_pb2.PutDataRequest(index=0, data=contents[0].tobytes()))
    await short.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="2 pages are not complete"):
        await short
    assert await caller.look_up(chain) == 0
    assert await caller.look_up(held) == 1
    assert (await caller.settled()).free_pages == before.free_pages


async def test_data_that_does_not_come_in_time_is_given_up() -> None:
    async with (
        store_here(put_data_timeout_s=0.2) as (_, address),
        StoreCaller(address) as caller,
    ):
        slow = caller.stub.PutData()
        await slow.write(part_header(Chain(2), 2))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await slow
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await caller.settled()).cached_pages == 0


async def test_garbage_is_refused_and_changes_nothing(here: Here) -> None:
    _, caller = here
    chain, contents = await put_chain(caller, 3)
    before = await caller.settled()
    header = put_header(Chain(2), range(2), [1, 2], [0, 1], PAGE_BYTES)

    async def parts(*messages: kvstore_pb2.PutDataRequest) -> None:
        async def send() -> AsyncIterator[kvstore_pb2.PutDataRequest]:
            for message in messages:
                yield message

        await caller.stub.PutData(send(), timeout=60)

    part = kvstore_pb2.PutDataRequest
    bad_streams = [
        (),
        (part(index=0, data=b"x"),),
        (part(header=header, data=b"x"),),
        (part(header=header), part(header=header)),
        (part(header=header), part(index=2, data=b"x")),
        (part(header=header), part(index=0, offset=4, data=b"x")),
        (part(header=header), part(index=0, data=bytes(PAGE_BYTES + 4))),
        (part(header=header), part(index=0, data=b"")),
    ]
    for messages in bad_streams:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await parts(*messages)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, messages
    channel = caller._channel
    for method in ("Lookup", "Put", "FillStatus", "ReportCorrupt"):
        call = channel.unary_unary(f"/weft.v1.KvStoreService/{method}")
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(b"\xff" + random.randbytes(30), timeout=60)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for method in ("Fill", "PutData"):
        stream = channel.stream_stream(f"/weft.v1.KvStoreService/{method}")()
        await stream.write(b"\xff" + random.randbytes(30))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
    assert await caller.look_up(chain) == 3
    after = await caller.settled()
    assert (after.free_pages, after.cached_pages) == (before.free_pages, before.cached_pages)
    assert bytes((await caller.fill(chain)).pages[0]) == contents[0].tobytes()


BAD_HANDLES: dict[str, dict[str, Any]] = {
    "EPOCH": {"filler_epoch": 5},
    "INVALID": {"start_token": 2},
    "NOT_HELD": {"namespace": bytes(32)},
    "INVALID ": {"page_size": 0},
    "INVALID  ": {"lease_duration": Duration(seconds=-1)},
}


@pytest.mark.parametrize("name", BAD_HANDLES)
async def test_a_handle_that_does_not_fit_is_declined(here: Here, name: str) -> None:
    _, caller = here
    chain, _ = await put_chain(caller, 3)
    filled = await caller.fill(chain, **BAD_HANDLES[name])
    assert filled.kinds == ["declined"]
    assert kv_pb2.DeclineReason.Name(filled.last.declined.reason).endswith(name.strip())
    await caller.settled()


async def test_a_lease_is_used_once_and_its_state_is_told(here: Here) -> None:
    _, caller = here
    chain, _ = await put_chain(caller, 2)
    lease = secrets.token_bytes(16)
    assert (await caller.fill(chain, lease_id=lease)).kinds[-1] == "done"
    status = await caller.stub.FillStatus(kv_pb2.FillStatusRequest(lease_id=lease))
    assert (status.state, status.filler_epoch) == (kv_pb2.LEASE_STATE_STOPPED, caller.epoch)
    again = await caller.fill(chain, lease_id=lease)
    assert again.last.declined.reason == kv_pb2.DECLINE_REASON_INVALID
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await caller.stub.FillStatus(kv_pb2.FillStatusRequest(lease_id=b"short"))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_too_many_fills_are_declined() -> None:
    async with (
        store_here(max_fills=1, chunk_bytes=4096, memory_bytes=20 << 20) as (_, address),
        StoreCaller(address) as caller,
    ):
        # More than gRPC buffers for a reader that does not read.
        chain, contents = Chain(8), random_pages(8, 2 << 20)
        await caller.put_data(chain, range(8), contents)
        busy = await caller.open_fill(fill_handle(chain, 0, 8, caller.epoch))
        assert (await busy.read()).WhichOneof("event") == "accepted"
        other = await caller.fill(chain)
        assert other.last.declined.reason == kv_pb2.DECLINE_REASON_BUSY
        while await busy.read() is not grpc.aio.EOF:
            pass
        assert (await caller.fill(chain)).kinds[-1] == "done"


async def test_a_stopped_fill_ends_and_lets_its_pages_go(here: Here) -> None:
    _, caller = here
    chain, _ = await put_chain(caller, 4)

    async def controls() -> AsyncIterator[kv_pb2.FillControl]:
        handle = fill_handle(chain, 0, 4, caller.epoch)
        yield kv_pb2.FillControl(start=kv_pb2.FillControl.Start(handle=handle))
        yield kv_pb2.FillControl(renew=kv_pb2.FillControl.Renew())
        yield kv_pb2.FillControl(stop=kv_pb2.FillControl.Stop())
        await asyncio.Event().wait()

    events = [event async for event in caller.stub.Fill(controls(), timeout=60)]
    assert events[-1].WhichOneof("event") in ("stopped", "done")
    await caller.settled()


async def test_a_draining_store_takes_nothing_new(here: Here) -> None:
    store, caller = here
    chain, _ = await put_chain(caller, 2)
    await asyncio.wait_for(store.drain(), 60)
    declined = await caller.fill(chain)
    assert declined.last.declined.reason == kv_pb2.DECLINE_REASON_DRAINING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await put_header_only(caller)
    assert reason(error) == "DRAINING"


async def test_nothing_leaks_over_many_operations() -> None:
    """Random puts, fills, cancels, reports and flushes in a store that is always too small."""
    async with (
        store_here(memory_bytes=40 * PAGE_BYTES, max_puts=3) as (store, address),
        StoreCaller(address) as caller,
    ):
        held, _ = await put_chain(caller, 1)
        assert await caller.look_up(held) == 1
        num_tasks = len(asyncio.all_tasks())
        chains = [(Chain(count), random_pages(count, PAGE_BYTES)) for count in (3, 7, 12, 20, 30)]
        await asyncio.gather(*(many_operations(store, caller, chains, 125) for _ in range(8)))
        stats = await caller.settled()
        assert stats.counters["evicted_pages"] > 0
        assert stats.counters["fills_done"] > 100
        for _ in range(100):
            if len(asyncio.all_tasks()) <= num_tasks:
                return
            await asyncio.sleep(0.05)
        raise AssertionError([task.get_coro() for task in asyncio.all_tasks()])


async def many_operations(
    store: KvStore, caller: StoreCaller, chains: list[tuple[Chain, NDArray[np.uint8]]], count: int
) -> None:
    for _ in range(count):
        chain, contents = random.choice(chains)
        try:
            await any_operation(store, caller, chain, contents)
        except grpc.aio.AioRpcError as error:
            # INTERNAL: the store refused while the pages were still being sent, in grpcio's words.
            is_cut = error.code() is grpc.StatusCode.INTERNAL and "from Core" in error.details()
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED and not is_cut:
                raise
        await caller.stats()


async def any_operation(
    store: KvStore, caller: StoreCaller, chain: Chain, contents: NDArray[np.uint8]
) -> None:
    action = random.choices(("put", "fill", "cut fill", "cut put", "flush"), (35, 40, 15, 7, 3))[0]
    if action == "put":
        count = random.randint(1, len(contents))
        await caller.put_data(chain, range(count), contents[:count])
    elif action == "fill":
        filled = await caller.fill(chain, random.choice([0, 0, 1]))
        for index, page in filled.pages.items():
            assert bytes(page) == contents[index].tobytes()
    elif action == "cut fill":
        call = await caller.open_fill(fill_handle(chain, 0, None, caller.epoch))
        for _ in range(random.randint(0, 3)):
            await call.read()
        call.cancel()
    elif action == "cut put":
        call = caller.stub.PutData()
        await call.write(part_header(chain, 2))
        await asyncio.sleep(random.random() * 0.005)
        call.cancel()
    else:
        assert not (await caller.stub.ReportCorrupt(report(chain.keys[0], 0))).dropped
        await store.flush()


def report(key: bytes, digest: int) -> kvstore_pb2.ReportCorruptRequest:
    return kvstore_pb2.ReportCorruptRequest(key=key, digest=digest)


def part_header(chain: Chain, num_pages: int = 1) -> kvstore_pb2.PutDataRequest:
    indices = range(num_pages)
    header = put_header(chain, indices, [0] * num_pages, indices, PAGE_BYTES)
    return kvstore_pb2.PutDataRequest(header=header)


async def put_header_only(caller: StoreCaller, page_bytes: int = PAGE_BYTES) -> None:
    """Begins a put that is refused: a write after the refusal could fail without its reason."""
    call = caller.stub.PutData(timeout=60)
    header = put_header(Chain(1), [0], [0], [0], page_bytes)
    await call.write(kvstore_pb2.PutDataRequest(header=header))
    await call


async def until(condition: Any, caller: StoreCaller) -> None:
    async with asyncio.timeout(60):
        while not condition(await caller.stats()):
            await asyncio.sleep(0.01)
