"""The store's disk: pages that the arena gave up, or an earlier store had; quotas of namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from weft.contract.errors import ConfigError
from weft.contract.pages import Page
from weft.kvstore.backends.disk import DiskBackend
from weft.kvstore.store import KvStore
from weft.pages.tiers.disk import PageFiles, discard_others
from weft.pages.tiers.keyed import PagePlace
from weft.testing.services.kv_chain import Chain, Filled, StoreCaller, random_pages
from weft.testing.services.store_server import store_here

PAGE_BYTES = 4096
ARENA = {"memory_bytes": 16 * PAGE_BYTES}
Held = tuple[Chain, NDArray[np.uint8]]


@contextlib.asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[tuple[KvStore, StoreCaller]]:
    """A store with a folder on disk, and a client of it."""
    settings = ARENA | changes | {"disk_cache_dir": folder}
    async with store_here(**settings) as (store, address), StoreCaller(address) as caller:
        yield store, caller


async def put(caller: StoreCaller, num_pages: int, **changes: Any) -> Held:
    chain, content = Chain(num_pages, **changes), random_pages(num_pages, PAGE_BYTES)
    answer = await caller.put_data(chain, range(num_pages), content)
    assert answer.stored_pages == num_pages
    return chain, content


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def on_disk(store: KvStore, num_pages: int) -> None:
    await until(lambda: disk(store).counts().cached >= num_pages)


def disk(store: KvStore) -> Any:
    assert store._arena_pages is not None
    assert isinstance(store._arena_pages.backend, DiskBackend)
    return store._arena_pages.backend.disk


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.*") if path.is_file())


def num_folders(folder: Path) -> int:
    return sum(path.is_dir() for path in folder.rglob("*"))


def check(filled: Filled, content: NDArray[np.uint8], num_pages: int) -> None:
    assert filled.kinds[-1] == "done"
    assert sorted(filled.pages) == list(range(num_pages))
    for index, page in filled.pages.items():
        assert bytes(page) == content[index].tobytes()


async def test_what_the_arena_gave_up_comes_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        held = []
        for _ in range(4):
            held.append(await put(caller, 10))
            await on_disk(store, 10 * len(held))
        for chain, content in random.sample(held, 4):
            assert await caller.look_up(chain) == 10
            check(await caller.fill(chain), content, 10)
        stats = await caller.settled()
        (tier,) = stats.tiers
        assert (tier.name, tier.cached_pages) == ("disk", 40)
        assert tier.counters["loaded_pages"] >= 24
        assert tier.counters["corrupt_pages"] == 0
        disk(store).pages.check_integrity()


async def test_pages_outlive_the_store(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        chain, content = await put(caller, 8)
        await on_disk(store, 8)
        with pytest.raises(ConfigError, match="another process"):
            async with store_here(disk_cache_dir=tmp_path):
                pass
    async with opened(tmp_path) as (store, caller):
        assert await caller.look_up(Chain(3)) == 0
        assert await caller.look_up(chain) == 8
        check(await caller.fill(chain), content, 8)


async def test_a_flush_forgets_what_an_earlier_store_left(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        chain, _ = await put(caller, 8)
        await on_disk(store, 8)
    async with opened(tmp_path) as (store, caller):
        assert await store.flush() == 8
        assert await caller.look_up(chain) == 0
        await until(
            lambda: not [path for path in files(tmp_path) if chain.keys[0].hex() in path.name]
        )


async def test_another_page_size_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        await put(caller, 8)
        await on_disk(store, 8)
    async with opened(tmp_path) as (store, caller):
        chain, content = Chain(2), random_pages(2, 2 * PAGE_BYTES)
        assert (await caller.put_data(chain, range(2), content)).stored_pages == 2
        await on_disk(store, 2)
        await until(lambda: len(files(tmp_path)) == 2)
        check(await caller.fill(chain), content, 2)


async def test_flipped_bytes_on_disk_are_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        chain, content = await put(caller, 8)
        await on_disk(store, 8)
    (path,) = [path for path in files(tmp_path) if path.name.startswith(chain.keys[5].hex())]
    changed = bytearray(path.read_bytes())
    changed[random.randrange(PAGE_BYTES)] ^= 1 << random.randrange(8)
    path.write_bytes(changed)
    async with opened(tmp_path) as (store, caller):
        assert await caller.look_up(chain) == 8
        check(await caller.fill(chain), content, 5)
        assert await caller.look_up(chain) == 5
        stats = await caller.settled()
        assert stats.tiers[0].counters["corrupt_pages"] == 1


async def test_a_full_disk_is_counted_and_nothing_else(tmp_path: Path) -> None:
    """The system refuses every byte of a page's file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with opened(tmp_path) as (store, caller):
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        try:
            chain, content = await put(caller, 8)
            await until(lambda: disk(store).counters.failed_saves > 0)
            check(await caller.fill(chain), content, 8)
            await caller.settled()
            await until(lambda: not store._arena_pages.backend._saving)  # type: ignore[union-attr]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert disk(store).counts().cached == 0
        assert not files(tmp_path)


async def test_a_disk_that_never_answers_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's file is a pipe that nobody writes to: opening it waits for ever."""
    monkeypatch.setattr("weft.kvstore.backends.fetching.FETCH_TIMEOUT_S", 0.3)
    has_scanned = threading.Event()

    def scan(files: PageFiles, page_bytes: int) -> None:
        discard_others(files, page_bytes)
        has_scanned.set()

    monkeypatch.setattr("weft.kvstore.backends.disk.discard_others", scan)
    async with opened(tmp_path) as (store, caller):
        chain, _ = await put(caller, 8)
        await on_disk(store, 8)
    async with opened(tmp_path) as (store, caller):
        await put(caller, 1)
        await on_disk(store, 9)
        await until(has_scanned.is_set)  # It removes files of other sizes, as a pipe is.
        (path,) = [path for path in files(tmp_path) if path.name.startswith(chain.keys[0].hex())]
        path.unlink()
        os.mkfifo(path)
        assert await caller.look_up(chain) == 8
        async with asyncio.timeout(60):
            assert (await caller.fill(chain)).kinds[-1] == "declined"
            while await caller.look_up(chain):
                await asyncio.sleep(0.05)
        other, content = await put(caller, 2)
        assert await caller.look_up(other) == 2
        check(await caller.fill(other), content, 2)
        assert disk(store).counters.stalls > 0
        os.close(os.open(path, os.O_WRONLY))
        async with asyncio.timeout(60):  # Once all late reads have ended, the disk serves again.
            while not await caller.look_up(chain, first=1):
                await asyncio.sleep(0.05)
        assert disk(store).counters.failed_loads > 0
        assert await caller.look_up(chain, first=1) == 7
        assert await caller.look_up(chain) == 0
        await caller.settled()


async def test_a_flush_empties_the_disk_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as (store, caller):
        chain, _ = await put(caller, 8)
        await on_disk(store, 8)
        assert await store.flush() == 16
        assert await caller.look_up(chain) == 0
        await until(lambda: not files(tmp_path))


async def test_a_namespace_keeps_to_its_quota(tmp_path: Path) -> None:
    """One that puts without end pushes out its own pages, not those of another."""
    quotas = {"namespace_quota": 0.5, "disk_cache_bytes": 30 * PAGE_BYTES}
    async with opened(tmp_path, **quotas) as (store, caller):
        quiet, content = await put(caller, 5)
        await on_disk(store, 5)
        loud = bytes(random.randbytes(32))
        for _ in range(8):
            chain, _ = await put(caller, 5, namespace=loud)
            assert await caller.look_up(chain) == 5
            await caller.settled()
        stats = await caller.stats()
        assert stats.cached_pages <= 5 + 7
        assert stats.counters["quota_evicted_pages"] > 0
        assert stats.tiers[0].cached_pages <= 5 + 15
        check(await caller.fill(quiet), content, 5)
        too_much = Chain(12, namespace=loud)
        answer = await caller.put_data(too_much, range(12), random_pages(12, PAGE_BYTES))
        assert answer.stored_pages == 7
        assert answer.refused_pages == 5


def stop_reads(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Makes reads wait; the events tell that one does, and let them go on."""
    begun, going_on = threading.Event(), threading.Event()
    read = disk(store).medium.read

    def slowly(place: PagePlace, into: Page) -> bool:
        begun.set()
        going_on.wait(30)
        return bool(read(place, into))

    monkeypatch.setattr(disk(store).medium, "read", slowly)
    monkeypatch.setattr("weft.kvstore.backends.fetching.FETCH_TIMEOUT_S", 30.0)
    return begun, going_on


async def put_cold(store: KvStore, caller: StoreCaller) -> Chain:
    """Twenty pages that are on the disk alone."""
    chain, _ = await put(caller, 20)
    await on_disk(store, 20)
    assert store._arena_pages is not None
    store._arena_pages.pages.flush()
    return chain


async def test_pages_in_the_arena_wait_for_no_other_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, memory_bytes=64 * PAGE_BYTES) as (store, caller):
        cold = await put_cold(store, caller)
        hot, content = await put(caller, 8)
        _, going_on = stop_reads(store, monkeypatch)
        assert await caller.look_up(cold) == 20
        async with asyncio.timeout(20):
            check(await caller.fill(hot), content, 8)
        going_on.set()


async def test_who_waits_no_longer_says_nothing_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that goes during a read of moderate length is no sign of a stalled disk."""
    async with opened(tmp_path, memory_bytes=64 * PAGE_BYTES) as (store, caller):
        cold = await put_cold(store, caller)
        assert store._arena_pages is not None
        begun, going_on = stop_reads(store, monkeypatch)
        fetch = asyncio.create_task(store._arena_pages.backend.fetch(cold.keys))
        await until(begun.is_set)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        assert await caller.look_up(cold) == 20
        assert disk(store).counters.stalls == 0
        going_on.set()


@pytest.mark.parametrize("num_bytes", [0, PAGE_BYTES // 2])
async def test_a_file_cut_short_costs_its_own_page_alone(tmp_path: Path, num_bytes: int) -> None:
    """As a loss of power leaves the last ones."""
    async with opened(tmp_path) as (store, caller):
        chain, content = await put(caller, 8)
        await on_disk(store, 8)
    (path,) = [path for path in files(tmp_path) if path.name.startswith(chain.keys[7].hex())]
    os.truncate(path, num_bytes)
    os.utime(path, (time.time() + 1, time.time() + 1))
    async with opened(tmp_path) as (store, caller):
        assert await caller.look_up(chain) == 7
        check(await caller.fill(chain), content, 7)
        await until(lambda: len(files(tmp_path)) == 7)


async def test_what_is_read_from_the_arena_stays_on_disk(tmp_path: Path) -> None:
    settings = {"memory_bytes": 64 * PAGE_BYTES, "disk_cache_bytes": 64 * PAGE_BYTES}
    async with opened(tmp_path, **settings) as (store, caller):
        hot, content = await put(caller, 10)
        for number in range(8):
            await on_disk(store, min(64, 10 * (number + 1)))
            await put(caller, 10)
            assert await caller.look_up(hot) == 10
        await until(lambda: not store._arena_pages.backend._saving)  # type: ignore[union-attr]
    async with opened(tmp_path, **settings) as (store, caller):
        assert await caller.look_up(hot) == 10
        check(await caller.fill(hot), content, 10)


async def test_namespaces_leave_no_folders(tmp_path: Path) -> None:
    async with opened(tmp_path, disk_cache_bytes=16 * PAGE_BYTES) as (store, caller):
        for _ in range(150):
            await put(caller, 4, namespace=random.randbytes(32))
            await until(lambda: not store._arena_pages.backend._saving)  # type: ignore[union-attr]
        assert len(files(tmp_path)) <= 16
        assert num_folders(tmp_path) <= 2 + 256
