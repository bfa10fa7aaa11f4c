"""Page accounting against a naive model, and page keys against their definition."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from weft.contract.keys import ROOT_KEY, PageKeys, namespace_digest, page_key
from weft.pages.memory.page_memory import NULL_PAGE, OutOfPages, PageMemory
from weft.pages.memory.prefix_cache import PageKeyCache

NUM_PAGES = 12
VECTORS = Path(__file__).resolve().parents[3] / "protos" / "vectors" / "page_key.json"


class MemoryMachine(RuleBasedStateMachine):
    """Holders take, share, publish, match, quarantine and release pages at random."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PageKeyCache()
        self.memory = PageMemory(NUM_PAGES, self.index, tracks_freed=True)
        self.held: list[list[int]] = []
        self.quarantined: list[int] = []
        self.published: dict[bytes, int] = {}
        self.promised = 0
        self.keys = 0

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        available = self.memory.num_available_pages
        try:
            pages = self.memory.allocate(count)
        except OutOfPages:
            assert count > available
            return
        in_use = {page for pages in self.held for page in pages}
        assert count <= available
        assert len(set(pages)) == count
        assert not in_use & set(pages), "handed out twice"
        assert NULL_PAGE not in pages
        assert not set(pages) & set(self.quarantined)
        self.published = {k: p for k, p in self.published.items() if p not in pages}
        self.held.append(pages)

    @rule(count=st.integers(1, 4))
    def promise(self, count: int) -> None:
        available = self.memory.num_available_pages
        try:
            self.memory.promise(count)
        except OutOfPages:
            assert count > available
        else:
            self.promised += count

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def take_promised(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.promised))
        pages = self.memory.allocate(count, promised=True)  # a promise is always kept
        self.promised -= count
        self.published = {k: p for k, p in self.published.items() if p not in pages}
        self.held.append(pages)

    @precondition(lambda self: self.promised)
    @rule()
    def return_promise(self) -> None:
        self.memory.unpromise(self.promised)
        self.promised = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        if page in self.published.values():
            return
        self.keys += 1
        key = self.keys.to_bytes(4, "little")
        assert self.index.insert(key, page)
        self.published[key] = page

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.published)))
        pages = self.index.match([key])
        assert pages == [self.published[key]]
        self.memory.retain(pages)
        if self.memory.num_available_pages < 0:
            self.memory.release(pages)  # They are promised, as the scheduler finds on admission.
        else:
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.memory.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        counts = Counter(page for pages in self.held for page in pages)
        pages = self.held[index]
        if any(counts[p] > 1 or p in self.published.values() for p in pages):
            return
        self.memory.quarantine(pages)
        self.quarantined += self.held.pop(index)

    @precondition(lambda self: self.quarantined)
    @rule()
    def prove(self) -> None:
        self.memory.end_quarantine(self.quarantined)
        self.quarantined = []

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        self.memory.check_integrity()
        counts = self.memory.counts()
        assert counts.used == len({page for pages in self.held for page in pages})
        assert counts.quarantined == len(self.quarantined)


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMemory = MemoryMachine.TestCase


def test_least_recently_used_pages_go_first() -> None:
    index = PageKeyCache()
    memory = PageMemory(4, index)
    evicted: list[bytes] = []
    memory.on_evicted.append(evicted.append)
    pages = memory.allocate(3)
    for number, page in enumerate(pages):
        index.insert(bytes([number]), page)
        memory.release([page])
    used_again = index.match([bytes([0])])  # now the youngest
    memory.retain(used_again)
    memory.release(used_again)
    memory.allocate(2)
    assert index.match([bytes([0])]) == used_again
    assert evicted == [bytes([1]), bytes([2])]


def test_a_prompt_is_evicted_from_its_end() -> None:
    index = PageKeyCache()
    memory = PageMemory(11, index)
    keys = [bytes([number]) for number in range(9)]
    pages = memory.allocate(9)
    for key, page in zip(keys, pages, strict=True):
        index.insert(key, page)
    memory.release(pages)
    for wanted in (1, 2, 3):  # the one page that is free, then pages of the prompt
        memory.allocate(wanted)
    assert len(index.match(keys)) == 4


def test_pages_are_wiped_when_they_change_namespace() -> None:
    memory = PageMemory(4, None)
    first = memory.allocate(3, b"tenant a")
    assert memory.take_wipes() == []
    memory.release(first)
    memory.release(memory.allocate(3, b"tenant a"))
    assert memory.take_wipes() == []
    second = memory.allocate(2, b"tenant b")
    assert sorted(memory.take_wipes()) == sorted(second)


def test_without_an_index_released_pages_are_free() -> None:
    memory = PageMemory(4, None)
    pages = memory.allocate(2)
    memory.release(pages)
    assert memory.counts().free == 3
    assert not memory.is_published(pages[0])
    assert memory.flush_cache() == 0


def test_keys_follow_their_definition() -> None:
    namespace = random.randbytes(32)
    tokens = [random.randrange(2**32) for _ in range(50)]
    keys = PageKeys(namespace, 16).upto(tokens, 3)
    parent = ROOT_KEY
    for index, key in enumerate(keys):
        page = struct.pack("<16I", *tokens[index * 16 : index * 16 + 16])
        parent = hashlib.blake2b(
            parent + namespace + page, digest_size=32, person=b"weft-page"
        ).digest()
        assert key == parent


def test_keys_grow_with_the_tokens() -> None:
    namespace = bytes(32)
    tokens = list(range(64))
    growing = PageKeys(namespace, 8)
    for count in range(9):
        known = list(growing.upto(tokens, count))
        assert known == PageKeys(namespace, 8).upto(tokens, count)
        adopting = PageKeys(namespace, 8)
        adopting.adopt(known)
        assert adopting.upto(tokens, 8) == PageKeys(namespace, 8).upto(tokens, 8)


def test_namespaces_never_share() -> None:
    base = {"model_digest": b"m" * 32, "layout": "l", "adapter_digest": b"", "cache_salt": ""}
    changes = {"model_digest": b"n" * 32, "layout": "k", "adapter_digest": b"a", "cache_salt": "s"}
    names = {namespace_digest(**base)}  # type: ignore[arg-type]
    for name, value in changes.items():
        names.add(namespace_digest(**(base | {name: value})))  # type: ignore[arg-type]
    # Neighbouring fields do not run together.
    names.add(namespace_digest(b"m" * 32, "l", adapter_digest=b"x", cache_salt=""))
    names.add(namespace_digest(b"m" * 32, "l", adapter_digest=b"", cache_salt="x"))
    assert len(names) == 7


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text())["vectors"])
def test_vectors_hold(vector: dict[str, object]) -> None:
    tokens = vector["tokens"]
    assert isinstance(tokens, list)
    namespace = bytes.fromhex(str(vector["namespace"]))
    parent = bytes.fromhex(str(vector["parent"]))
    assert page_key(parent, tokens, namespace).hex() == vector["key"]
