"""Events of the prefix cache: what is told equals what is held, for whoever listens how ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.common.worker.kv_feed import KvFeed
from weft.contract.keys import ROOT_KEY, PageKeys, short_key
from weft.contract.kv_changes import MAX_CHANGE_PAGES, KvChange, KvRun
from weft.pages.memory.events import KvEvents
from weft.pages.memory.page_memory import OutOfPages, PageMemory
from weft.pages.memory.prefix_cache import PageKeyCache
from weft.v1 import worker_pb2

PAGE = 4


def apply(held: dict[int, int], changes: Iterable[KvChange]) -> None:
    """Replays changes: parent by key."""
    for change in changes:
        stored = {key for run in change.stored for key in run.keys}
        assert not stored & set(change.removed)
        for key in change.removed:
            del held[key]
        for run in change.stored:
            assert 0 < len(run.keys) <= 256 // PAGE
            parent = run.parent
            for key in run.keys:
                assert key not in held
                held[key], parent = parent, key


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_changes_replay_to_what_the_cache_holds(seed: int) -> None:
    rng = random.Random(seed)
    index, events = PageKeyCache(), KvEvents(PAGE)
    memory = PageMemory(24, index)
    memory.on_published.append(lambda _, key, parent: events.stored(key, parent))
    memory.on_evicted.append(events.removed)
    prompts = [[rng.randrange(2) for _ in range(6 * PAGE)] for _ in range(5)]
    parents: dict[bytes, bytes] = {}
    in_use: list[list[int]] = []
    held: dict[int, int] = {}
    sequence = 0
    for _ in range(80):
        act = rng.random()
        if act < 0.55:
            keys = PageKeys(bytes(32), PAGE).upto(rng.choice(prompts), rng.randint(1, 6))
            parents |= dict(zip(keys, [ROOT_KEY, *keys], strict=False))
            pages = index.match(keys)
            memory.retain(pages)
            num_known = len(pages)
            try:
                pages += memory.allocate(len(keys) - len(pages))
            except OutOfPages:
                memory.release(pages)
                continue
            for at in range(num_known, len(keys)):
                # A page further on may be there still, though one before it is gone.
                if index.insert(keys[at], pages[at]):
                    memory.published(pages[at], keys[at], parents[keys[at]])
            in_use.append(pages)
        elif act < 0.9 and in_use:
            memory.release(in_use.pop(rng.randrange(len(in_use))))
        elif act < 0.95:
            memory.flush_cache()
        if rng.random() < 0.5:
            changes = events.take()
            assert [change.sequence for change in changes] == [
                sequence + 1 + number for number in range(len(changes))
            ]
            sequence += len(changes)
            apply(held, changes)
            expected = {
                short_key(key): short_key(parent)
                for key, parent in parents.items()
                if index.match([key])
            }
            assert held == expected
    assert not KvEvents(PAGE).take()


def test_what_comes_and_goes_within_a_step_is_not_told() -> None:
    events = KvEvents(PAGE)
    keys = [bytes([number]) * 32 for number in range(1, 4)]
    events.stored(keys[0], ROOT_KEY)
    events.removed(keys[0])
    assert events.take() == []
    events.stored(keys[0], ROOT_KEY)
    events.take()
    events.removed(keys[0])
    events.stored(keys[0], ROOT_KEY)
    events.stored(keys[1], keys[0])
    (change,) = events.take()
    assert change.sequence == 2
    assert change.removed == []
    assert [run.keys for run in change.stored] == [[short_key(keys[1])]]
    assert change.stored[0].parent == short_key(keys[0])


def test_large_changes_are_split() -> None:
    events = KvEvents(16)
    keys = [number.to_bytes(8, "little") + bytes(24) for number in range(1, 40_001)]
    for key, parent in zip(keys, [ROOT_KEY, *keys], strict=False):
        events.stored(key, parent)
    changes = events.take()
    assert all(change.num_pages <= MAX_CHANGE_PAGES for change in changes)
    assert all(len(run.keys) <= 16 for change in changes for run in change.stored)
    held: dict[int, int] = {}
    apply(held, changes)
    assert held == {number: number - 1 for number in range(1, 40_001)}


class Watcher:
    """Follows a feed as the contract says, with pauses; notes what it was sent."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.held: set[int] = set()
        self.sequence: int | None = None
        self.num_snapshots = 0
        self._parts: set[int] = set()

    async def follow(self, feed: KvFeed, epoch: int) -> None:
        request = worker_pb2.WatchKvRequest(epoch=epoch)
        if self.sequence is not None:
            request.after_sequence = self.sequence
        async for response in feed.watch(request):
            assert response.epoch == epoch
            if response.HasField("snapshot"):
                self._parts |= {key for run in response.snapshot.held for key in run.page_keys}
                if response.snapshot.is_last:
                    self.held, self._parts = self._parts, set()
                    self.sequence = response.snapshot.as_of_sequence
                    self.num_snapshots += 1
            for change in response.changes:
                assert self.sequence is not None
                assert change.sequence == self.sequence + 1
                self.sequence = change.sequence
                self.held -= set(change.removed_keys)
                self.held |= {key for run in change.stored for key in run.page_keys}
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.choice([0, 0.002, 0.01]))


@pytest.mark.parametrize("seed", range(5))
async def test_every_watcher_comes_to_the_same_set(seed: int) -> None:
    """Also one that is slower than the log is long, and one that broke off and goes on."""
    rng = random.Random(seed)
    feed = KvFeed("w", 7, max_log_pages=30, min_interval_s=0.0)
    watchers = [Watcher(rng) for _ in range(4)]
    tasks = [asyncio.create_task(watcher.follow(feed, 7)) for watcher in watchers]
    held: set[int] = set()
    for sequence in range(1, 400):
        removed = rng.sample(sorted(held), min(len(held), rng.randrange(3)))
        held -= set(removed)
        fresh = {rng.randrange(1, 300) for _ in range(rng.randrange(4))} - held - set(removed)
        held |= fresh
        runs = [KvRun(parent=0, keys=[key]) for key in fresh]
        feed.take([KvChange(sequence=sequence, stored=runs, removed=removed)])
        if rng.random() < 0.1:
            at = rng.randrange(len(tasks))
            tasks[at].cancel()
            await asyncio.wait([tasks[at]])
            tasks[at] = asyncio.create_task(watchers[at].follow(feed, 7))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while any(watcher.sequence != 399 for watcher in watchers):
            await asyncio.sleep(0.01)
    assert all(watcher.held == held for watcher in watchers)
    assert feed.num_pages == len(held)
    feed.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


async def test_a_watcher_goes_on_where_it_was_unless_it_cannot() -> None:
    def change(sequence: int) -> KvChange:
        run = KvRun(parent=0, keys=[100 * sequence, 100 * sequence + 1])
        return KvChange(sequence=sequence, stored=[run], removed=[])

    feed = KvFeed("w", 7, max_log_pages=4)
    feed.take(change(sequence) for sequence in range(1, 6))

    async def first(request: worker_pb2.WatchKvRequest) -> worker_pb2.WatchKvResponse:
        async for response in feed.watch(request):
            return response
        raise AssertionError("nothing came")

    known = await first(worker_pb2.WatchKvRequest(epoch=7, after_sequence=3))
    assert [one.sequence for one in known.changes] == [4, 5]
    for request in (
        worker_pb2.WatchKvRequest(),
        worker_pb2.WatchKvRequest(epoch=7),
        worker_pb2.WatchKvRequest(epoch=8, after_sequence=3),  # another incarnation's
        worker_pb2.WatchKvRequest(epoch=7, after_sequence=2),  # forgotten
        worker_pb2.WatchKvRequest(epoch=7, after_sequence=6),  # never was
    ):
        snapshot = (await first(request)).snapshot
        assert (snapshot.as_of_sequence, snapshot.is_last) == (5, True)
        assert sum(len(run.page_keys) for run in snapshot.held) == 10
