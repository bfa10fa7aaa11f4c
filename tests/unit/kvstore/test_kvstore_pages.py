"""The store's book-keeping against a naive model: what is held, evicted, pinned, quarantined."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from weft.contract.store import Offer
from weft.engine.base.config import EvictionName
from weft.kvstore.pages import Incoming, PageStore
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageCounts

NUM_PAGES = 12  # Page 0 is not used.
KEYS = [bytes([number]) * 32 for number in range(24)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)


@dataclass
class Put:
    """A put in work, as the model sees it."""

    incoming: Incoming
    wanted: list[bytes]
    present: list[bytes]
    order: list[bytes]


class StoreMachine(RuleBasedStateMachine):
    """Drives a `PageStore` beside plain dictionaries; content is a number written into the page."""

    def __init__(self) -> None:
        super().__init__()
        self.store = PageStore(np.zeros((NUM_PAGES, 4), np.uint8))
        self.num_free = NUM_PAGES - 1
        self.content: dict[bytes, int] = {}
        """Of held keys."""
        self.pins: dict[bytes, int] = {}
        self.unused: OrderedDict[bytes, None] = OrderedDict()
        """Held keys without pins, oldest first."""
        self.puts: list[Put] = []
        self.quarantined: list[Incoming] = []
        self.readers: list[tuple[list[bytes], list[int]]] = []

    # -- the model -------------------------------------------------------------------------------

    def pin(self, keys: list[bytes]) -> None:
        for key in keys:
            self.unused.pop(key, None)
            self.pins[key] = self.pins.get(key, 0) + 1

    def unpin(self, keys: list[bytes]) -> None:
        """Of one chain: from its end."""
        for key in reversed(keys):
            self.pins[key] -= 1
            if not self.pins[key]:
                del self.pins[key]
                if key in self.content:
                    self.unused[key] = None
                else:
                    self.num_free += 1

    def word_at(self, page: int) -> int:
        return int(self.store.pool[page].view("<u4")[0])

    # -- operations ------------------------------------------------------------------------------

    @rule(keys=some_keys)
    def begin(self, keys: list[bytes]) -> None:
        on_their_way = {key for put in self.puts for key in put.wanted}
        present = [key for key in keys if key in self.content and key not in on_their_way]
        wanted = [key for key in keys if key not in self.content and key not in on_their_way]
        self.pin(present)
        room = self.num_free + len(self.unused)
        taken = wanted[:room]
        while self.num_free < len(taken):
            key, _ = self.unused.popitem(last=False)
            del self.content[key]
            self.num_free += 1
        self.num_free -= len(taken)

        incoming = self.store.begin([Offer(key, random.getrandbits(32), 0) for key in keys])
        assert [offer.key for offer in incoming.offers] == taken
        assert incoming.num_refused == len(wanted) - len(taken)
        assert incoming.num_present == len(keys) - len(wanted)
        order = [key for key in keys if key in present or key in taken]
        self.puts.append(Put(incoming, taken, present, order))

    @precondition(lambda self: self.puts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        put = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
        bad = set(data.draw(st.lists(st.sampled_from(put.wanted or KEYS), max_size=3)))
        digests = []
        for offer, page in zip(put.incoming.offers, put.incoming.pages, strict=True):
            self.store.pool[page].view("<u4")[0] = offer.digest
            digests.append(offer.digest ^ (offer.key in bad))
        refused = self.store.publish(put.incoming, digests)
        assert {offer.key for offer, _ in refused} == bad & set(put.wanted)
        self.num_free += len(refused)
        good = [offer for offer in put.incoming.offers if offer.key not in bad]
        self.content |= {offer.key: offer.digest for offer in good}
        self.pin([offer.key for offer in good])
        self.unpin([key for key in put.order if key not in bad or key in put.present])

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), may_arrive=st.booleans())
    def give_up(self, data: st.DataObject, may_arrive: bool) -> None:
        put = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
        if may_arrive:
            self.store.quarantine(put.incoming)
            self.quarantined.append(put.incoming)
        else:
            self.store.abandon(put.incoming)
            self.num_free += len(put.wanted)
        self.unpin(put.present)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        incoming = self.quarantined.pop()
        self.store.end_quarantine(incoming)
        self.num_free += len(incoming.pages)

    @rule(keys=some_keys)
    def read(self, keys: list[bytes]) -> None:
        held = self.num_leading(keys)
        assert self.store.num_held(keys) == held
        pages = self.store.pin(keys)
        assert [self.word_at(page) for page in pages] == [self.content[k] for k in keys[:held]]
        assert self.store.digests_of(pages) == [self.content[k] for k in keys[:held]]
        self.pin(keys[:held])
        self.readers.append((keys[:held], pages))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        keys, pages = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.store.unpin(pages)
        self.unpin(keys)

    @precondition(lambda self: any(keys for keys, _ in self.readers))
    @rule()
    def drop(self) -> None:
        """What is dropped while it is read is free when nobody reads it any more."""
        keys, pages = next((k, p) for k, p in self.readers if k)
        self.store.drop(keys[-1], pages[-1])
        self.content.pop(keys[-1], None)
        # Its place is known to the model by the readers that are left; a new put of the key would
        # be another page, so these readers end first.
        while any(keys[-1] in reader for reader, _ in self.readers):
            index = next(i for i, (reader, _) in enumerate(self.readers) if keys[-1] in reader)
            reader, held = self.readers.pop(index)
            self.store.unpin(held)
            self.unpin(reader)
        for put in [put for put in self.puts if keys[-1] in put.present]:
            self.puts.remove(put)
            self.store.abandon(put.incoming)
            self.num_free += len(put.wanted)
            self.unpin(put.present)

    @rule()
    def flush(self) -> None:
        assert self.store.flush() == len(self.unused)
        self.num_free += len(self.unused)
        for key in self.unused:
            del self.content[key]
        self.unused.clear()

    # -- always ----------------------------------------------------------------------------------

    def num_leading(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.content), len(keys))

    @invariant()
    def agrees(self) -> None:
        assert {key for key in KEYS if self.store.num_held([key])} == set(self.content)
        num_quarantined = sum(len(incoming.pages) for incoming in self.quarantined)
        total = NUM_PAGES - 1
        num_used = total - self.num_free - len(self.unused) - num_quarantined
        assert self.store.counts() == PageCounts(
            self.num_free, len(self.unused), num_used, num_quarantined, total
        )
        self.store.memory.check_integrity()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_chain_is_evicted_from_its_end() -> None:
    store = PageStore(np.zeros((9, 4), np.uint8))
    chain = [Offer(key, 0, 0) for key in KEYS[:6]]
    store.publish(store.begin(chain), [0] * 6)
    keys = KEYS[:6]
    for num_new, num_left in ((3, 5), (5, 3)):
        fresh = [Offer(random.randbytes(32), 0, 0) for _ in range(num_new)]
        incoming = store.begin(fresh)
        assert store.num_held(keys) == num_left
        store.publish(incoming, [0] * num_new)
        store.unpin(store.pin(keys))  # Used again: younger than what pushed its end out.


def test_a_put_does_not_push_out_its_own_beginning() -> None:
    store = PageStore(np.zeros((7, 4), np.uint8))
    keys = KEYS[:10]
    store.publish(store.begin([Offer(key, 0, 0) for key in keys[:4]]), [0] * 4)
    incoming = store.begin([Offer(key, 0, 0) for key in keys])
    assert (incoming.num_present, len(incoming.pages), incoming.num_refused) == (4, 2, 4)
    store.publish(incoming, [0, 0])
    assert store.num_held(keys) == 6


def offers(keys: list[bytes]) -> list[Offer]:
    """A chain whose pages tell what they follow."""
    return [Offer(key, 0, 0, parent) for key, parent in zip(keys, [b"", *keys], strict=False)]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_every_policy_gives_up_a_chain_from_its_end(name: EvictionName) -> None:
    store = PageStore(np.zeros((9, 4), np.uint8), EVICTION_POLICIES[name])
    keys = KEYS[:8]
    for first in (0, 4):  # Its end came later.
        store.publish(store.begin(offers(keys)[first : first + 4]), [0] * 4)
    for num_left in (7, 6, 5):
        store.begin([Offer(random.randbytes(32), 0, 0)])
        assert store.num_held(keys) == num_left


@pytest.mark.parametrize(
    ("name", "gone"), [("lru", 1), ("mru", 2), ("lfu", 1), ("slru", 1), ("fifo", 0), ("filo", 2)]
)
def test_which_of_three_pages_goes_first(name: EvictionName, gone: int) -> None:
    """The first one is used twice, the last one once, the one between never."""
    store = PageStore(np.zeros((4, 4), np.uint8), EVICTION_POLICIES[name])
    for key in KEYS[:3]:
        store.publish(store.begin([Offer(key, 0, 0)]), [0])
    for key in (KEYS[0], KEYS[0], KEYS[2]):
        store.unpin(store.pin([key]))
    store.begin([Offer(KEYS[3], 0, 0)])
    assert [store.num_held([key]) for key in KEYS[:3]] == [int(i != gone) for i in range(3)]
