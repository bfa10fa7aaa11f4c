"""Loads by layer from a KV store, which holds pages still while this worker reads them.

    engine's thread                          store                     reading thread
    start: StoreHold ──────────────────────> holds the pages
    on_held: the thread may begin <───────── where they lie, digests
    its step waits for layers ...            (does nothing)  <──────── READ of groups of layers
    commit and publish, or drop <───────────────────────────────────── whole, or lost
    release of the hold ───────────────────> lets them go

A hold that ends early spoils bytes that are read later, which their digests show. A store that
does not answer, or cannot be read, is not asked for a while; fills bring its pages whole.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from weft.contract.clock import Clock
from weft.contract.layout import PagePart
from weft.contract.store import StoreHeld, StoreHold
from weft.contract.timeline import FillCandidate, FillRecord
from weft.engine.base.background import BackgroundThread
from weft.engine.requests.request import Request
from weft.engine.sources.tiers.layer_loads import DAMAGED, LayerLoad, LayerLoads
from weft.pages.memory.page_memory import PageMemory
from weft.pages.tiers.policy import TierPolicy
from weft.pages.transfer.nixl_ranges import MemoryRange, RangesReader, RangesTarget
from weft.pages.transfer.nixl_wire import TransferError

logger = logging.getLogger(__name__)

HOLD_TIMEOUT_S = 2.0
"""Time after which a store that has not answered is filled from in another way. The first hold of a
store takes half a second.
"""
STALL_S = 1.0
REST_S = 10.0
"""Time for which a store is not asked after it could not be read."""
CLOSE_RETRY_S = 0.2
MAX_READERS = 8


class StoreReaders:
    """Connections to stores' arenas, each made once. Used by the reading thread.

    Args:
        pool: The engine's pool in host memory, [pages, page bytes].
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = MemoryRange(pool.ctypes.data, pool.nbytes, "DRAM", 0)
        self._known: dict[RangesTarget, RangesReader] = {}

    def of(self, target: RangesTarget) -> RangesReader:
        """Raises TransferError if the store cannot be reached."""
        if (reader := self._known.get(target)) is None:
            if len(self._known) >= MAX_READERS:
                self.close(next(iter(self._known)))
            reader = RangesReader("pages", most_bytes=0, stall_s=STALL_S)
            reader.open(target, [self._pool])
            self._known[target] = reader
        return reader

    def close(self, target: RangesTarget) -> None:
        """Returns when nothing arrives any more."""
        reader = self._known.pop(target, None)
        if reader is None or reader.close():
            return
        logger.error("reads from a KV store do not end; their pages stay in use")
        while not reader.close():
            time.sleep(CLOSE_RETRY_S)

    def close_all(self) -> None:
        """At the end of the process, once the reading thread has ended."""
        for reader in self._known.values():
            reader.close()
        self._known.clear()


@dataclass(eq=False, slots=True, kw_only=True)
class StoreLayers:
    """Implements `LayerSource` over pages that a store holds."""

    store: FillCandidate
    hold: int
    """Number of the hold."""
    pages: Sequence[int]
    page_bytes: int
    parts: Sequence[PagePart]
    readers: StoreReaders
    pool_address: int
    ended: Callable[[StoreLayers, int, float], None]
    held: StoreHeld | None = None
    """None: the store has not answered."""
    problem: str = ""
    is_unreadable: bool = False
    """Whether the problem is the store itself and not the pages."""

    def copy(self, group: int) -> bool:
        held = self.held
        assert held is not None, "a load begins when the store has answered"
        target = RangesTarget(held.nixl_version, held.agent_name, held.agent_metadata)
        part, size = self.parts[group], self.page_bytes
        try:
            self.readers.of(target).copy_rows(
                _rows(self.pool_address, self.pages, size, part),
                _rows(held.arena_address, held.pages, size, part),
            )
        except TransferError as error:
            self.reject(error.message)
        if self.problem:
            # Not above: the frames of the error would keep the agent from its end.
            self.readers.close(target)
        return not self.problem

    def check(self, digests: Sequence[int]) -> int:
        assert self.held is not None
        for count, (told, found) in enumerate(zip(self.held.digests, digests, strict=True)):
            if told != found:
                self.problem = DAMAGED
                return count
        return len(digests)

    def failed(self) -> None:
        self.problem = self.problem or DAMAGED

    def reject(self, problem: str) -> None:
        """The store cannot be read by layer."""
        self.problem, self.is_unreadable = problem, True

    def end(self, num_good: int, duration_s: float) -> None:
        self.ended(self, num_good * self.page_bytes, duration_s)


@dataclass(slots=True)
class _Asked:
    load: LayerLoad
    source: StoreLayers
    until: float


class StoreLoads:
    """Has requests begin to compute while their pages come from a store. Used by the engine's
    thread.

    Args:
        layers: Shared with the tiers.
        pool: The engine's pool in host memory, [pages, page bytes].
        parts: Of a page, for each group of layers.
        ask: Asks a store to hold pages, which `on_held` answers.
        release: Ends the hold of a number.
        settle: Waits until the device has wiped pages that were taken.
    """

    def __init__(
        self,
        layers: LayerLoads,
        memory: PageMemory,
        page_size: int,
        pool: NDArray[np.uint8],
        parts: Sequence[PagePart],
        policy: TierPolicy,
        ask: Callable[[StoreHold], None],
        release: Callable[[int], None],
        settle: Callable[[], None],
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._layers = layers
        self._memory = memory
        self._page_size = page_size
        self._pool = pool
        self._parts = parts
        self._policy = policy
        self._ask, self._release = ask, release
        self._settle = settle
        self._clock = clock
        self._readers = StoreReaders(pool)
        self._thread = BackgroundThread("weft-store-read", wake)
        self._numbers = itertools.count(1)
        self._planned: dict[int, FillCandidate] = {}
        self._asked: _Asked | None = None
        """The load whose pages the store was asked to hold."""
        self._rests_until: dict[str, float] = {}
        """By address, for stores that could not be read."""

    def plan(self, request: Request) -> bool:
        """Decides whether the request continues with such a load, which `start` begins."""
        candidates = request.sources.candidates
        if len(candidates) != 1 or candidates[0].kind != "kvstore" or self._thread.num_open:
            return False
        store = candidates[0]
        if self._rests_until.get(store.address, 0.0) > self._clock():
            return False
        num_pages = self._num_pages(request, store)
        if num_pages <= 0 or store.first_token > request.num_computed:
            return False
        bytes_per_s = self._policy.bytes_per_s("store")
        load_s = num_pages * self._page_bytes / bytes_per_s if bytes_per_s else 0.0
        end = request.num_computed // self._page_size + num_pages
        if not self._layers.suits(request, end, load_s):
            return False
        self._planned[id(request)] = store
        return True

    def start(self, request: Request) -> bool:
        """Asks for the pages of the load that `plan` chose; False: there is none."""
        if self._layers.is_of(request):
            return True
        if (store := self._planned.pop(id(request), None)) is None:
            return False
        size, number = self._page_size, next(self._numbers)
        first, num_pages = request.num_computed // size, self._num_pages(request, store)
        pages = request.held.take_promised(self._memory, num_pages, request.namespace)
        now = self._clock() - request.timeline.submitted_at
        record = FillRecord(
            source="kvstore",
            worker_id=store.worker_id,
            transport="nixl",
            start_token=first * size,
            end_token=(first + num_pages) * size,
            start_s=now,
            end_s=now,
        )
        request.timeline.fills.append(record)
        source = StoreLayers(
            store=store,
            hold=number,
            pages=pages,
            page_bytes=self._page_bytes,
            parts=self._parts,
            readers=self._readers,
            pool_address=self._pool.ctypes.data,
            ended=self._ended,
        )
        load = self._layers.make(request, source, pages, [record])
        self._asked = _Asked(load, source, self._clock() + HOLD_TIMEOUT_S)
        keys = request.keys.upto(request.tokens, first + num_pages)[first:]
        self._ask(StoreHold(hold=number, address=store.address, keys=list(keys)))
        return True

    def on_held(self, held: StoreHeld) -> None:
        asked = self._asked
        if asked is None or asked.source.hold != held.hold:
            return
        self._asked = None
        load, source = asked.load, asked.source
        is_whole = len(held.pages) == len(held.digests) == len(load.pages)
        if not load.incoming.is_stopped:
            if not held.agent_name or held.page_bytes != self._page_bytes:
                source.reject("the store does not let its pages be read")
            elif not is_whole:
                source.problem = "the store does not hold the pages"
        if load.incoming.is_stopped or source.problem:
            load.end()
            return
        source.held = held
        self._settle()
        self._thread.give(load)

    def abandon(self, request: Request) -> bool:
        """Stops the load of a request that has ended; False: it had none."""
        self._planned.pop(id(request), None)
        return self._layers.stop(request)

    def take(self) -> None:
        """Ends loads whose thread has ended, and those whose store has not answered."""
        self._thread.take()
        asked = self._asked
        if asked is not None and self._clock() >= asked.until:
            self._asked = None
            asked.source.reject("the store did not answer")
            asked.load.end()

    @property
    def num_open(self) -> int:
        return self._thread.num_open + (self._asked is not None)

    def sizes(self) -> dict[str, int]:
        """Numbers of planned loads, and of those that have begun."""
        return {"store_load_plans": len(self._planned), "store_loads": self.num_open}

    def close(self) -> None:
        """Stops the thread. If it does not stop within a limit, its readers stay open until the
        process ends, since it may still use them.
        """
        if self._thread.close():
            self._readers.close_all()

    @property
    def _page_bytes(self) -> int:
        return int(self._pool.shape[1])

    def _num_pages(self, request: Request, store: FillCandidate) -> int:
        """Pages that the request lacks and the store has."""
        end = min(store.match_tokens, request.num_reusable_tokens)
        return end // self._page_size - request.num_computed // self._page_size

    def _ended(self, source: StoreLayers, num_bytes: int, duration_s: float) -> None:
        self._release(source.hold)
        if source.is_unreadable:
            address = source.store.address
            self._rests_until[address] = self._clock() + REST_S
            logger.info("pages of the KV store at %s come whole: %s", address, source.problem)
        if duration_s:
            self._policy.observe("store", num_bytes, duration_s)


def _rows(base: int, pages: Sequence[int], page_bytes: int, part: PagePart) -> NDArray[np.uint64]:
    """[pages * ranges, 3]: address, bytes and 0 of each range of a part of pages."""
    begins = np.asarray(pages, np.uint64) * np.uint64(page_bytes) + np.uint64(base + part.begin)
    ranges = np.arange(part.num_ranges, dtype=np.uint64) * np.uint64(part.stride)
    rows = np.zeros((len(begins) * part.num_ranges, 3), np.uint64)
    rows[:, 0] = (begins[:, None] + ranges).ravel()
    rows[:, 1] = part.size
    return rows
