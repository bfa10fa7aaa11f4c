"""The store as a process: pages travel over NIXL from and to other processes, which may die."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.testing.engine.nixl_process import NixlProcess
from weft.testing.services.kv_chain import Chain, StoreCaller, fill_handle, random_pages
from weft.testing.services.store_server import store_process
from weft.v1 import kv_pb2, kvstore_pb2

pytestmark = pytest.mark.needs("nixl")
PAGE_BYTES, NUM_PAGES = 60_008, 48
LARGE_BYTES = 1 << 20
Start = Callable[..., NixlProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts worker pools that end with the test."""
    processes: list[NixlProcess] = []

    def starter(
        num_pages: int = NUM_PAGES, page_bytes: int = PAGE_BYTES, lanes: str = ""
    ) -> NixlProcess:
        processes.append(NixlProcess(num_pages, page_bytes, lanes))
        return processes[-1]

    yield starter
    for process in processes:
        process.end()


@pytest.fixture(scope="module")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store for tests that leave it alive, for pages of PAGE_BYTES."""
    memory = str(160 * PAGE_BYTES)
    folder = tmp_path_factory.mktemp("store")
    with store_process(folder, "--memory-bytes", memory, "--put-timeout-s", "30") as (_, ready):
        yield str(ready["address"])


async def put_from(
    caller: StoreCaller, worker: NixlProcess, target: dict[str, Any], num_pages: int
) -> tuple[Chain, list[int], list[int]]:
    """A chain that is held, read from random pages of a worker: chain, digests, source pages."""
    chain = Chain(num_pages)
    pages = random.sample(range(target["num_pages"]), num_pages)
    digests = worker.call("digests", pages=pages)
    result = await caller.put(chain, range(num_pages), digests, target, pages)
    assert (result.stored_pages, result.send_data) == (num_pages, False)
    return chain, digests, pages


async def fill_into(
    caller: StoreCaller, worker: NixlProcess, target: dict[str, Any], chain: Chain, start: int = 0
) -> list[int]:
    """Fills a chain into random pages of a worker; their digests there."""
    pages = random.sample(range(target["num_pages"]), chain.num_pages - start)
    filled = await caller.fill(chain, start, target=target, pages=pages)
    assert filled.kinds == ["accepted", "written", "done"]
    num_chunks = sum(event.WhichOneof("event") == "written" for event in filled.events)
    assert len(worker.call("wait_notifications", count=num_chunks)) == num_chunks
    found: list[int] = worker.call("digests", pages=pages)
    assert found == [filled.digests[index] for index in range(start, chain.num_pages)]
    return found


async def test_pages_of_one_worker_reach_another(store_address: str, start: Start) -> None:
    source, reader = start(), start()
    from_source, to_reader = source.call("open_owner"), reader.call("open_owner")
    async with StoreCaller(store_address) as caller:
        chain, digests, pages = await put_from(caller, source, from_source, 40)
        again = await caller.put(chain, range(40), digests, from_source, pages)
        assert (again.stored_pages, again.present_pages) == (0, 40)
        source.call("fill", value=0)  # What is held is a copy.
        assert await fill_into(caller, reader, to_reader, chain) == digests
        assert await fill_into(caller, reader, to_reader, chain, start=13) == digests[13:]
        # The same pages by the other transport.
        as_data = await caller.fill(chain, 38, 40)
        assert [as_data.digests[index] for index in (38, 39)] == digests[38:]
        await caller.settled()
        info = await caller.stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest())
        assert list(info.transports) == ["nixl", "shared", "data"]
        assert "cma" in info.transport_detail


async def test_a_wrong_digest_or_page_is_not_held(store_address: str, start: Start) -> None:
    worker = start()
    target = worker.call("open_owner")
    async with StoreCaller(store_address) as caller:
        chain, pages = Chain(4), [3, 8, 5, 1]
        digests = worker.call("digests", pages=pages)
        wrong = [*digests[:2], digests[2] ^ (1 << random.randrange(64)), digests[3]]
        result = await caller.put(chain, range(4), wrong, target, pages)
        assert (result.stored_pages, result.refused_pages) == (3, 1)
        assert await caller.look_up(chain) == 2
        swapped = await caller.put(Chain(2), range(2), digests[:2], target, [8, 3])
        assert swapped.refused_pages == 2
        await caller.settled()


async def test_targets_that_do_not_fit_are_refused(store_address: str, start: Start) -> None:
    worker = start()
    target = worker.call("open_owner")
    async with StoreCaller(store_address) as caller:
        held, _, _ = await put_from(caller, worker, target, 2)
        metadata = target["agent_metadata"]
        flipped = f"{int(metadata[:2], 16) ^ 0xFF:02x}{metadata[2:]}"
        changes: list[dict[str, Any]] = [
            {"agent_metadata": flipped},
            {"agent_metadata": ""},
            {"num_pages": 0},
            {"base_address": 2**64 - 1},
            {"memory_type": "FILE"},
            {"agent_name": "somebody-else"},
        ]
        for change in changes:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await caller.put(Chain(1), [0], [1], target | change, [0])
            assert from_rpc_error(error.value).reason in ("TRANSPORT_MISMATCH", "TRANSFER_FAILED")
        with pytest.raises(grpc.aio.AioRpcError):
            await caller.put(Chain(1), [0], [1], target, [NUM_PAGES])
        other_version = await caller.put(Chain(1), [0], [1], target | {"version": "9"}, [0])
        assert other_version.send_data
        assert await caller.look_up(held) == 2
        await caller.settled()
        await put_from(caller, worker, target, 3)


async def test_concurrent_puts_of_the_same_pages(store_address: str, start: Start) -> None:
    workers = [start(), start()]
    targets = [worker.call("open_owner") for worker in workers]
    for worker in workers:
        worker.call("fill", value=9)
    async with StoreCaller(store_address) as caller:
        chain = Chain(30)
        digests = workers[0].call("digests", pages=list(range(30)))
        results = await asyncio.gather(
            *(
                caller.put(
                    chain, range(30), digests, target, range(30), source_id=f"worker-{index}"
                )
                for index, target in enumerate(targets)
                for _ in range(3)
            )
        )
        assert sum(result.stored_pages for result in results) == 30
        assert sum(result.present_pages for result in results) == 5 * 30
        await caller.settled()


async def test_over_tcp_pages_are_taken_as_data_and_filled_all_the_same(
    tmp_path: Path, start: Start
) -> None:
    worker = start(lanes="tcp")
    target = worker.call("open_owner")
    with store_process(tmp_path, environment={"UCX_TLS": "tcp"}) as (_, ready):
        async with StoreCaller(ready["address"]) as caller:
            chain, contents = Chain(5), random_pages(5, PAGE_BYTES)
            digests = worker.call("digests", pages=list(range(5)))
            refused = await caller.put(chain, range(5), digests, target, range(5))
            assert (refused.stored_pages, refused.send_data) == (0, True)
            assert (await caller.put_data(chain, range(5), contents)).stored_pages == 5
            await fill_into(caller, worker, target, chain)
            await caller.settled()


@pytest.mark.full_after(1)
@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
async def test_a_source_that_stands_still_costs_its_put_and_nothing_else(
    tmp_path: Path, start: Start, ending: signal.Signals
) -> None:
    """The read waits for the connection; its pages are free once its agent is gone."""
    num_pages = 32
    stopped, healthy = start(num_pages, LARGE_BYTES), start(num_pages, LARGE_BYTES)
    stopped_at, healthy_at = stopped.call("open_owner"), healthy.call("open_owner")
    digests = stopped.call("digests")
    memory = str(40 * LARGE_BYTES)
    with store_process(tmp_path, "--memory-bytes", memory, "--put-timeout-s", "3") as (_, ready):
        async with StoreCaller(ready["address"]) as caller:
            held, held_digests, _ = await put_from(caller, healthy, healthy_at, 4)
            stopped.stop()
            chain = Chain(num_pages)
            put = asyncio.create_task(
                caller.put(
                    chain, range(num_pages), digests, stopped_at, range(num_pages), source_id="s"
                )
            )
            while (await caller.stats()).pinned_pages < num_pages:
                await asyncio.sleep(0.01)
            if ending == signal.SIGKILL:
                stopped.signal(signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await put
            assert from_rpc_error(error.value).reason == "TRANSFER_FAILED"
            assert await fill_into(caller, healthy, healthy_at, held) == held_digests
            stats = await caller.settled()
            assert stats.cached_pages == 4
            # New pages take the places of those that were never read, and keep their bytes.
            other, other_digests, _ = await put_from(caller, healthy, healthy_at, num_pages)
            stopped.signal(ending)
            await asyncio.sleep(0.3)
            if await caller.look_up(other) == num_pages:
                assert await fill_into(caller, healthy, healthy_at, other) == other_digests
            if ending == signal.SIGCONT:  # It has not suffered, and its next put is taken.
                again = await caller.put(chain, [0, 1], digests[:2], stopped_at, [0, 1])
                assert again.stored_pages == 2
            await caller.settled()


async def test_an_owner_killed_in_mid_fill_lets_the_pages_go(tmp_path: Path, start: Start) -> None:
    num_pages = 48
    owner, source = start(num_pages, LARGE_BYTES), start(num_pages, LARGE_BYTES)
    owner_at, source_at = owner.call("open_owner"), source.call("open_owner")
    with store_process(tmp_path, "--memory-bytes", str(64 * LARGE_BYTES)) as (_, ready):
        async with StoreCaller(ready["address"]) as caller:
            chain, digests, _ = await put_from(caller, source, source_at, num_pages)
            owner.stop()
            call = await caller.open_fill(
                fill_handle(chain, 0, None, caller.epoch, target=owner_at)
            )
            assert (await call.read()).WhichOneof("event") == "accepted"
            assert (await caller.stats()).pinned_pages == num_pages
            owner.signal(signal.SIGKILL)
            events = []
            while isinstance(event := await call.read(), kv_pb2.FillEvent):
                events.append(event)
            assert events[-1].WhichOneof("event") == "failed"
            await caller.settled()
            assert await fill_into(caller, source, source_at, chain) == digests


async def test_a_killed_store_leaves_its_workers_alive(tmp_path: Path, start: Start) -> None:
    worker = start()
    target = worker.call("open_owner")
    for attempt in range(2):
        name = f"store{attempt}"
        with store_process(tmp_path, name=name) as (process, ready):
            async with StoreCaller(ready["address"]) as caller:
                chain, digests, _ = await put_from(caller, worker, target, 30)
                assert await fill_into(caller, worker, target, chain) == digests
                busy = [
                    asyncio.create_task(
                        caller.put(Chain(30), range(30), digests, target, range(30))
                    )
                    for _ in range(3)
                ]
                await asyncio.sleep(random.random() * 0.02)
                process.send(signal.SIGKILL)
                await asyncio.gather(*busy, return_exceptions=True)
                worker.call("randomise")


async def test_descriptors_and_threads_do_not_grow(store_address: str, start: Start) -> None:
    worker = start()
    target = worker.call("open_owner")
    async with StoreCaller(store_address) as caller:
        (pid,) = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == int(store_address.rpartition(":")[2])
        ]
        assert pid is not None
        process = psutil.Process(pid)

        async def several(count: int) -> None:
            for _ in range(count):
                chain, digests, _ = await put_from(caller, worker, target, random.randint(1, 20))
                assert await fill_into(caller, worker, target, chain) == digests
                call = await caller.open_fill(fill_handle(chain, 0, None, caller.epoch))
                call.cancel()

        await several(20)
        await caller.settled()
        before = (process.num_fds(), process.num_threads())
        await several(330)
        await caller.settled()
        after = (process.num_fds(), process.num_threads())
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 4  # The pool of threads grows to its bound.


def test_the_store_starts_without_torch(tmp_path: Path) -> None:
    code = """
import sys
for name in ("torch", "triton", "transformers", "safetensors", "tokenizers", "msgspec"):
    sys.modules[name] = None
from weft.kvstore.main import main
sys.exit(main(sys.argv[1:]))
"""
    flags = ["--transport", "nixl", "--ready-file", str(tmp_path / "ready.json")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(600):
            if (tmp_path / "ready.json").exists() or process.poll() is not None:
                break
            asyncio.run(asyncio.sleep(0.05))
        assert (tmp_path / "ready.json").exists(), process.communicate()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_store_on_the_same_port_says_so(store_address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft.cli", "serve", "kvstore", "--port"]
    done = subprocess.run(
        [*command, store_address.rpartition(":")[2]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "--port" in done.stderr
