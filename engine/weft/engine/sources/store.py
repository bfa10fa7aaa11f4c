"""The engine's client of a KV store: lookups before admission, puts outside the steps.

Puts are optional: the engine never waits for one, and drops it if the queue is full or the store
cannot be reached. The pages of a put keep a reference until the store has answered, so that they do
not change while the store reads them. The client remembers the keys of dropped pages and offers
these pages again when a request finds them in the pool.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from weft.contract.clock import Clock
from weft.contract.keys import PieceShape
from weft.contract.reports import TierReport
from weft.contract.store import StoreAnswer, StoreLookup, StorePut, StorePutResult
from weft.contract.timeline import FillCandidate
from weft.engine.base.shards import shard_start
from weft.engine.requests.request import Request
from weft.engine.sources.carried import Carried, first_key_of, keys_of
from weft.engine.sources.fill import OwnerTransport
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import Node

LOOKUP_TIMEOUT_S = 0.1
"""Seconds after which a request is admitted without the store's answer."""
MAX_OPEN_PUTS = 2
HELD_SHARE = 4
"""One part in this many of the pool's pages may wait for the store. More would make
requests wait.
"""
GATHER_S = 0.25
"""Seconds for which pages wait for others while steps run. A put costs milliseconds of processor
time in three processes however few pages it has, and on a CPU the steps lose that time.
"""
MAX_REMEMBERED_KEYS = 1 << 16
RETRY_S = 2.0
"""Seconds after an unanswered put during which dropped pages are not offered again."""


@dataclass(slots=True)
class StoreCounters:
    store_lookups: int = 0
    store_lookup_pages: int = 0
    store_hit_pages: int = 0
    store_put_pages: int = 0
    store_stored_pages: int = 0
    store_dropped_pages: int = 0


@dataclass(frozen=True, slots=True)
class _Offer:
    namespace: bytes
    key: bytes
    parent: bytes
    shard: bytes
    page: int
    noted: bytes
    """Key under which it is known or due: that of the page, or that of the first page of
    its piece.
    """


@dataclass(slots=True)
class _Put:
    offers: list[_Offer]
    digests: list[int] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    """Page numbers under which the store reads them."""
    as_data: bool = False

    @property
    def pages(self) -> list[int]:
        return [offer.page for offer in self.offers]


class StoredPieces(Protocol):
    """The pool's pieces of companions, which the store keeps in pages."""

    @property
    def carried(self) -> Sequence[Carried]: ...

    @property
    def shape(self) -> PieceShape: ...

    def copy(self, carried: Carried, pieces: Sequence[int], namespace: bytes) -> list[list[int]]:
        """Copies pieces into new pages, which the caller releases and does not read before
        `settle`. Returns the pages of each of the first pieces, for as many as there is room.
        """
        ...

    def settle(self) -> None: ...


class StoreLink:
    """The engine's side of the KV store.

    Args:
        num_cached_pages: Returns how many of a request's first n pages are cached here.
        transport: Digests, and the pool from which the store reads.
        pieces: What the model needs in addition to pages of the first group; None: it needs
            nothing.
    """

    def __init__(
        self,
        page_size: int,
        memory: PageMemory,
        num_cached_pages: Callable[[Request, int], int],
        transport: OwnerTransport,
        send: Callable[[StoreLookup | StorePut], None],
        clock: Clock,
        pieces: StoredPieces | None = None,
    ) -> None:
        self._page_size = page_size
        self._memory = memory
        self._num_cached_pages = num_cached_pages
        self._transport = transport
        self._send = send
        self._clock = clock
        self._pieces = pieces
        self._companions: Sequence[Carried] = () if pieces is None else pieces.carried
        self._ids = itertools.count(1)
        self._asked: dict[int, Request] = {}
        self._queue: deque[_Offer] = deque()
        self._put_at = 0.0
        """Time at which the queued pages are put at the latest, even if they do not fill a put."""
        self._open: dict[int, _Put] = {}
        self._epochs: dict[str, int] = {}
        self._sends_data = False
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._due: OrderedDict[bytes, None] = OrderedDict()
        """Keys of pages that were offered and that the store does not have."""
        self._retry_at = 0.0
        self._max_held_pages = max(1, memory.num_usable_pages // HELD_SHARE)
        self.counters = StoreCounters()

    # -- lookups ---------------------------------------------------------------------------------

    def look_up(self, request: Request) -> None:
        """Asks how much of a new request's prompt the store holds, unless all of it is
        cached here.
        """
        num_pages = self._num_pages(request)
        if num_pages == 0 or self._num_cached_pages(request, num_pages) == num_pages:
            return
        keys = request.keys.upto(request.tokens, num_pages)
        shape = PieceShape() if self._pieces is None else self._pieces.shape
        lookup = StoreLookup(
            lookup=next(self._ids),
            namespace=request.namespace,
            keys=list(keys),
            block_pages=shape.block_pages,
            window_pages=shape.window_pages,
            state_pages=shape.state_pages,
            request_id=request.key.request_id,
            traceparent=request.traceparent,
        )
        self._asked[lookup.lookup] = request
        request.sources.lookup_until = self._clock() + LOOKUP_TIMEOUT_S
        self.counters.store_lookups += 1
        self.counters.store_lookup_pages += num_pages
        self._send(lookup)

    def on_answer(self, answer: StoreAnswer) -> None:
        """Makes the replicas that answered the first candidates of a request that still waits."""
        for address, epoch in answer.epochs.items():
            if self._epochs.setdefault(address, epoch) != epoch:
                # A new incarnation of the store holds none of the pages that were put before.
                self._epochs[address] = epoch
                self._make_due(self._known)
                self._known.clear()
                self._sends_data = False
        request = self._asked.pop(answer.lookup, None)
        if request is None or request.sources.lookup_until == 0.0:
            return
        request.sources.lookup_until = 0.0
        if answer.epochs:
            self._note_held(request, sum(segment.num_pages for segment in answer.segments))
        candidates: list[FillCandidate] = []
        num_pages = 0
        for segment in answer.segments:
            first, num_pages = num_pages, num_pages + segment.num_pages
            candidate = FillCandidate(
                worker_id=segment.store_id,
                address=segment.address,
                epoch=segment.epoch,
                first_token=first * self._page_size,
                match_tokens=num_pages * self._page_size,
                kind="kvstore",
            )
            candidates.append(candidate)
        self.counters.store_hit_pages += num_pages
        request.sources.candidates[:0] = candidates

    def _note_held(self, request: Request, num_pages: int) -> None:
        """Notes the pages of a prompt that the store lacks: they are due for a put again."""
        request.sources.num_stored_pages = num_pages
        for key in request.keys.upto(request.tokens, self._num_pages(request))[num_pages:]:
            self._known.pop(key, None)
            for carried in self._companions:
                self._known.pop(first_key_of(carried, key), None)

    def _num_pages(self, request: Request) -> int:
        return request.num_reusable_tokens // self._page_size

    # -- puts ------------------------------------------------------------------------------------

    def offer(self, request: Request, first_page: int, end_page: int) -> None:
        """Queues pages that the store may lack, each key once."""
        keys = request.keys.upto(request.tokens, end_page)
        self._offer(request, keys, range(first_page, end_page))
        for carried in self._companions:
            self._offer_pieces(carried, carried.companion.kept_of(request, first_page, end_page))

    def offer_kept(self) -> None:
        """From now on queues each piece that companions keep at another time than when its page is
        published, if it was computed here.
        """
        for carried in self._companions:
            carried.companion.on_kept.append(partial(self._on_kept, carried))

    def _on_kept(
        self, carried: Carried, node: Node, piece: int, priority: int, is_computed: bool
    ) -> None:
        if is_computed:
            self._offer_pieces(carried, [(node, piece)])

    def _offer_pieces(self, carried: Carried, kept: Iterable[tuple[Node, int]]) -> None:
        """Queues the pieces beside pages of one prompt, each once, in separate pages."""
        assert self._pieces is not None
        new = [one for one in kept if first_key_of(carried, one[0].key) not in self._known]
        if not new:
            return
        first, root = new[0][0], new[0][0].parent
        while root is not None and root.parent is not None:
            first, root = root, root.parent
        if root is None:
            return
        # A piece is queued whole. Otherwise one that is longer than the queue would never be
        # queued.
        most = -(-self._room // carried.num_pages)
        copies = self._pieces.copy(carried, [piece for _, piece in new[:most]], root.tokens)
        for (node, _), pages in zip(new, copies, strict=False):
            keys = keys_of(carried, node.key)
            self._due.pop(keys[0], None)
            self._note_known(keys[0])
            for key, parent, page in zip(keys, [node.key, *keys[:-1]], pages, strict=True):
                self._enqueue(_Offer(root.tokens, key, parent, first.key, page, keys[0]))
        dropped = new[len(copies) :]
        self.counters.store_dropped_pages += len(dropped) * carried.num_pages
        self._make_due(first_key_of(carried, node.key) for node, _ in dropped)

    def offer_again(self, request: Request, end_page: int) -> None:
        """Queues again those of a request's first pages that an earlier put dropped."""
        if not self._due or self._clock() < self._retry_at:
            return
        keys = request.keys.upto(request.tokens, end_page)
        self._offer(request, keys, [i for i, key in enumerate(keys) if key in self._due])
        for carried in self._companions:
            kept = carried.companion.kept_of(request, 0, end_page)
            due = [one for one in kept if first_key_of(carried, one[0].key) in self._due]
            self._offer_pieces(carried, due)

    def _offer(self, request: Request, keys: Sequence[bytes], indices: Sequence[int]) -> None:
        new = [index for index in indices if keys[index] not in self._known]
        room = self._room
        for index in new[:room]:
            key = keys[index]
            self._due.pop(key, None)
            self._note_known(key)
            self._memory.retain([request.held.pages[index]])
            parent = keys[index - 1] if index else b""
            # With companions, all pages of a prompt are on one replica, as the pieces are.
            shard = keys[0 if self._companions else shard_start(index)]
            page = request.held.pages[index]
            self._enqueue(_Offer(request.namespace, key, parent, shard, page, key))
        self.counters.store_dropped_pages += len(new[room:])
        self._make_due(keys[index] for index in new[room:])

    @property
    def _room(self) -> int:
        room = self._max_queued_pages - len(self._queue)
        return max(0, min(room, self._max_held_pages - self.num_open_pages))

    @property
    def _max_queued_pages(self) -> int:
        """Most pages that wait for puts. In a model with window pages, pages of the first group are
        smaller: a window page takes `num_pages` of them.
        """
        most = self._transport.port.max_queued_pages
        shape = PieceShape() if self._pieces is None else self._pieces.shape
        return most * shape.block_pages if shape.window_pages else most

    def settle(self) -> None:
        """Waits until the copies of pieces are made."""
        if self._pieces is not None:
            self._pieces.settle()

    def _enqueue(self, offer: _Offer) -> None:
        if not self._queue:
            self._put_at = self._clock() + GATHER_S
        self._queue.append(offer)

    def _note_known(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > MAX_REMEMBERED_KEYS:
            self._known.popitem(last=False)

    def _make_due(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._due[key] = None
            if len(self._due) > MAX_REMEMBERED_KEYS:
                self._due.popitem(last=False)

    def tick(self, *, is_computing: bool) -> None:
        """Starts puts while few are open.

        Args:
            is_computing: Whether steps run. Pages then wait, for a short time, until they fill a
                put.
        """
        most = self._transport.port.max_put_pages
        # In a small pool puts are small, so that there is room for more while one is under way.
        is_full = len(self._queue) >= min(most, self._max_held_pages // MAX_OPEN_PUTS)
        if is_computing and not is_full and self._clock() < self._put_at:
            return
        if self._queue and len(self._open) < MAX_OPEN_PUTS:
            self.settle()
        while self._queue and len(self._open) < MAX_OPEN_PUTS:
            namespace = self._queue[0].namespace
            offers: list[_Offer] = []
            while self._queue and len(offers) < most:
                if self._queue[0].namespace != namespace:
                    break
                offers.append(self._queue.popleft())
            number, put = next(self._ids), _Put(offers)
            if not self._transport.port.expose(number, put.pages):
                self._queue.extendleft(reversed(offers))
                return
            self._open[number] = put

    def on_digested(self, number: int, digests: list[int], exposed: list[int]) -> None:
        """Sends a put, once its pages' digests and their readable locations are known."""
        put = self._open[number]
        put.digests, put.exposed = digests, exposed
        self.counters.store_put_pages += len(put.offers)
        self._send_put(number, put)

    def on_result(self, result: StorePutResult) -> None:
        """Handles the store's answer, or its absence. The pages may change again."""
        put = self._open.get(result.put)
        if put is None:
            return
        if result.wants_data and not put.as_data:
            self._sends_data = True
            self._send_put(result.put, put)
            return
        del self._open[result.put]
        self._transport.port.conceal(put.exposed)
        self._memory.release(put.pages)
        self.counters.store_stored_pages += result.stored_pages
        if not result.is_answered:
            for offer in put.offers:
                self._known.pop(offer.noted, None)
            self._make_due(offer.noted for offer in put.offers)
            self._retry_at = self._clock() + RETRY_S
            self.counters.store_dropped_pages += len(put.offers)

    def _send_put(self, number: int, put: _Put) -> None:
        source = None if self._sends_data else self._transport.target
        put.as_data = source is None
        self._send(
            StorePut(
                put=number,
                namespace=put.offers[0].namespace,
                keys=[offer.key for offer in put.offers],
                parents=[offer.parent for offer in put.offers],
                shards=[offer.shard for offer in put.offers],
                digests=put.digests,
                pages=put.exposed,
                source=source,
                data=[self._transport.port.read(p) for p in put.exposed] if put.as_data else [],
            )
        )

    @property
    def num_open_pages(self) -> int:
        return len(self._queue) + sum(len(put.offers) for put in self._open.values())

    def report(self, load_bytes_per_s: float) -> TierReport:
        """The store as the tier below this engine's own. The store itself reports its content.
        `load_bytes_per_s` is measured over fills.
        """
        counters = self.counters
        return TierReport(
            name="store",
            total_pages=0,
            free_pages=0,
            cached_pages=0,
            used_pages=0,
            load_bytes_per_s=load_bytes_per_s,
            counters={
                "queried_pages": counters.store_lookup_pages,
                "hit_pages": counters.store_hit_pages,
                "saved_pages": counters.store_stored_pages,
                "dropped_pages": counters.store_dropped_pages,
            },
        )

    def sizes(self) -> dict[str, int]:
        """Numbers of unanswered lookups, of pages waiting to be put, and of unanswered puts."""
        return {
            "store_lookups": len(self._asked),
            "store_offers": len(self._queue),
            "store_puts": len(self._open),
        }
