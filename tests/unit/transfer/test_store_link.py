"""What an engine asks of a KV store: each page once, bounded, never waited for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from weft.contract.handle import NixlTargetInfo
from weft.contract.keys import PieceShape, block_keys
from weft.contract.store import (
    StoreAnswer,
    StoreLookup,
    StorePut,
    StorePutResult,
    StoreSegment,
)
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import HeldPages, Request
from weft.engine.sources.carried import Carried
from weft.engine.sources.store import (
    GATHER_S,
    HELD_SHARE,
    MAX_OPEN_PUTS,
    RETRY_S,
    StoredPieces,
    StoreLink,
)
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import Node, PrefixTree
from weft.pages.transfer.digester import MAX_PUT_PAGES, MAX_QUEUED_PAGES
from weft.pages.transfer.page_pool import PagePool
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.services.fill_commands import nixl_target

PAGE = 4
OFFSET = 10_000
"""Of where the store reads a page from its number in the pool."""
TARGET = nixl_target(64, 2000)


class FakePlane:
    """Digests at once; a page's content is its number. The store reads a page at its number and
    an offset, as if it was staged."""

    staging = None
    max_put_pages = MAX_PUT_PAGES
    max_queued_pages = MAX_QUEUED_PAGES

    def __init__(self) -> None:
        self.target: NixlTargetInfo | None = TARGET
        self.port = self
        self.asked: list[tuple[int, list[int]]] = []
        self.exposed: list[int] = []
        self.has_room = True

    def read(self, page: int) -> bytes:
        return page.to_bytes(4, "little")

    def write(self, page: int, offset: int, data: bytes) -> None:
        raise AssertionError("the store link writes nothing")

    def mark(self) -> None:
        raise AssertionError("the port takes its own marks")

    def verify(self, *chunk: object) -> None:
        raise AssertionError("the store link verifies nothing")

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        if self.has_room:
            self.asked.append((number, list(pages)))
            self.exposed += [page + OFFSET for page in pages]
        return self.has_room

    def conceal(self, exposed: Sequence[int]) -> None:
        for page in exposed:
            self.exposed.remove(page)

    def fence(self) -> None:
        raise AssertionError("the store link fences nothing")


class Bench:
    """A store link with its surroundings."""

    def __init__(self, pieces: StoredPieces | None = None, num_pages: int = 4000) -> None:
        self.now = 0.0
        cache = PrefixTree(PAGE)
        self.memory = PageMemory(num_pages, cache)
        self.pages = RequestPages(self.memory, cache, PAGE)
        self.plane = FakePlane()
        self.sent: list[StoreLookup | StorePut] = []
        self.link = StoreLink(
            PAGE,
            self.memory,
            self.pages.num_cached_pages,
            self.plane,
            self.sent.append,
            lambda: self.now,
            pieces,
        )

    def request(self, num_pages: int) -> Request:
        tokens = [random.randrange(2**31) for _ in range(num_pages * PAGE + 1)]
        pages = self.memory.allocate(num_pages)
        return bare_request(
            tokens, PAGE, bytes(32), held=HeldPages(pages), num_computed=num_pages * PAGE
        )

    def puts(self) -> list[StorePut]:
        """Digests what was asked for; the puts that went out since the last call."""
        self.link.tick(is_computing=False)
        asked, self.plane.asked = self.plane.asked, []
        for tag, pages in asked:
            exposed = [page + OFFSET for page in pages]
            self.link.on_digested(tag, [page * 7 for page in pages], exposed)
        sent, self.sent[:] = list(self.sent), []
        return [message for message in sent if isinstance(message, StorePut)]

    def put_all(self) -> list[bytes]:
        """Puts all that is queued; the keys."""
        keys: list[bytes] = []
        while puts := self.puts():
            for put in puts:
                keys += put.keys
                result = StorePutResult(put=put.put, is_answered=True, stored_pages=len(put.keys))
                self.link.on_result(result)
        return keys


class OneBlock:
    """Blocks of recurrent layers, of which one is kept, behind a prompt's last page."""

    first_key = 0

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.companion: Any = self
        self.carried = (self,)
        self.shape = PieceShape(num_pages)
        self.bench = Bench(self)

    def make_pool(self) -> PagePool:
        raise AssertionError("a store copies by steps")

    def settle(self) -> None:
        """The copies are made at once."""

    def copy(self, carried: Carried, pieces: Sequence[int], namespace: bytes) -> list[list[int]]:
        return [self.bench.memory.allocate(self.num_pages, namespace) for _ in pieces]

    def kept_of(self, request: Request, first: int, end: int) -> list[tuple[Node, int]]:
        node = Node(request.namespace, b"", 0, None)
        for key in request.keys.upto(request.tokens, end):
            node = Node(b"", key, 1, node)
        return [(node, 1)]


def answer_of(lookup: StoreLookup, *num_pages: int) -> StoreAnswer:
    """Replicas hold so many pages of a prompt, one after the other."""
    names = [f"s{number}" if number else "s" for number in range(len(num_pages))]
    return StoreAnswer(
        lookup=lookup.lookup,
        segments=[
            StoreSegment(num_pages=count, store_id=name, address=f"at {name}", epoch=5)
            for name, count in zip(names, num_pages, strict=True)
        ],
        epochs={f"at {name}": 5 for name in names},
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_pages_are_held_until_the_answer_and_put_once(bench: Bench) -> None:
    request = bench.request(3)
    bench.link.offer(request, 0, 3)
    bench.link.offer(request, 0, 3)
    (put,) = bench.puts()
    assert put.keys == request.keys.upto(request.tokens, 3)
    assert put.pages == [page + OFFSET for page in request.held.pages]
    assert put.digests == [page * 7 for page in request.held.pages]
    assert (put.source, put.data) == (TARGET, [])
    bench.memory.release(request.held.pages)
    assert bench.memory.counts().used == 3
    assert len(bench.plane.exposed) == 3
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, stored_pages=3))
    assert bench.memory.counts().used == 0
    assert bench.link.num_open_pages == 0
    assert bench.plane.exposed == []
    assert bench.puts() == []


def test_pages_of_running_steps_wait_for_others(bench: Bench) -> None:
    most, bench.now = bench.plane.max_put_pages, random.uniform(0.0, 1e6)
    bench.link.offer(bench.request(2), 0, 2)
    for late_s in (0.0, GATHER_S / 2):
        bench.now += late_s
        bench.link.tick(is_computing=True)
    assert not bench.plane.asked
    bench.link.offer(bench.request(1), 0, 1)
    bench.now += 0.51 * GATHER_S
    bench.link.tick(is_computing=True)  # The first ones have waited long enough for all.
    assert [len(pages) for _, pages in bench.plane.asked] == [3]
    bench.link.offer(bench.request(most), 0, most)
    bench.link.tick(is_computing=True)
    assert [len(pages) for _, pages in bench.plane.asked] == [3, most]
    bench.put_all()
    bench.link.offer(bench.request(1), 0, 1)
    bench.link.tick(is_computing=True)
    assert not bench.plane.asked
    assert len(bench.put_all()) == 1  # Without steps nothing waits.


def test_a_put_waits_for_room_and_keeps_its_order(bench: Bench) -> None:
    request = bench.request(MAX_PUT_PAGES + 3)
    bench.link.offer(request, 0, MAX_PUT_PAGES + 3)
    bench.plane.has_room = False
    assert bench.puts() == []
    assert bench.link.num_open_pages == MAX_PUT_PAGES + 3
    bench.plane.has_room = True
    keys = [key for put in bench.puts() for key in put.keys]
    assert keys == request.keys.upto(request.tokens, MAX_PUT_PAGES + 3)


def test_few_puts_are_open_and_the_queue_is_bounded(bench: Bench) -> None:
    request = bench.request(MAX_QUEUED_PAGES + 40)
    bench.link.offer(request, 0, MAX_QUEUED_PAGES + 40)
    assert bench.link.num_open_pages == MAX_QUEUED_PAGES
    assert bench.link.counters.store_dropped_pages == 40
    puts = bench.puts()
    assert [len(put.pages) for put in puts] == [MAX_PUT_PAGES] * MAX_OPEN_PUTS
    assert bench.puts() == []
    bench.link.on_result(StorePutResult(put=puts[0].put, is_answered=True))
    assert len(bench.puts()) == 1


def test_a_share_of_a_small_pool_waits_for_a_slow_store() -> None:
    num_pages = random.randint(40, 200)
    bench, most = Bench(num_pages=num_pages + 1), num_pages // HELD_SHARE
    request = bench.request(num_pages - 2)
    for end in range(1, num_pages - 1):
        bench.link.offer(request, end - 1, end)
        bench.link.tick(is_computing=True)
        assert bench.link.num_open_pages <= most
    assert bench.link.num_open_pages == most
    assert bench.link.counters.store_dropped_pages == num_pages - 2 - most
    assert len(bench.plane.asked) == MAX_OPEN_PUTS, "a put waited for more pages than it may have"
    keys = bench.put_all()
    while bench.link.num_open_pages or len(keys) < num_pages - 2:
        bench.link.offer_again(request, num_pages - 2)
        keys += bench.put_all()
    assert keys == request.keys.upto(request.tokens, num_pages - 2)


def test_a_block_larger_than_the_share_is_put_alone() -> None:
    blocks = OneBlock(50)
    blocks.bench = bench = Bench(blocks, num_pages=101)
    request = bench.request(2)
    bench.link.offer(request, 0, 2)
    assert bench.link.num_open_pages == 52
    other = bench.request(2)
    bench.link.offer(other, 0, 2)
    assert bench.link.num_open_pages == 52
    assert bench.link.counters.store_dropped_pages == 52
    bench.put_all()
    bench.link.offer_again(other, 2)
    assert len(bench.put_all()) == 52


def test_a_store_that_cannot_read_gets_the_bytes(bench: Bench) -> None:
    request = bench.request(2)
    bench.link.offer(request, 0, 2)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, wants_data=True))
    (again,) = bench.puts()
    assert (again.put, again.source) == (put.put, None)
    assert again.data == [bench.plane.read(page + OFFSET) for page in request.held.pages]
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, stored_pages=2))
    bench.memory.release(request.held.pages)
    assert bench.memory.counts().used == 0
    later = bench.request(1)
    bench.link.offer(later, 0, 1)
    assert [put.source for put in bench.puts()] == [None], "it is not asked to read again"


def test_what_was_not_answered_or_went_with_the_store_is_put_again(bench: Bench) -> None:
    request = bench.request(1)
    for _ in range(2):
        bench.link.offer(request, 0, 1)
        (put,) = bench.puts()
        bench.link.on_result(StorePutResult(put=put.put, is_answered=False))
    bench.link.on_answer(StoreAnswer(lookup=0, epochs={"a": 98}))
    bench.link.offer(request, 0, 1)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, stored_pages=1))
    bench.link.offer(request, 0, 1)
    assert bench.puts() == []
    bench.link.on_answer(StoreAnswer(lookup=0, epochs={"a": 99}))  # the store was restarted
    bench.link.offer(request, 0, 1)
    assert len(bench.puts()) == 1


def test_what_was_dropped_is_put_when_it_is_found_again(bench: Bench) -> None:
    """The store is up two seconds after the worker, and nobody computes the prompt again."""
    request, other = bench.request(3), bench.request(1)
    bench.link.offer(request, 0, 3)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=False))
    assert bench.link.num_open_pages == 0, "they hold nothing while the store is away"
    bench.now = RETRY_S / 2
    bench.link.offer_again(request, 3)
    assert bench.puts() == [], "an outage costs little"
    bench.now = RETRY_S
    bench.link.offer_again(other, 1)
    assert bench.puts() == [], "what came from others was not dropped here"
    bench.link.offer_again(request, 2)
    (put,) = bench.puts()
    assert put.keys == request.keys.upto(request.tokens, 2)
    assert put.parents == [b"", put.keys[0]]
    bench.link.offer_again(request, 3)
    (rest,) = bench.puts()
    assert rest.keys == request.keys.upto(request.tokens, 3)[2:]
    for done in (put, rest):
        bench.link.on_result(StorePutResult(put=done.put, is_answered=True, stored_pages=1))
    bench.link.offer_again(request, 3)
    assert bench.puts() == []


def test_what_the_queue_had_no_room_for_is_put_when_it_is_found_again(bench: Bench) -> None:
    request = bench.request(MAX_QUEUED_PAGES + 40)
    bench.link.offer(request, 0, MAX_QUEUED_PAGES + 40)
    bench.link.offer_again(request, MAX_QUEUED_PAGES + 40)
    assert bench.link.num_open_pages == MAX_QUEUED_PAGES, "there is no more room yet"
    keys = bench.put_all()
    bench.link.offer_again(request, MAX_QUEUED_PAGES + 40)
    keys += bench.put_all()
    assert keys == request.keys.upto(request.tokens, MAX_QUEUED_PAGES + 40)


def test_what_went_with_the_store_is_put_when_it_is_found_again(bench: Bench) -> None:
    request = bench.request(2)
    bench.link.on_answer(StoreAnswer(lookup=0, epochs={"a": 98}))
    bench.link.offer(request, 0, 2)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, stored_pages=2))
    bench.link.offer_again(request, 2)
    assert bench.puts() == []
    bench.link.on_answer(StoreAnswer(lookup=0, epochs={"a": 99}))
    bench.link.offer_again(request, 2)
    assert [len(put.pages) for put in bench.puts()] == [2]


def test_few_keys_of_dropped_pages_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.sources.store.MAX_REMEMBERED_KEYS", 2)
    request = bench.request(3)
    bench.link.offer(request, 0, 3)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=False))
    bench.now = RETRY_S
    bench.link.offer_again(request, 3)
    (put,) = bench.puts()
    assert put.keys == request.keys.upto(request.tokens, 3)[1:]


def test_an_answer_makes_the_store_the_first_candidate(bench: Bench) -> None:
    request = bench.request(3)
    bench.link.look_up(request)
    (lookup,) = bench.sent
    assert isinstance(lookup, StoreLookup)
    assert lookup.keys == request.keys.upto(request.tokens, 3)
    assert request.sources.lookup_until > bench.now
    bench.link.on_answer(answer_of(lookup, 2))
    assert request.sources.lookup_until == 0.0
    (candidate,) = request.sources.candidates
    assert (candidate.kind, candidate.worker_id, candidate.epoch) == ("kvstore", "s", 5)
    assert candidate.match_tokens == 2 * PAGE


def test_replicas_are_candidates_one_after_the_other(bench: Bench) -> None:
    request = bench.request(5)
    bench.link.look_up(request)
    (lookup,) = bench.sent
    assert isinstance(lookup, StoreLookup)
    bench.link.on_answer(answer_of(lookup, 2, 3))
    found = [(c.worker_id, c.first_token, c.match_tokens) for c in request.sources.candidates]
    assert found == [("s", 0, 2 * PAGE), ("s1", 2 * PAGE, 5 * PAGE)]


def test_what_the_store_lacks_is_due_again(bench: Bench) -> None:
    """It was put, and the store has evicted it since."""
    request = bench.request(2)
    bench.link.offer(request, 0, 2)
    (put,) = bench.puts()
    bench.link.on_result(StorePutResult(put=put.put, is_answered=True, stored_pages=2))
    bench.link.look_up(request)
    lookup = bench.sent.pop()
    assert isinstance(lookup, StoreLookup)
    bench.link.on_answer(answer_of(lookup, 1))
    assert request.sources.num_stored_pages == 1
    bench.link.offer(request, 0, 2)
    (put,) = bench.puts()
    assert put.pages == [page + OFFSET for page in request.held.pages[1:]]


def test_a_late_answer_changes_nothing(bench: Bench) -> None:
    request = bench.request(3)
    bench.link.look_up(request)
    (lookup,) = bench.sent
    assert isinstance(lookup, StoreLookup)
    request.sources.lookup_until = 0.0  # admitted without it
    bench.link.on_answer(answer_of(lookup, 2))
    assert request.sources.candidates == []


def test_what_is_cached_here_is_not_looked_up(bench: Bench) -> None:
    request = bench.request(2)
    bench.pages.publish(request)
    bench.link.look_up(request)
    assert bench.sent == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_block_is_put_again_whichever_of_its_pages_were_lost(failing: int) -> None:
    """A block longer than the queue is put whole, in several puts, of which one is not answered."""
    blocks = OneBlock(MAX_QUEUED_PAGES + 40)
    bench = blocks.bench
    request = bench.request(2)
    bench.link.offer(request, 0, 2)
    expected = [*request.keys.upto(request.tokens, 2)]
    expected += block_keys(expected[-1], blocks.num_pages)
    keys, number = [], 0
    while puts := bench.puts():
        for put in puts:
            keys += put.keys
            is_answered = number != failing
            bench.link.on_result(StorePutResult(put=put.put, is_answered=is_answered))
            number += 1
    assert keys == expected
    bench.now = RETRY_S
    bench.link.offer_again(request, 2)
    again = bench.put_all()
    assert again[-blocks.num_pages :] == expected[2:]
    assert again[: -blocks.num_pages] == (expected[:2] if failing == 0 else [])
    bench.link.offer_again(request, 2)
    assert bench.put_all() == []
    bench.memory.release(request.held.pages)
    assert bench.memory.counts().used == 0
