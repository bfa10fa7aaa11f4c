"""Reads that do not end: their pages are out of reach until the reading agent is gone."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from weft.common.rpc.server import QUARANTINE_STATUS
from weft.contract.codec.pairs import PUT
from weft.contract.handle import NixlTargetInfo
from weft.contract.store import PutOrder
from weft.kvstore import main, puts, transport
from weft.kvstore.counters import Counters
from weft.kvstore.pages import PageStore
from weft.kvstore.puts import Puts
from weft.kvstore.settings import KvStoreSettings
from weft.pages.transfer.digest import digest_pages_numpy
from weft.pages.transfer.nixl import TransferError
from weft.testing.services.kv_chain import Chain, StoreCaller, put_header, random_pages
from weft.v1 import kv_pb2

PAGE_BYTES = 64
NUM_PAGES = 17


class FakeReaders:
    """Agents over an array; `behave` says what a read does, `num_refusals` how often one lives."""

    def __init__(self, source: np.ndarray, destination: np.ndarray) -> None:
        self._source, self._destination = source, destination
        self.behave = "done"
        self.num_refusals = 0
        self.now, self.step_s = 0.0, 0.05
        """The time, as the puts of `bench` have it, and how far a look at a read takes it."""
        self.is_closed = threading.Event()

    def check(self, target: NixlTargetInfo) -> None:
        pass

    def read(
        self, peer: Any, target: NixlTargetInfo, remote: Sequence[int], local: Sequence[int]
    ) -> Any:
        if self.behave == "refuse":
            raise TransferError("nothing was posted")
        if self.behave == "bug":
            raise RuntimeError("what was posted is not known")
        if self.behave == "done":
            self._destination[list(local)] = self._source[list(remote)]
        return SimpleNamespace(poll=self._poll)

    def _poll(self) -> str:
        if self.behave == "fail":
            raise TransferError("the source is gone", may_still_arrive=True)
        self.now += self.step_s
        return "done" if self.behave == "done" else "pending"

    def close_peer(self, peer: Any, *, timeout_s: float) -> None:
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            raise TransferError("it lives on", may_still_arrive=True)
        self.is_closed.set()


class Bench:
    """Puts over fake agents."""

    def __init__(self) -> None:
        self.contents = random_pages(NUM_PAGES, PAGE_BYTES)
        self.pages = PageStore(np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8))
        self.readers = FakeReaders(self.contents, self.pages.pool)
        self.counters = Counters()
        transport: Any = SimpleNamespace(readers=self.readers, nixl_version="1")
        self.puts = Puts(
            self.pages,
            transport,
            self.counters,
            ThreadPoolExecutor(2),
            max_puts=4,
            timeout_s=0.1,
            data_timeout_s=1.0,
        )

    def order(self, chain: Chain, count: int) -> PutOrder:
        source_pages = random.sample(range(NUM_PAGES), count)
        digests = digest_pages_numpy(self.contents, source_pages).tolist()
        header = put_header(chain, range(count), digests, source_pages, PAGE_BYTES)
        header.source.CopyFrom(kv_pb2.NixlTarget(version="1"))
        return PUT.decode(header)

    async def settle(self) -> None:
        for _ in range(2000):
            counts = self.pages.counts()
            if not (counts.used or counts.quarantined):
                break
            await asyncio.sleep(0.02)
        assert (counts.used, counts.quarantined) == (0, 0)
        self.pages.memory.check_integrity()


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    clock = SimpleNamespace(monotonic=lambda: made.readers.now, sleep=time.sleep)
    monkeypatch.setattr(puts, "time", clock)
    return made


@pytest.mark.parametrize("behaviour", ["hang", "fail", "bug"])
async def test_pages_stay_in_quarantine_until_the_agent_is_gone(
    bench: Bench, behaviour: str
) -> None:
    held, chain = Chain(2), Chain(4)
    assert (await bench.puts.put(bench.order(held, 2))).stored == 2
    bench.readers.behave = behaviour
    bench.readers.num_refusals = 1 << 30
    with pytest.raises((TransferError, RuntimeError)):
        await bench.puts.put(bench.order(chain, 4))
    counts = bench.pages.counts()
    assert (counts.quarantined, counts.cached, counts.used) == (4, 2, 0)
    assert bench.puts.num_open == 0
    # They are not offered to anyone else, and the same pages may be put again elsewhere.
    bench.readers.behave = "done"
    assert (await bench.puts.put(bench.order(chain, 4))).stored == 4
    other = Chain(16)
    outcome = await bench.puts.put(bench.order(other, 16))
    assert outcome.stored == NUM_PAGES - 1 - 4
    bench.readers.num_refusals = 3
    await asyncio.to_thread(bench.readers.is_closed.wait, 60)
    await bench.settle()
    assert bench.counters.puts_failed == 1


async def test_a_read_that_was_not_posted_needs_no_quarantine(bench: Bench) -> None:
    bench.readers.behave = "refuse"
    with pytest.raises(TransferError, match="nothing was posted"):
        await bench.puts.put(bench.order(Chain(3), 3))
    counts = bench.pages.counts()
    assert (counts.quarantined, counts.used, counts.free) == (0, 0, counts.total)


async def test_a_caller_that_goes_away_leaves_the_read_in_charge_of_its_pages(
    bench: Bench,
) -> None:
    bench.readers.behave, bench.readers.step_s = "hang", 0.0
    call = asyncio.create_task(bench.puts.put(bench.order(Chain(3), 3)))
    async with asyncio.timeout(60):
        while bench.pages.counts().used < 3:
            await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert bench.pages.counts().used == 3
    bench.readers.step_s = 0.05
    await bench.settle()
    assert bench.readers.is_closed.is_set()
    assert bench.puts.num_open == 0


class UndeadReaders(FakeReaders):
    """Reads never end, and their agent cannot be destroyed."""

    def __init__(self, name: str, region: np.ndarray) -> None:
        super().__init__(region, region)
        self.behave = "hang"
        self.num_refusals = 1 << 30

    def describe(self) -> str:
        return "fake"

    def close_idle(self) -> int:
        return 0

    def close(self) -> None:
        raise TransferError("it lives on", may_still_arrive=True)


async def test_a_store_that_loses_its_arena_drains_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = SimpleNamespace(describe=str, close_idle=int, close=bool)
    monkeypatch.setattr(transport, "nixl_available", lambda: (True, ""))
    monkeypatch.setattr(transport, "load_binding", lambda: SimpleNamespace(version="1"))
    monkeypatch.setattr(transport, "PoolRegion", SimpleNamespace(of_array=lambda pool: pool))
    monkeypatch.setattr(transport, "SendAgents", lambda name, region: senders)
    monkeypatch.setattr(transport, "ReadAgents", UndeadReaders)
    monkeypatch.setattr(main, "configure_logging", lambda *arguments: None)
    ready = tmp_path / "ready.json"
    settings = KvStoreSettings(
        memory_bytes=1 << 16,
        metrics_port=None,
        ready_file=ready,
        put_timeout_s=0.3,
        transport="nixl",
    )
    running = asyncio.create_task(main.run_store(settings))
    async with asyncio.timeout(60):
        while not ready.exists():
            await asyncio.sleep(0.02)
    num_pages = (1 << 16) // PAGE_BYTES - 1
    async with StoreCaller(json.loads(ready.read_text())["address"]) as caller:
        for count, too_many in ((num_pages // 20, False), (num_pages // 10, True)):
            header = put_header(
                Chain(count), range(count), [1] * count, list(range(count)), PAGE_BYTES
            )
            header.source.CopyFrom(kv_pb2.NixlTarget(version="1"))
            with pytest.raises(grpc.aio.AioRpcError, match="did not end within"):
                await caller.stub.Put(header, timeout=60)
            if not too_many:
                await asyncio.sleep(1)
                assert (await caller.stats()).quarantined_pages == count
                assert not running.done()
    assert await asyncio.wait_for(running, 60) == QUARANTINE_STATUS


async def test_a_watch_that_fails_is_no_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> None:
        raise KeyError("of the watch")

    monkeypatch.setattr(main, "_end_by_quarantine", fails)
    # The test runner's handlers stay.
    monkeypatch.setattr(main, "configure_logging", lambda *_: None)
    ready = tmp_path / "ready.json"
    settings = KvStoreSettings(memory_bytes=1 << 16, metrics_port=None, ready_file=ready)
    running = asyncio.create_task(main.run_store(settings))
    async with asyncio.timeout(60):
        while not ready.exists():
            await asyncio.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    ours = [record for record in caplog.records if record.name.startswith("weft")]
    failures = [str(record.exc_info) for record in ours if record.exc_info]
    assert ["of the watch" in failure for failure in failures] == [True]
