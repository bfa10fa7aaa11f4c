"""The prefix cache against a dictionary of token tuples, and each eviction policy by its words."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from weft.contract.keys import ROOT_KEY, PageKeys, page_key, token_bytes
from weft.contract.pages import PageCopy
from weft.engine.base.config import EvictionName
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree
from weft.testing.scheduling.bare_request import bare_request

SIZE = 2
NUM_PAGES = 15
NAMESPACES = [bytes([1]) * 32, bytes([2]) * 32]


def request_of(tokens: list[int], namespace: bytes, priority: int = 0, size: int = SIZE) -> Request:
    return bare_request(tokens, size, namespace, priority=priority)


@dataclass
class Known:
    """What the model knows of one cached page."""

    prefix: tuple[bytes, tuple[int, ...]]
    page: int
    created: int
    last_used: int
    num_hits: int = 0
    priority: int = 0


def value(name: str, known: Known) -> tuple[int, ...]:
    """How much a page is worth, by the words of the policy; the least goes first."""
    return {
        "lru": (known.last_used,),
        "mru": (-known.last_used,),
        "lfu": (known.num_hits, known.last_used),
        "fifo": (known.created,),
        "filo": (-known.created,),
        "priority": (-known.priority, known.last_used),
        "slru": (int(known.num_hits > 0), known.last_used),
    }[name]


class CacheMachine(RuleBasedStateMachine):
    """Requests come, are computed page by page and end at random, beside a dictionary."""

    @initialize(name=st.sampled_from(sorted(EVICTION_POLICIES)))
    def begin(self, name: EvictionName) -> None:
        self.name = name
        self.cache = PrefixTree(SIZE, EVICTION_POLICIES[name])
        self.memory = PageMemory(NUM_PAGES, self.cache)
        self.memory.on_published.append(self.on_published)
        self.memory.on_evicted.append(self.on_evicted)
        self.pages = RequestPages(self.memory, self.cache, SIZE)
        self.requests: list[Request] = []
        self.known: dict[bytes, Known] = {}
        self.prefixes: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.clock = itertools.count(1)
        self.publishing: Request | None = None

    # -- the model -------------------------------------------------------------------------------

    def on_published(self, page: int, key: bytes, parent: bytes) -> None:
        assert self.publishing is not None
        request = self.publishing
        end = (request.held.pages.index(page) + 1) * SIZE
        prefix = (request.namespace, tuple(request.tokens[:end]))
        expected = ROOT_KEY
        for start in range(0, end, SIZE):
            assert (expected == parent) == (start == end - SIZE)
            expected = page_key(expected, request.tokens[start : start + SIZE], request.namespace)
        assert key == expected
        assert prefix not in {known.prefix for known in self.known.values()}, "held twice"
        assert page not in {known.page for known in self.known.values()}, "one page, two places"
        now = next(self.clock)
        self.known[key] = Known(prefix, page, now, now, priority=request.priority)

    def on_evicted(self, key: bytes) -> None:
        used = self.used()
        given_up = self.known[key]
        candidates = [
            known
            for known in self.known.values()
            if known.page not in used
            and not any(self.follows(o, known) for o in self.known.values())
        ]
        assert given_up in candidates, "in use, or something follows it"
        assert value(self.name, given_up) == min(value(self.name, known) for known in candidates)
        del self.known[key]

    def follows(self, one: Known, other: Known) -> bool:
        (space, tokens), (space_before, before) = one.prefix, other.prefix
        return space == space_before and len(tokens) > len(before) == len_common(tokens, before)

    def used(self) -> Counter[int]:
        return Counter(page for request in self.requests for page in request.held.pages)

    def longest(self, namespace: bytes, tokens: list[int]) -> int:
        """Tokens of the longest cached prefix, page by page in the dictionary, then by tokens."""
        prefixes = [
            known.prefix[1] for known in self.known.values() if known.prefix[0] == namespace
        ]
        return max((len_common(prefix, tuple(tokens)) for prefix in prefixes), default=0)

    # -- what happens ----------------------------------------------------------------------------

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=13),
        namespace=st.sampled_from(NAMESPACES),
        priority=st.integers(-1, 1),
        is_local=st.booleans(),
    )
    def admit(self, tokens: list[int], namespace: bytes, priority: int, is_local: bool) -> None:
        request = request_of(tokens, namespace, priority)
        longest = self.longest(namespace, tokens[:-1])
        self.pages.take(request, self.pages.find(request))
        self.requests.append(request)
        assert request.num_computed == longest // SIZE * SIZE
        assert request.held.num_partial_tokens == longest % SIZE
        matched = {known.prefix: known for known in self.known.values()}
        for index, page in enumerate(request.held.pages):
            prefix = (namespace, tuple(tokens[: (index + 1) * SIZE]))
            assert matched[prefix].page == page
        source = request.held.partial_page
        needed = -(-len(tokens) // SIZE) - len(request.held.pages)
        if needed > self.memory.num_available_pages:
            self.requests.remove(request)
            self.note_unused([*([source] if source is not None else []), *request.held.pages])
            self.pages.drop(request)
            return
        self.pages.promise(request, needed)
        self.pages.note_hit(request)
        now = next(self.clock)
        for known in self.known.values():
            if known.page in request.held.pages:
                known.num_hits += 1
                known.last_used = now
                known.priority = min(known.priority, priority)
        if is_local:
            # The source must not be given up for the copy.
            others = self.used()
            self.requests.append(request_holding([source] if source is not None else []))
            self.pages.use_partial(request)
            self.requests.pop()
            assert request.num_computed == longest
            step = self.pages.begin_step()
            copies: list[PageCopy] = []
            if source is not None:
                with pytest.raises(MemoryError):
                    self.pages.make_copies(fail_to_copy)  # The next step makes them.
            self.pages.make_copies(copies.extend)
            self.pages.end_step(step)
            assert [copy.source for copy in copies] == ([source] if source is not None else [])
            assert all(copy.destination not in others for copy in copies)
        else:
            self.pages.forget_partial(request)
            assert request.num_computed == longest // SIZE * SIZE
        self.note_unused([source] if source is not None else [])

    def note_unused(self, pages: list[int]) -> None:
        """Pages that nobody uses now were used until now, the later ones a little longer."""
        used = self.used()
        by_page = {known.page: known for known in self.known.values()}
        for page in pages:
            now = next(self.clock)
            if page not in used and page in by_page:
                by_page[page].last_used = now

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        end = data.draw(st.integers(request.num_computed, request.num_tokens))
        num_pages = -(-end // SIZE) - len(request.held.pages)
        if num_pages > 0:
            self.pages.take_promised(request, num_pages)
        request.num_computed = end
        self.publishing = request
        # What was published before may have been another's page, and flushed since.
        first = request.held.num_published
        self.pages.publish(request)
        for index in range(first, end // SIZE):
            prefix = (request.namespace, tuple(request.tokens[: (index + 1) * SIZE]))
            held = [known for known in self.known.values() if known.prefix == prefix]
            assert len(held) == 1 or self.memory.num_available_pages <= NUM_PAGES // 2

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.note_unused(request.held.pages)
        self.pages.drop(request)

    @rule()
    def flush(self) -> None:
        self.memory.flush_cache()
        used = self.used()
        for known in self.known.values():
            held = known.page in used or any(
                other.page in used and self.follows(other, known) for other in self.known.values()
            )
            assert held, "a page that nobody needs was kept"

    @invariant()
    def tree_and_dictionary_agree(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check_integrity()
        self.cache.check_integrity()
        listed = list(self.cache.keys())
        assert len(listed) == len(set(listed))
        assert set(listed) == set(self.known)
        places = {self.known[key].prefix: at for at, key in enumerate(listed)}
        for (space, tokens), at in places.items():
            assert len(tokens) == SIZE or places[(space, tokens[:-SIZE])] < at
        used = set(self.used())
        counts = self.memory.counts()
        assert counts.used == len(used)
        assert counts.cached == len({known.page for known in self.known.values()} - used)
        assert counts.free + counts.cached + counts.used == counts.total


def fail_to_copy(copies: Sequence[PageCopy]) -> None:
    raise MemoryError


def request_holding(pages: list[int]) -> Request:
    request = request_of([0], NAMESPACES[0])
    request.held.pages = pages
    return request


def len_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestCache = CacheMachine.TestCase


class Bench:
    """A cache that prompts go through one after the other."""

    def __init__(self, num_pages: int, name: EvictionName = "lru", size: int = 4) -> None:
        self.size = size
        self.cache = PrefixTree(size, EVICTION_POLICIES[name])
        self.memory = PageMemory(num_pages + 1, self.cache)
        self.pages = RequestPages(self.memory, self.cache, size)

    def run(self, tokens: list[int], priority: int = 0, namespace: bytes = bytes(32)) -> int:
        """Matches, computes, publishes and ends a request; returns the tokens found."""
        request = request_of(tokens, namespace, priority, self.size)
        self.pages.take(request, self.pages.find(request))
        self.pages.promise(request, -(-len(tokens) // self.size) - len(request.held.pages))
        self.pages.note_hit(request)
        self.pages.use_partial(request)
        step = self.pages.begin_step()
        self.pages.make_copies(list)
        self.pages.end_step(step)
        found = request.num_computed
        self.pages.take_promised(request, request.held.num_promised)
        request.num_computed = len(tokens)
        self.pages.publish(request)
        self.pages.drop(request)
        return found

    def found(self, tokens: list[int]) -> int:
        """Full pages' tokens that a prompt would find; changes nothing."""
        request = request_of(tokens, bytes(32), size=self.size)
        return self.pages.num_cached_pages(request, len(tokens) // self.size) * self.size


def prompt(first: int, num_pages: int = 1) -> list[int]:
    return [first, *range(100, 99 + 4 * num_pages)]


ALL_FOUND = [0, 1, 2, 3, 4, 1, 1, 4, 4, 2, 0, 0, 3]
"""Prompts in the order in which they run; all are found again, the second one longest ago."""
THREE_IS_NEW = [0, 1, 2, 4, 1, 1, 4, 4, 2, 0, 0, 3]


@pytest.mark.parametrize(
    ("name", "runs", "goes"),
    [
        ("lru", ALL_FOUND, 1),
        ("mru", ALL_FOUND, 3),
        ("lfu", ALL_FOUND, 2),
        ("fifo", ALL_FOUND, 0),
        ("filo", ALL_FOUND, 4),
        ("priority", ALL_FOUND, 2),
        ("slru", ALL_FOUND, 1),
        ("lru", THREE_IS_NEW, 1),
        ("slru", THREE_IS_NEW, 3),
    ],
)
def test_each_policy_gives_up_the_page_it_names(
    name: EvictionName, runs: list[int], goes: int
) -> None:
    bench = Bench(6, name)
    prompts = [prompt(first) for first in range(5)]
    for number in runs:
        # A page is as urgent as the most urgent request that used it.
        is_first = not bench.found(prompts[number])
        bench.run([*prompts[number], 7], priority=9 if is_first else 5 + (number == 2))
    bench.run(prompt(50, 2))
    assert [number for number in range(5) if not bench.found(prompts[number])] == [goes]


def test_a_prompt_is_given_up_from_its_end() -> None:
    bench = Bench(8)
    bench.run(list(range(16)))
    bench.run([90, 91, 92, 93])
    bench.run(list(range(200, 220)))
    assert bench.found(list(range(16))) == 8
    assert bench.found([90, 91, 92, 93]) == 4
    bench.run(list(range(300, 316)))
    assert bench.found(list(range(16))) == bench.found([90, 91, 92, 93]) == 0
    assert bench.found(list(range(200, 220))) == 16


def test_matches_end_inside_the_page_with_the_longest_common_start() -> None:
    bench = Bench(400, size=8)
    rng = random.Random(3)
    stem = [rng.randrange(50) for _ in range(11)]
    tails = [[rng.randrange(2) for _ in range(30)] for _ in range(60)]
    for tail in tails:
        bench.run(stem + tail[: rng.randint(6, 30)])
    cached = [stem + tail for tail in tails]
    for _ in range(200):
        tokens = stem + [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        data = token_bytes(tokens)
        found = bench.cache.find(bytes(32), data)
        longest = len(found.path) * 8 + found.num_partial_tokens
        assert longest <= max(len_common(tuple(tokens), tuple(one)) for one in cached)
        brute = max(len_common(tuple(tokens), one) for one in full_prefixes(bench.cache))
        assert longest == brute


def test_a_lookup_sees_what_came_and_went_since_the_same_one() -> None:
    bench = Bench(16, size=SIZE)
    for _ in range(300):
        tokens = [random.randrange(2) for _ in range(random.randrange(1, 12))]
        wanted = token_bytes(tokens)
        for _ in range(2):
            found = bench.cache.find(bytes(32), wanted)
            longest = len(found.path) * SIZE + found.num_partial_tokens
            known = (len_common(tuple(tokens), one) for one in full_prefixes(bench.cache))
            assert longest == max(known, default=0)
            bench.run([random.randrange(2) for _ in range(random.randrange(1, 12))])


def test_a_lookup_sees_a_page_that_generated_tokens_filled() -> None:
    tree, keys = PrefixTree(SIZE), PageKeys(bytes(32), SIZE)
    tokens = [random.randrange(9) for _ in range(3 * SIZE)]
    wanted = token_bytes(tokens)
    leaf, _ = tree.insert(keys, tokens, [1, 2], 0, 2, None)
    assert leaf is not None
    assert [node.page for node in tree.find(bytes(32), wanted).path] == [1, 2]
    tree.append(leaf, token_bytes(tokens[2 * SIZE :]), keys.upto(tokens, 3)[2], 3, 0)
    assert [node.page for node in tree.find(bytes(32), wanted).path] == [1, 2, 3]


def full_prefixes(cache: PrefixTree) -> list[tuple[int, ...]]:
    """Everything in the cache, by a walk of its own."""
    prefixes = []
    stack = [(root, ()) for root in cache._roots.values()]
    while stack:
        node, before = stack.pop()
        for tokens, child in (node.children or {}).items():
            prefix = before + tuple(memoryview(tokens).cast("I"))
            prefixes.append(prefix)
            stack.append((child, prefix))
    return prefixes


def test_namespaces_never_share() -> None:
    bench = Bench(30)
    tokens = list(range(20))
    assert bench.run(tokens, namespace=NAMESPACES[0]) == 0
    assert bench.run(tokens, namespace=NAMESPACES[1]) == 0
    assert bench.run(tokens, namespace=NAMESPACES[0]) == 19


def test_publishing_under_an_unused_page_keeps_promises() -> None:
    """Two requests computed one prefix; one ends, the other goes on under the first one's pages."""
    bench = Bench(6)
    first = request_of(list(range(8)), bytes(32), size=4)
    second = request_of(list(range(12)), bytes(32), size=4)
    for request, num_pages in ((first, 2), (second, 3)):
        bench.pages.promise(request, num_pages)
        bench.pages.take_promised(request, num_pages)
    first.num_computed = second.num_computed = 8
    bench.pages.publish(first)
    bench.pages.publish(second)
    assert bench.memory.counts().used == 5
    bench.pages.drop(first)
    assert bench.memory.num_available_pages == 3
    bench.memory.promise(3)  # one is free, two are the first one's
    second.num_computed = 12
    bench.pages.publish(second)
    assert bench.memory.num_available_pages == 0
    assert len(bench.memory.allocate(3, promised=True)) == 3
    bench.pages.drop(second)
    bench.memory.check_integrity()
    bench.cache.check_integrity()
