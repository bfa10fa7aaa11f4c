"""Carriers: pieces of companions in pages of the first group, as leases, tiers and the KV store
have them.

A lease has such pages after those of KV: one companion's after another's, each at a place that both
sides compute from the number of pages and the lease's end. Companions of which a request needs one
piece come first, since they take the same room in every lease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.contract.handle import KvHandle
from weft.contract.keys import PieceShape
from weft.contract.layout import CacheLayout, PageGroup, StatePlane
from weft.contract.spans import MediaSpan
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import Mark
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import (
    PackPieces,
    PoisonPieces,
    UnpackPieces,
    ZeroPages,
    ZeroPieces,
)
from weft.engine.executor.pieces import PieceMemory
from weft.engine.executor.port import Executor
from weft.engine.loop.tail_rows import TailRows
from weft.engine.requests.companions import Companion
from weft.engine.requests.request import Request
from weft.engine.requests.state_companion import StateCompanion
from weft.engine.requests.window_companion import WindowCompanion
from weft.engine.sources.carried import Carried
from weft.pages.fills.lease import FillJob
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree
from weft.pages.transfer.page_pool import PagePool

COMPANIONS: dict[type, type[Companion]] = {StatePlane: StateCompanion, PageGroup: WindowCompanion}
"""What manages the pieces of each kind of entry in `CacheLayout.companions`."""
SPARED_SHARE = 8
"""Copies of window pages for the KV store leave one part in this many of the first group's pages to
requests.
"""


class Carrier:
    """One companion's pieces on the device. Implements `Carried`.

    In a lease pieces lie end to end, the last one first, so that both sides find it whatever their
    number.

    Args:
        number: Of the companion in `CacheLayout.companions`.
        piece_bytes: Bytes of a piece.
        first_key: Number of keys beside a page that come before those of a piece.
        page_bytes: Bytes of a page of the first group.
        memory: The companion's memory in this process, of which tiers copy pieces.
        executor: Does work on pieces in the order of steps.
    """

    def __init__(
        self,
        companion: Companion,
        number: int,
        piece_bytes: int,
        first_key: int,
        page_bytes: int,
        memory: PieceMemory,
        executor: Executor,
    ) -> None:
        self.companion = companion
        self.num_pages = -(-piece_bytes // page_bytes)
        """Pages of the first group that hold one piece."""
        self.first_key = first_key
        self._number = number
        self._piece_bytes = piece_bytes
        self._page_bytes = page_bytes
        self._memory = memory
        self._executor = executor

    def make_pool(self) -> PagePool:
        return self._memory.pool(self.num_pages, self._page_bytes)

    def zero(self) -> bool:
        """Zeroes pieces that changed their namespace; False: there are none."""
        if wipes := self.companion.memory.take_wipes():
            self._executor.order(ZeroPieces(self._number, wipes))
        return bool(wipes)

    def poison(self) -> None:
        """Fills pieces that became free with NaN, so that reading one is noticed."""
        if freed := self.companion.memory.take_freed():
            self._executor.order(PoisonPieces(self._number, freed))

    def pack(self, pieces: Sequence[int], into: Sequence[int], *, is_each: bool) -> None:
        """`PieceMemory.pack`, in the order of steps."""
        self._executor.order(PackPieces(self._number, pieces, into, is_each))

    def unpack(self, pieces: Sequence[int], out_of: Sequence[int], *, is_each: bool) -> None:
        """`PieceMemory.unpack`, in the order of steps."""
        self._executor.order(UnpackPieces(self._number, pieces, out_of, is_each))

    def num_carriers(self, count: int) -> int:
        """Pages of a lease that `count` pieces take."""
        return -(-count * self._piece_bytes // self._page_bytes)

    def num_carried(self, num_pages: int, end_token: int) -> int:
        """Pieces that a lease up to `end_token` has in up to `num_pages` pages. Where a request
        needs one piece, the lease has it.
        """
        num_needed = self.companion.num_needed(0, end_token)
        if not self.companion.needs_many:
            return num_needed
        room = max(0, num_pages) * self._page_bytes // self._piece_bytes
        return min(room, num_needed)


class _Part(NamedTuple):
    carrier: Carrier
    num_pieces: int
    pages: slice
    """Those of the pages after a lease's pages of KV."""


class CompanionPacker:
    """Carries what a request needs of the model's companions in pages of the first group, so that
    leases and the KV store ship them alike.

    Args:
        memory: The first group's pages.
        has_store: Whether leases may be of a KV store, which has each piece in separate pages.
        tail: Rows of media, which come last; None: there are none.
        on_allocated: Called before writing to pages that may have been taken from the prefix cache;
            None: no tiers copy what is taken.
    """

    def __init__(
        self,
        carriers: Sequence[Carrier],
        page_size: int,
        memory: PageMemory,
        executor: Executor,
        *,
        has_store: bool,
        tail: TailRows | None,
        on_allocated: Callable[[], None] | None,
    ) -> None:
        self._carriers = carriers
        self._page_size = page_size
        self._memory = memory
        self._executor = executor
        self._has_store = has_store
        self._tail = tail
        self._spared = memory.num_usable_pages // SPARED_SHARE
        self._copied: Mark | None = None
        self._on_allocated = on_allocated

    @property
    def carried(self) -> Sequence[Carried]:
        return self._carriers

    @property
    def shape(self) -> PieceShape:
        *others, last = self._carriers
        return PieceShape(
            block_pages=last.num_pages,
            window_pages=self._most_of(last) if last.companion.needs_many else 0,
            state_pages=sum(carrier.num_pages for carrier in others),
        )

    @property
    def num_pages(self) -> int:
        num_pages = sum(
            self._num_carriers(carrier, self._most_of(carrier), is_stored=self._has_store)
            for carrier in self._carriers
        )
        return num_pages + (0 if self._tail is None else self._tail.max_pages)

    def _most_of(self, carrier: Carrier) -> int:
        return carrier.companion.num_needed(0, self._memory.num_usable_pages * self._page_size)

    def num_pages_of(
        self, asked: KvHandle | Request, end_token: int = 0, *, is_stored: bool = False
    ) -> int:
        if isinstance(asked, Request):
            num_pages = sum(
                self._num_carriers(
                    carrier,
                    carrier.companion.num_needed(asked.num_computed, end_token),
                    is_stored=is_stored,
                )
                for carrier in self._carriers
            )
            spans = [] if is_stored else self.tail_spans(asked, end_token)
            return num_pages + self._num_tail_pages(spans)
        num_last = self._num_tail_pages(asked.tail_spans)
        parts = self._parts(asked.companion_pages - num_last, asked.end_token)
        return int(parts[-1].pages.stop) + num_last

    def tail_spans(self, request: Request, end_token: int) -> list[MediaSpan]:
        return [] if self._tail is None else self._tail.wanted(request, end_token)

    def lacks_rows(self, request: Request) -> bool:
        return self._tail is not None and self._tail.lacks(request)

    def _num_tail_pages(self, spans: Sequence[MediaSpan]) -> int:
        return 0 if self._tail is None else self._tail.num_pages(spans)

    def pack(self, job: FillJob, end_token: int) -> list[int] | None:
        assert isinstance(job, Request)
        border, num_last = end_token // self._page_size, self._num_tail_pages(job.tail_spans)
        parts = self._parts(job.companion_pages - num_last, end_token)
        pieces = [
            part.carrier.companion.last_pieces(job, border, part.num_pieces) for part in parts
        ]
        if None in pieces or job.held.num_promised < job.companion_pages:
            return None
        places = [] if self._tail is None else self._tail.places(job)
        if places is None:
            return None
        into = job.held.take_promised(self._memory, job.companion_pages, job.namespace)
        self._prepare()
        for part, own in zip(parts, pieces, strict=True):
            if own:
                part.carrier.pack(own[::-1], into[part.pages], is_each=False)
        if self._tail is not None:
            self._tail.pack(places, into[len(into) - num_last :])
        # Threads read these pages, and write to others that were zeroed, without waiting for steps.
        self._executor.mark().wait()
        return into

    def unpack(
        self, request: Request, pages: list[int], end_token: int, *, is_stored: bool
    ) -> None:
        border = end_token // self._page_size
        if not is_stored and self._tail is not None:
            num_others = len(pages) - self._num_tail_pages(self.tail_spans(request, end_token))
            self._tail.unpack(request, end_token, pages[num_others:])
            pages = pages[:num_others]
        for carrier, count, part in self._parts(len(pages), end_token, is_stored=is_stored):
            new = carrier.companion.adopt(request, border)
            # Otherwise the next step would zero them.
            carrier.zero()
            if new:
                assert len(new) <= count, "fewer pieces have come than the request lacks"
                sources = pages[part]
                if is_stored:
                    sources = sources[: len(new) * carrier.num_pages]
                carrier.unpack(new[::-1], sources, is_each=is_stored)
        if self._on_allocated is not None:
            # Threads of tiers read these pieces without waiting for steps.
            self._executor.mark().wait()
        for carrier in self._carriers:
            carrier.companion.committed(request)

    def copy(self, carried: Carried, pieces: Sequence[int], namespace: bytes) -> list[list[int]]:
        carrier = next(each for each in self._carriers if each is carried)
        # Pages for copies must not make requests wait.
        spared, size = self._spared if carrier.companion.needs_many else 0, carrier.num_pages
        pieces = pieces[: max(0, self._memory.num_available_pages - spared) // size]
        if not pieces:
            return []
        pages = self._memory.allocate(len(pieces) * size, namespace)
        self._prepare()
        carrier.pack(pieces, pages, is_each=True)
        self._copied = self._executor.mark()
        return [pages[at : at + size] for at in range(0, len(pages), size)]

    def settle(self) -> None:
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

    def _prepare(self) -> None:
        if self._on_allocated is not None:
            self._on_allocated()
        # Otherwise the next step would zero them.
        if wipes := self._memory.take_wipes():
            self._executor.order(ZeroPages(wipes))

    def _num_carriers(self, carrier: Carrier, count: int, *, is_stored: bool) -> int:
        return count * carrier.num_pages if is_stored else carrier.num_carriers(count)

    def _parts(self, num_pages: int, end_token: int, *, is_stored: bool = False) -> list[_Part]:
        """The parts of the pages after a lease's pages of KV."""
        parts, at = list[_Part](), 0
        for carrier in self._carriers:
            if is_stored and carrier.companion.needs_many:
                count = max(0, num_pages - at) // carrier.num_pages
            else:
                count = carrier.num_carried(num_pages - at, end_token)
            end = at + self._num_carriers(carrier, count, is_stored=is_stored)
            parts.append(_Part(carrier, count, slice(at, end)))
            at = end
        return parts


def num_block_pages(layout: CacheLayout) -> int:
    """Pages of KV that have room for a block of recurrent layers; 0: the model has no blocks."""
    return 0 if layout.states is None else -(-layout.states.block_bytes // layout.page_bytes)


def make_carriers(
    config: EngineConfig,
    layout: CacheLayout,
    num_pieces: Sequence[int],
    prefixes: PrefixTree | None,
    local: LocalExecutor,
    executor: Executor,
) -> tuple[Carrier, ...]:
    """The model's companions and their carriers, in the order of `CacheLayout.companions`.

    Args:
        num_pieces: Pieces of each companion, the null piece included.
        prefixes: Index of the first group's pages; None: nothing is cached.
    """
    carriers, first_key = list[Carrier](), 0
    tables = iter(executor.window_tables)
    pieces = zip(layout.companions, layout.piece_bytes, num_pieces, local.pieces, strict=True)
    for number, (declared, size, count, memory) in enumerate(pieces):
        made = COMPANIONS[type(declared)].make(declared, config, count, prefixes, tables)
        carrier = Carrier(made, number, size, first_key, layout.page_bytes, memory, executor)
        carriers.append(carrier)
        first_key += carrier.num_pages
    return tuple(carriers)


def describe_recurrent(layout: CacheLayout, num_pieces: Sequence[int]) -> list[str]:
    states = layout.states
    if states is None:
        return []
    num_blocks = layout.of_states(num_pieces)
    return [
        f"{states.layers} recurrent layers ({states.name}): {num_blocks:,} blocks of "
        f"{states.block_bytes:,} bytes, as much as the KV of "
        f"{states.block_bytes * layout.page_size // layout.page_bytes:,} tokens"
    ]


def keeps_in_store(config: EngineConfig, layout: CacheLayout) -> bool:
    """Whether the KV store keeps this model's pages. It does not if the model's blocks are longer
    than the store takes.
    """
    return config.has_store and num_block_pages(layout) <= MAX_STORED_BLOCK_PAGES


def describe_store(config: EngineConfig, layout: CacheLayout) -> list[str]:
    """Sentences that say why the KV store is not used for this model, and what to do."""
    if not config.has_store or keeps_in_store(config, layout):
        return []
    return [
        f"the KV store keeps nothing of this model: its states take {num_block_pages(layout):,} "
        f"pages a block, at most {MAX_STORED_BLOCK_PAGES:,}; set a larger page_size "
        f"({config.page_size} tokens now)"
    ]


def describe_layer_loads(
    config: EngineConfig, layout: CacheLayout, *, is_by_layer: bool, has_nixl: bool
) -> list[str]:
    """A sentence that says why pages are loaded whole although `load_by_layer` is always."""
    if config.load_by_layer != "always":
        return []
    if is_by_layer:
        whole = "load_by_layer = always: pages of KV stores are loaded whole: "
        why = "on a GPU" if config.is_on_gpu else "without NIXL"
        reads_stores = config.reads_stores_by_layer and has_nixl
        return [whole + why] if config.has_store and not reads_stores else []
    reasons = (
        (not config.loads_by_layer, "there is no tier: set host_cache_bytes or disk_cache_dir"),
        (config.num_ranks > 1, "ranks or stages divide the work"),
        (layout.states is not None, "its recurrent layers continue from states"),
        (len(layout.groups) > 1, "its windows have pages of their own"),
        (layout.routes is not None, "its pages have routes of experts"),
        (True, "its layers, or this device, need whole pages"),
    )
    reason = next(text for is_so, text in reasons if is_so)
    return [f"load_by_layer = always: pages are loaded whole all the same: {reason}"]
