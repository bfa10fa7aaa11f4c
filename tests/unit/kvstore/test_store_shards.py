"""Replicas of the KV store: who has which pages, and what a lost one costs."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.common.worker.store_client import StoreClient
from weft.common.worker.store_replica import Stored, StoredRange
from weft.contract.keys import PageKeys
from weft.contract.messages import Inbox
from weft.contract.store import StoreAnswer, StoreLookup, StorePut, StorePutResult
from weft.engine.base.shards import MAX_PAGES, ranked, shard_start, stretches

PAGE = 4
NAMESPACE = bytes(32)


@given(st.integers(0, 1000))
def test_stretches_are_without_gaps_and_everybody_cuts_alike(num_pages: int) -> None:
    found = list(stretches(num_pages))
    pages = [index for first, end in found for index in range(first, end)]
    assert pages == list(range(num_pages))
    assert all(shard_start(index) == first for first, end in found for index in range(first, end))
    assert all(end - first <= MAX_PAGES for first, end in found)


def test_a_lost_replica_moves_only_its_own() -> None:
    names = [f"10.0.0.{number}:50060" for number in range(5)]
    shards = [secrets.token_bytes(32) for _ in range(2000)]
    before = {shard: ranked(names, shard) for shard in shards}
    share = Counter(order[0] for order in before.values())
    assert min(share.values()) > 2000 / 5 * 0.7
    left = [name for name in names if name != names[2]]
    for shard in shards:
        assert ranked(left, shard) == [name for name in before[shard] if name != names[2]]
    random.shuffle(names)
    assert all(ranked(names, shard) == before[shard] for shard in shards)


class FakeReplica:
    """A replica that is a set of keys."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.keys: set[bytes] = set()
        self.is_resting = False
        self.is_lost = False
        self.num_calls = 0

    @property
    def is_away(self) -> bool:
        return self.is_resting

    async def look_up(self, lookup: StoreLookup, keys: Sequence[bytes]) -> StoredRange | None:
        self.num_calls += 1
        if self.is_lost:
            self.is_resting = True
            return None
        leading = next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))
        return StoredRange(leading, f"id of {self.address}", 7)

    async def put(self, put: StorePut, indices: Sequence[int]) -> Stored | None:
        self.num_calls += 1
        if self.is_lost:
            self.is_resting = True
            return None
        new = {put.keys[index] for index in indices} - self.keys
        self.keys |= new
        return Stored(len(new), wants_data=False)


class FakeEngine:
    def __init__(self) -> None:
        self.inboxes: asyncio.Queue[Inbox] = asyncio.Queue()

    def send(self, inbox: Inbox) -> None:
        self.inboxes.put_nowait(inbox)


class Bench:
    def __init__(self, num_replicas: int) -> None:
        self.engine: Any = FakeEngine()
        self.replicas: list[Any] = [
            FakeReplica(f"replica-{number}:1") for number in range(num_replicas)
        ]
        self.client = StoreClient(self.engine, self.replicas)

    async def put(self, keys: Sequence[bytes], first: int = 0) -> StorePutResult:
        put = StorePut(
            put=1,
            namespace=NAMESPACE,
            keys=list(keys[first:]),
            parents=[b""] * (len(keys) - first),
            shards=[keys[shard_start(index)] for index in range(first, len(keys))],
            digests=[0] * (len(keys) - first),
            pages=list(range(len(keys) - first)),
            source=None,
            data=[],
        )
        self.client.put(put)
        (result,) = (await asyncio.wait_for(self.engine.inboxes.get(), 30)).store_put_results
        return result

    async def look_up(self, keys: Sequence[bytes]) -> StoreAnswer:
        self.client.look_up(StoreLookup(lookup=1, namespace=NAMESPACE, keys=list(keys)))
        (answer,) = (await asyncio.wait_for(self.engine.inboxes.get(), 30)).store_answers
        return answer


def keys_of(tokens: list[int]) -> list[bytes]:
    return PageKeys(NAMESPACE, PAGE).upto(tokens, len(tokens) // PAGE)


def tokens_of(num_pages: int) -> list[int]:
    return [random.randrange(2**31) for _ in range(num_pages * PAGE)]


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
async def test_what_was_put_in_parts_is_found_in_whole(num_replicas: int) -> None:
    bench = Bench(num_replicas)
    common = tokens_of(30)
    prompts = [keys_of(common + tokens_of(200)) for _ in range(3)]
    for keys in prompts:
        assert (await bench.put(keys[:100])).is_answered
        assert (await bench.put(keys, first=100)).is_answered
    for keys in prompts:
        answer = await bench.look_up(keys)
        assert sum(segment.num_pages for segment in answer.segments) == 230
        assert answer.epochs.keys() <= {replica.address for replica in bench.replicas}
        first = 0
        for segment in answer.segments:
            (replica,) = (r for r in bench.replicas if r.address == segment.address)
            assert set(keys[first : first + segment.num_pages]) <= replica.keys
            assert segment.store_id == f"id of {segment.address}"
            first += segment.num_pages
    held = [replica.keys for replica in bench.replicas]
    assert sum(len(keys) for keys in held) == len(set().union(*held)), "a page is held twice"


async def test_a_lost_replica_is_a_miss_from_its_first_stretch_on() -> None:
    bench = Bench(3)
    keys = keys_of(tokens_of(230))
    await bench.put(keys)
    lost = next(r for r in bench.replicas if r.address == ranked_first(bench, keys[8]))
    lost.is_lost = True
    expected = 0
    for first, end in stretches(230):
        if ranked_first(bench, keys[first]) == lost.address:
            break
        expected = end
    answer = await bench.look_up(keys)
    assert sum(segment.num_pages for segment in answer.segments) == expected < 230
    assert lost.address not in answer.epochs
    calls = lost.num_calls
    # It rests: others take what it should have, and have it from then on.
    result = await bench.put(keys)
    assert result.is_answered
    answer = await bench.look_up(keys)
    assert sum(segment.num_pages for segment in answer.segments) == 230
    assert lost.num_calls == calls


async def test_without_any_replica_everything_is_a_miss() -> None:
    bench = Bench(2)
    keys = keys_of(tokens_of(40))
    for replica in bench.replicas:
        replica.is_lost = True
    for _ in range(2):
        answer = await bench.look_up(keys)
        assert (answer.segments, answer.epochs) == ([], {})
        assert not (await bench.put(keys)).is_answered


def ranked_first(bench: Bench, shard: bytes) -> str:
    return ranked([replica.address for replica in bench.replicas], shard)[0]
