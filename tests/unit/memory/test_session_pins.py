"""Chats whose pages are given up last, against a dictionary of what each has pinned."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from weft.engine.base.config import EvictionName
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request
from weft.pages.memory.chat_pins import SessionKey, SessionPins
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree
from weft.testing.scheduling.bare_request import bare_request

SIZE = 2
SPACE = bytes(32)


class Chats:
    """A cache that requests go through, and sessions that pin what they leave."""

    def __init__(
        self,
        num_pages: int,
        max_pages: int,
        max_tenant_pages: int | None = None,
        ttl_s: float = 100.0,
        name: EvictionName = "lru",
    ) -> None:
        self.cache = PrefixTree(SIZE, EVICTION_POLICIES[name])
        self.memory = PageMemory(num_pages + 1, self.cache)
        self.memory.on_evicted.append(self._evicted)
        self.pages = RequestPages(self.memory, self.cache, SIZE)
        self.max_pages = max_pages
        self.pins = SessionPins(self.cache, max_pages, max_tenant_pages or max_pages, ttl_s)
        self.pinned: dict[str, set[bytes]] = {}
        """What is pinned and still there, by session."""
        self.stamps: Counter[bytes] = Counter()
        self.num_pins = 0
        self.evicted: list[bytes] = []

    def begin(self, tokens: list[int], **fields: Any) -> Request | None:
        """A request with its pages, computed and cached; None: there is no room for it."""
        request = bare_request(tokens, SIZE, SPACE, **fields)
        self.pages.take(request, self.pages.find(request))
        needed = -(-len(tokens) // SIZE) - len(request.held.pages)
        if needed > self.memory.num_available_pages:
            self.pages.drop(request)
            return None
        self.pages.promise(request, needed)
        self.pages.note_hit(request)
        self.pages.use_partial(request)
        step = self.pages.begin_step()
        self.pages.make_copies(list)
        self.pages.end_step(step)
        self.pages.take_promised(request, request.held.num_promised)
        request.num_computed = len(tokens)
        self.pages.publish(request)
        return request

    def end(self, request: Request, session: str = "", tenant: str = "", now: float = 0.0) -> None:
        """It ends, and its session pins what it leaves."""
        leaf = request.held.leaf
        if session and leaf is not None and leaf.page >= 0:
            keys = request.keys.upto(request.tokens, request.held.num_published)
            before = set(self.names())
            self.pins.pin(SessionKey("", session), tenant, leaf, now)
            self.num_pins += 1
            num_kept = min(len(keys), self.max_pages)
            self.pinned[session] = set(keys[:num_kept])
            for key in keys[:num_kept]:
                self.stamps[key] = self.num_pins
            for name in before - set(self.names()):  # To keep to a quota.
                del self.pinned[name]
        self.pages.drop(request)

    def run(self, tokens: list[int], session: str = "", tenant: str = "", now: float = 0.0) -> None:
        request = self.begin(tokens)
        assert request is not None
        self.end(request, session, tenant, now)

    def names(self) -> list[str]:
        return [key.session_id for key in self.pins._sessions]

    def found(self, tokens: list[int]) -> int:
        request = bare_request(tokens, SIZE, SPACE)
        return self.pages.num_cached_pages(request, len(tokens) // SIZE)

    def all_pinned(self) -> set[bytes]:
        return set().union(*self.pinned.values())

    def check(self) -> None:
        assert set(self.names()) == self.pinned.keys()
        assert self.pins.num_pages == len(self.all_pinned()) <= self.max_pages
        self.cache.check_integrity()
        self.memory.check_integrity()

    def _evicted(self, key: bytes) -> None:
        """Pinned pages go when nothing else can, and the stillest first."""
        self.evicted.append(key)
        pinned = self.all_pinned()
        if key in pinned:
            nodes = list(self.cache._node_by_page.values())
            # What was bared by the one that went was no candidate then.
            bared = self.cache._bared[2] if self.cache._bared is not None else None
            for node in nodes:
                if node.ticket and node is not bared:
                    assert node.key in pinned, "something else could go"
                    assert self.stamps[key] <= self.stamps[node.key], "a stiller one could go"
        for keys in self.pinned.values():
            keys.discard(key)


def chat(first: int, num_pages: int) -> list[int]:
    return list(range(first * 1000, first * 1000 + num_pages * SIZE))


def test_a_pinned_chat_outlives_newer_prompts() -> None:
    chats = Chats(20, 10)
    chats.run(chat(1, 8), "a")
    chats.run(chat(2, 8))
    chats.run(chat(3, 10))
    assert chats.found(chat(1, 8)) == 8
    assert chats.found(chat(2, 8)) < 8
    assert chats.pins.num_pages == 8
    chats.check()


def test_requests_get_every_page_the_stillest_chat_first_and_its_last_page_first() -> None:
    chats = Chats(20, 20)
    chats.run(chat(1, 6), "a")
    chats.run(chat(2, 6), "b")
    chats.run(chat(1, 7), "a")
    chats.run(chat(3, 9))
    assert chats.found(chat(2, 6)) == 4
    assert chats.found(chat(1, 7)) == 7
    chats.run(chat(4, 20))
    assert (chats.found(chat(1, 7)), chats.found(chat(2, 6))) == (0, 0)
    assert chats.pins.num_pages == 0
    assert chats.cache.num_pinned_evictions == 13
    chats.check()


def test_the_stillest_chat_makes_room_within_the_quota() -> None:
    chats = Chats(40, 12)
    for number in range(1, 4):
        chats.run(chat(number, 5), str(number))
    assert chats.names() == ["2", "3"]
    assert chats.pins.counters.displaced_sessions == 1
    assert chats.found(chat(1, 5)) == 5  # It is there as long as there is room.
    chats.check()


def test_of_a_chat_above_the_quota_the_first_pages_are_pinned() -> None:
    chats = Chats(40, 6)
    chats.run(chat(1, 10), "a")
    assert chats.pins.num_pages == 6
    chats.run(chat(2, 34))
    assert chats.found(chat(1, 10)) == 6
    chats.check()


def test_a_tenant_displaces_its_own_chats() -> None:
    chats = Chats(60, 20, max_tenant_pages=10)
    chats.run(chat(1, 5), "quiet", "t1")
    for number in range(2, 8):
        chats.run(chat(number, 5), f"loud{number}", "t2")
    assert chats.names() == ["quiet", "loud6", "loud7"]
    chats.check()


def test_chats_with_one_beginning_share_its_pages() -> None:
    chats = Chats(40, 20)
    stem = chat(1, 5)
    chats.run(stem + chat(2, 3), "a")
    chats.run(stem + chat(3, 3), "b")
    assert chats.pins.num_pages == 11
    assert chats.pins.release("", "a")
    del chats.pinned["a"]
    assert chats.pins.num_pages == 8
    assert not chats.pins.release("", "a")
    assert not chats.pins.release("other", "b")
    chats.check()


def test_a_chat_ends_with_all_its_adapters() -> None:
    chats = Chats(40, 20, max_tenant_pages=9)
    first, second, other = (chats.begin(chat(number, 4)) for number in (1, 2, 3))
    for request, adapter in ((first, b""), (second, b"x")):
        assert request is not None
        assert request.held.leaf is not None
        chats.pins.pin(SessionKey("", "a", adapter), "t", request.held.leaf, 0.0)
    assert (len(chats.pins), chats.pins.num_pages) == (2, 8), "one does not end the other"
    assert other is not None
    assert other.held.leaf is not None
    chats.pins.pin(SessionKey("", "b", b"x"), "t", other.held.leaf, 0.0)
    assert (len(chats.pins), chats.pins.num_pages) == (2, 8), "the quota displaces the stillest"
    assert chats.pins.release("", "a")
    assert not chats.pins.release("", "a")
    assert (len(chats.pins), chats.pins.num_pages) == (1, 4)
    assert chats.pins.release("", "b")
    assert not chats.pins._namespaces


def test_a_still_chat_expires() -> None:
    chats = Chats(40, 20, ttl_s=10.0)
    chats.run(chat(1, 3), "a", now=0.0)
    chats.run(chat(2, 3), "b", now=1.0)
    chats.run(chat(1, 4), "a", now=6.0)
    chats.pins.expire(10.9)
    assert chats.names() == ["b", "a"]
    chats.pins.expire(11.0)
    assert chats.names() == ["a"]
    chats.pins.expire(16.0)
    assert (len(chats.pins), chats.pins.num_pages) == (0, 0)
    assert chats.pins.counters.expired_sessions == 2


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_ten_thousand_random_operations_leave_no_pin(name: EvictionName) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    chats = Chats(24, 10, name=name)
    running: list[Request] = []
    refused = 0
    for number in range(10_000):
        choice = rng.random()
        if choice < 0.5:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            request = chats.begin(tokens)
            if request is not None:
                running.append(request)
            else:
                refused += 1
        elif choice < 0.9 and running:
            request = running.pop(rng.randrange(len(running)))
            chats.end(request, rng.choice(["", *"abcdef"]), rng.choice("xy"), number)
        elif choice < 0.95:
            session = rng.choice("abcdef")
            was_known = chats.pins.release("", session)
            assert was_known == (chats.pinned.pop(session, None) is not None)
        elif choice < 0.96:
            chats.memory.flush_cache()
        if number % 20 == 0:
            chats.check()
    while running:
        chats.end(running.pop(), rng.choice("abc"))
    chats.check()
    chats.pins.clear()
    chats.pinned.clear()
    chats.check()
    assert chats.pins.num_pages == 0
    counts = chats.memory.counts()
    assert counts.free + counts.cached == counts.total
    assert chats.memory.flush_cache() == counts.cached
    assert refused
    assert chats.cache.num_pinned_evictions
