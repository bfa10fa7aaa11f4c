"""The tiers below one engine's pool: when pages are copied down and loaded back.

          computed or found often enough: `offer`         a request lacks pages: `plan`, `start`
    pool ─────────────────────────────────────> host memory <────────────────────── disk
          given up by the pool: `write_back`    │     ^  └──> pool <──────────────────┘
                                                v     │
                  given up, or written through: disk ─┘ a request waits: `tick`

Four threads move bytes (loads, fetches, saves to host memory, saves to disk); the engine thread
does everything else. Only pages that the pool evicts before they were saved are copied within a
step, since their places are reused at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from weft.contract.clock import Clock
from weft.contract.reports import TierReport
from weft.contract.timeline import FillRecord
from weft.engine.base.background import BackgroundThread
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.events import FillEvents
from weft.engine.sources.carried import Carried
from weft.engine.sources.tiers.build import TierComponents
from weft.engine.sources.tiers.layer_loads import DAMAGED, LayerLoad, LayerLoads, TierLayers
from weft.engine.sources.tiers.loads import (
    FetchMove,
    LoadChunk,
    PieceLoad,
    TierLoad,
    TierRun,
    chunked,
)
from weft.engine.sources.tiers.pieces import (
    FoundPieces,
    cut,
    find_pieces,
    names_of,
    pages_of,
    runs_of,
)
from weft.engine.sources.tiers.saves import DigestSave, DiskSave, HostSave, Removal
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Node
from weft.pages.tiers.host import HostMemory
from weft.pages.tiers.keyed import PageName, PagePlace
from weft.pages.tiers.policy import LoadCost, TierPolicy
from weft.pages.tiers.tier import PageLoad, Tier
from weft.pages.transfer.page_pool import PagePool

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk, the part of a load that becomes usable at a time."""
DIRECT_CHUNK_BYTES = 64 << 20
"""Bytes of a chunk in memory that the pool's device copies from directly, where a chunk's fixed
cost exceeds that of its bytes.
"""
MIN_CHUNKS = 32
"""Least number of chunks in a load as large as the pool. It bounds the share of the pool that a
chunk keeps if it never ends.
"""
MAX_WRITE_BACK_BYTES = 64 << 20
"""Most bytes of pages copied within one step, and separately of pieces of companions, of which the
last may exceed it. Content that is evicted beyond this is lost.
"""
MAX_OPEN_SAVES = 512
"""Most pages on their way to host memory, and to disk."""
MAX_OPEN_FETCHES = 256
MAX_SPARE_SLOTS = 64
MAX_DISK_SHARE = 2
"""Part of the pool that a load by layer from disk may fill: a disk that never answers keeps it."""
DISK_REST_S = 5.0
"""Seconds for which a disk is not written to after a failed write."""


class _Planned(NamedTuple):
    runs: list[TierRun]
    loads: list[PageLoad]
    """Pins on these pages, and on the pages of the pieces."""
    pieces: PieceLoad | None = None
    """Pieces that the request also needs; None: it needs none."""
    piece_runs: Sequence[Sequence[TierRun]] = ()
    """For each companion, the pages of its pieces, counted from 0."""
    is_by_layer: bool = False


class _PiecePools(NamedTuple):
    """Access of each thread to a companion's pieces."""

    load: PagePool
    save: PagePool
    step: PagePool


class Tiers:
    """Host memory and disk below one pool. Used by the engine's thread.

    Args:
        policy: Decides what is copied down, and when loading pays.
        prefill_tokens_per_s: Returns the measured local rate; 0: unknown.
        num_cached_pages: Returns how many of a request's first n pages are in the pool.
        progress_timeout_s: Seconds without progress after which a load is abandoned.
        num_continuable_pages: Returns how many of a request's first n pages are in the pool and can
            be continued.
        wake: Called by other threads when the engine should take a turn.
        companions: Of the model.
        layers: None: pages are loaded whole.
    """

    def __init__(
        self,
        parts: TierComponents,
        page_size: int,
        memory: PageMemory,
        policy: TierPolicy,
        prefill_tokens_per_s: Callable[[], float],
        num_cached_pages: Callable[[Request, int], int],
        clock: Clock,
        progress_timeout_s: float,
        num_continuable_pages: Callable[[Request, int], int],
        events: FillEvents,
        wake: Callable[[], None],
        companions: Sequence[Carried] = (),
        layers: LayerLoads | None = None,
    ) -> None:
        self._layers = None if companions else layers
        self._due_layers: LayerLoad | None = None
        self.host, self.disk = parts.host, parts.disk
        assert isinstance(parts.host.medium, HostMemory)
        self._rows = parts.host.medium
        self._files = parts.files
        self._page_size = page_size
        self._page_bytes = parts.host.page_bytes
        self._memory = memory
        self._policy = policy
        self._prefill_rate = prefill_tokens_per_s
        self._num_cached_pages = num_cached_pages
        self._num_continuable_pages = num_continuable_pages
        self._clock = clock
        self._progress_timeout_s = progress_timeout_s
        self._make_pool, self._wake = parts.make_pool, wake
        self._load_pool, self._save_pool, self._step_pool = (parts.make_pool() for _ in range(3))
        self._loader = BackgroundThread("weft-tier-load", wake)
        self._fetcher = BackgroundThread("weft-tier-fetch", wake)
        self._saver = BackgroundThread("weft-tier-save", wake)
        self._writer = BackgroundThread("weft-tier-disk", wake)
        self._most_chunk_pages = memory.num_usable_pages // MIN_CHUNKS
        self._loads: dict[int, TierLoad] = {}
        self._planned: dict[int, _Planned] = {}
        self._due: list[LoadChunk] = []
        self._reclaimed: list[Evicted] = []
        self._waiting: list[Request] = []
        self._num_spilling = 0
        """Number of slots evicted from host memory that are being written to disk."""
        self._disk_rests_until = 0.0
        self._stuck: list[tuple[BackgroundThread, Tier]] = []
        """Threads that are stalled in a tier. The tier is not used until they continue."""
        self.num_written_back_pages = 0
        """Pages copied within a step when the pool evicted them, since start."""
        self._piece_room = self._most_written_back
        """Pages of pieces that may still be copied within this turn."""
        self._events = events
        memory.on_reclaimed = self._reclaimed.append
        self._companions = companions
        self._saving: dict[tuple[int, int], int] = {}
        """For each companion's number and piece that is held for its copy, the number of its pages
        on their way to host memory.
        """
        self._piece_pools = [
            _PiecePools(*(carried.make_pool() for _ in range(3))) for carried in companions
        ]
        for number, carried in enumerate(companions):
            carried.companion.on_given_up = partial(self._write_piece_back, number)
            if policy.is_written_through(0):
                carried.companion.on_kept.append(partial(self._offer_piece, number))
        if self.disk is not None:
            self.host.on_evicted = self._host_evicted
            self.disk.remove = self._remove_from_disk

    @property
    def _most_written_back(self) -> int:
        return MAX_WRITE_BACK_BYTES // self._page_bytes

    @property
    def _tiers(self) -> list[Tier]:
        return [self.host] if self.disk is None else [self.host, self.disk]

    # -- down ------------------------------------------------------------------------------------

    def offer(self, request: Request, first: int, end: int) -> None:
        """Copies full pages [first, end) of a request to host memory and disk, outside the steps.

        Pages for which there is no time now are copied when the pool evicts them.
        """
        keys = request.keys.upto(request.tokens, end)
        for index in range(first, end):
            if self.host.pages.knows(keys[index]):
                self._write_through(keys[index])
                continue
            if self._saver.num_open >= MAX_OPEN_SAVES:
                return
            name = PageName(keys[index], keys[index - 1] if index else b"")
            save = self.host.save(name, request.priority)
            if save is None:
                return
            page = request.held.pages[index]
            self._memory.retain([page])
            self._saver.give(HostSave(save, self._save_pool, page, self.host, self._saved))
        for number, carried in enumerate(self._companions):
            for node, piece in reversed(carried.companion.kept_of(request, first, end)):
                self._offer_piece(number, node, piece, request.priority)

    def _offer_piece(
        self, number: int, node: Node, piece: int, priority: int, _: bool = True
    ) -> None:
        """Copies a companion's piece beside a page to host memory and disk, outside the steps."""
        carried = self._companions[number]
        names = names_of(carried, node.key)
        missing = [i for i, name in enumerate(names) if not self.host.pages.knows(name.key)]
        if not missing:
            for name in names:
                self._write_through(name.key)
            return
        is_under_way = (number, piece) in self._saving
        if is_under_way or self._saver.num_open >= MAX_OPEN_SAVES:
            return
        if not carried.companion.hold(piece):
            return
        pages, pool = pages_of(carried, piece), self._piece_pools[number].save
        ended = partial(self._piece_saved, number, piece)
        saves = [(self.host.save(names[index], priority), pages[index]) for index in missing]
        moves = [
            HostSave(save, pool, page, self.host, ended) for save, page in saves if save is not None
        ]
        if not moves:
            carried.companion.give_back([piece])
            return
        self._saving[number, piece] = len(moves)
        for move in moves:
            self._saver.give(move)

    def _piece_saved(self, number: int, piece: int, move: HostSave) -> None:
        self._saving[number, piece] -= 1
        if not self._saving[number, piece]:
            del self._saving[number, piece]
            self._companions[number].companion.give_back([piece])
        if move.save.outcome == "done":
            self._write_through(move.save.name.key)

    def _write_piece_back(self, number: int, evicted: Evicted) -> None:
        """Copies a companion's piece that the pool evicts to host memory, at once: all of it, if
        there is room, or nothing.
        """
        carried, host = self._companions[number], self.host
        names = names_of(carried, evicted.key)
        pages = zip(names, pages_of(carried, evicted.page), strict=True)
        missing = [(name, page) for name, page in pages if not host.pages.knows(name.key)]
        # One piece may be larger than a turn's limit on copies, which would then always lose it.
        has_room = len(missing) <= host.pages.memory.num_available_pages
        if not has_room or self._piece_room <= 0:
            host.counters.dropped_pages += len(missing)
            return
        self._piece_room -= len(missing)
        for name, page in missing:
            save = host.save(name)
            if save is None:
                host.counters.dropped_pages += 1
                continue
            self.num_written_back_pages += 1
            self._rows.write(save.place, self._piece_pools[number].step.read(page))
            self._saver.give(DigestSave(save, self._rows.row(save.place), lambda name: None))

    def write_back(self) -> None:
        """Copies pages that the pool has evicted; must be called before they are overwritten."""
        if not self._reclaimed:
            return
        reclaimed = self._reclaimed.copy()
        self._reclaimed.clear()
        room = self._most_written_back
        for evicted in reclaimed:
            if self.host.pages.knows(evicted.key):
                continue
            name = PageName(evicted.key, evicted.parent)
            save = self.host.save(name) if room > 0 else None
            if save is None:
                self.host.counters.dropped_pages += 1
                continue
            room -= 1
            self.num_written_back_pages += 1
            self._rows.write(save.place, self._step_pool.read(evicted.page))
            self._saver.give(DigestSave(save, self._rows.row(save.place), lambda name: None))

    def _saved(self, move: HostSave) -> None:
        self._memory.release([move.page])
        if move.save.outcome == "done":
            self._write_through(move.save.name.key)

    def _write_through(self, key: bytes) -> None:
        if self.disk is None or self.disk.pages.knows(key) or not self._may_write:
            return
        place = self.host.pages.pin(key, is_reader=False)
        if place is not None and not self._to_disk(place, was_given_up=False):
            self.host.pages.unpin(place)

    def _to_disk(self, place: PagePlace, *, was_given_up: bool) -> bool:
        assert self.disk is not None
        save = self.disk.save(place.name)
        if save is None:
            return False
        row = self._rows.row(place)
        self._writer.give(DiskSave(save, row, place, was_given_up, self.disk, self._written))
        return True

    def _written(self, move: DiskSave) -> None:
        if move.save.outcome == "failed":
            self._disk_rests_until = self._clock() + DISK_REST_S
        if move.was_given_up:
            self._num_spilling -= 1
            self.host.free(move.place)
        else:
            self.host.pages.unpin(move.place)

    @property
    def _may_write(self) -> bool:
        has_room = self._writer.num_open < MAX_OPEN_SAVES and not self._is_stuck(self.disk)
        return has_room and self._clock() >= self._disk_rests_until

    def _make_room(self) -> None:
        """Keeps a few slots of host memory free. Their pages are first saved to disk."""
        if self.disk is None:
            return
        memory = self.host.pages.memory
        wanted = max(1, min(MAX_SPARE_SLOTS, memory.num_usable_pages // 4))
        while memory.num_free_pages + self._num_spilling < wanted:
            place = self.host.evict()
            if place is None:
                return
            if self.disk.pages.knows(place.name.key):
                self.host.free(place)
            elif self._may_write and self._to_disk(place, was_given_up=True):
                self._num_spilling += 1
            else:
                self.host.counters.dropped_pages += 1
                self.host.free(place)

    def _host_evicted(self, place: PagePlace) -> None:
        assert self.disk is not None
        if not self.disk.pages.knows(place.name.key):
            self.host.counters.dropped_pages += 1

    # -- up --------------------------------------------------------------------------------------

    def num_held_pages(self, request: Request, num_pages: int) -> int:
        """How many of a request's first `num_pages` pages the pool and tiers hold, up to a gap."""
        cached = self._num_cached_pages(request, num_pages)
        runs = self._find(request, cached, num_pages)
        held = runs[-1].end_page if runs else cached
        if not self._companions:
            return held
        continuable = self._num_continuable_pages(request, num_pages)
        found = self._find_pieces(request, held, continuable)
        return continuable if found is None else found.border

    def look_up(self, request: Request) -> None:
        """Registers a new request. While it waits, its pages move from disk to host memory."""
        if self.disk is not None:
            self._waiting.append(request)

    def plan(self, request: Request) -> bool:
        """Decides whether the request continues with a load, which `start` begins. The request was
        just admitted, or was filled up to a page border.
        """
        if request.state is State.PREEMPTED:
            request.sources.skips_tiers = False
        if request.sources.skips_tiers:
            return False
        first = begin = request.num_computed // self._page_size
        end = request.num_reusable_tokens // self._page_size
        if end <= first:
            return False
        if self._companions:
            first = len(request.held.pages)  # The pool may have pages after its last piece.
        runs, found = self._find(request, first, end), None
        if self._companions:
            held = runs[-1].end_page if runs else min(first, end)
            found = self._find_pieces(request, held, begin)
            runs = cut(runs, 0 if found is None else found.border)
        if request.state is not State.LOADING:
            self._count(runs, max(0, end - first))
        if self._companions:
            return found is not None and self._plan_pieces(request, runs, found)
        costs = [self._cost(run) for run in runs]
        runs = runs[: self._policy.num_loaded(costs, self._prefill_rate())]
        if runs:
            is_by_layer = self._goes_by_layer(request, runs)
            planned = _Planned(runs, self._pin(request, runs), is_by_layer=is_by_layer)
            self._planned[id(request)] = planned
        return bool(runs)

    def _goes_by_layer(self, request: Request, runs: Sequence[TierRun]) -> bool:
        """Whether the request may begin to compute while these pages come."""
        layers = self._layers
        if layers is None or self._stuck or self._loader.num_open or request.sources.candidates:
            return False
        if layers.pool.needs_rows and any(self._is_copied(run.tier) for run in runs):
            return False
        of_disk = sum(run.num_pages for run in runs if run.tier is self.disk)
        if of_disk > self._memory.num_usable_pages // MAX_DISK_SHARE:
            return False
        load_s = 0.0
        for run in runs:
            bytes_per_s = self._policy.bytes_per_s(run.tier.name)
            load_s += run.num_pages * self._page_bytes / bytes_per_s if bytes_per_s else 0.0
        return layers.suits(request, runs[-1].end_page, load_s)

    def _is_copied(self, tier: Tier) -> bool:
        """Whether the pool's device cannot read the tier's pages where they are."""
        return tier is not self.host or self._rows.pinned is None

    def _plan_pieces(self, request: Request, runs: list[TierRun], found: FoundPieces) -> bool:
        """Decides about pages and pieces together, since one is useless without the other."""
        pages = [page for own in found.pages for page in own]
        holders = (*(run.tier for run in runs), *(page.tier for page in pages))
        tier = max(holders, key=self._tiers.index)
        num_pages = sum(run.num_pages for run in runs) + len(pages)
        num_tokens = found.border * self._page_size - request.num_computed
        cost = LoadCost(tier.name, num_tokens, num_pages * self._page_bytes)
        if not self._policy.num_loaded([cost], self._prefill_rate()):
            return False
        # Before a piece is lent: making room for it may evict another one, which could overwrite
        # these.
        loads = self._pin(request, runs)
        loads += [_pinned(page.tier, page.name.key) for page in pages]
        pieces = self._lend(request, found.border)
        if pieces is None:
            for pinned in loads:
                pinned.end()
            return False
        load = PieceLoad(pieces=pieces, border=found.border, num_missing=len(pages))
        piece_runs = [runs_of(own) for own in found.pages]
        self._planned[id(request)] = _Planned(runs, loads, load, piece_runs)
        return True

    def _lend(self, request: Request, border: int) -> list[list[int]] | None:
        lent: list[list[int]] = []
        for carried in self._companions:
            pieces = carried.companion.lend(request, border)
            if pieces is None:
                self._give_back(lent)
                return None
            lent.append(pieces)
        return lent

    def _pin(self, request: Request, runs: list[TierRun]) -> list[PageLoad]:
        """Pins pages at once, since the pages that the pool evicts for their load could displace
        them.
        """
        keys = request.keys.upto(request.tokens, runs[-1].end_page if runs else 0)
        return [_pinned(run.tier, keys[index]) for run in runs for index in run.indices]

    def start(self, request: Request) -> bool:
        """Prepares the load that `plan` chose, for `begin_loads`; False: there is none."""
        is_coming = self._layers is not None and self._layers.is_of(request)
        if id(request) in self._loads or is_coming:
            return True
        planned = self._planned.pop(id(request), None)
        if planned is None:
            return False
        num_pages = sum(run.num_pages for run in planned.runs)
        pages = request.held.take_promised(self._memory, num_pages, request.namespace)
        if planned.is_by_layer:
            self._start_layers(request, planned, pages)
            return True
        load = TierLoad(request, pages.copy(), self._clock(), pieces=planned.pieces)
        self._loads[id(request)] = load
        size, begin = self._page_size, request.num_computed
        record: FillRecord | None = None
        at = 0
        for run in planned.runs:
            record = self._record(request, run.tier, begin, run.end_page * size)
            begin = run.end_page * size
            self._add_chunks(load, run, planned.loads[at:], pages[at:], record)
            at += run.num_pages
        if planned.pieces is None:
            return True
        for number, (pieces, runs) in enumerate(
            zip(planned.pieces.pieces, planned.piece_runs, strict=True)
        ):
            carried = self._companions[number]
            of_pieces = [page for piece in pieces for page in pages_of(carried, piece)]
            for run in runs:
                if record is None:
                    record = self._record(request, run.tier, begin, planned.pieces.border * size)
                loads = planned.loads[at + run.first_page :]
                self._add_chunks(load, run, loads, of_pieces[run.first_page :], record, number)
            at += len(of_pieces)
        return True

    def _start_layers(self, request: Request, planned: _Planned, pages: list[int]) -> None:
        assert self._layers is not None
        records, begin = list[FillRecord](), request.num_computed
        for run in planned.runs:
            records.append(self._record(request, run.tier, begin, run.end_page * self._page_size))
            begin = run.end_page * self._page_size
        source = TierLayers(
            tier=max((run.tier for run in planned.runs), key=self._tiers.index),
            loads=planned.loads,
            pages=pages,
            pool=self._layers.pool,
            observe=self._policy.observe,
        )
        self._due_layers = self._layers.make(request, source, pages, records)

    def _add_chunks(
        self,
        load: TierLoad,
        run: TierRun,
        loads: Sequence[PageLoad],
        pages: Sequence[int],
        record: FillRecord,
        companion: int | None = None,
    ) -> None:
        """Cuts a run into chunks to load; `loads[i]` and `pages[i]` belong to its page i.

        Args:
            companion: Number of the companion whose pieces these are pages of; None: they are pages
                of the first group.
        """
        is_of_piece = companion is not None
        pool = self._load_pool if companion is None else self._piece_pools[companion].load
        for piece in chunked(run, self._chunk_pages(run.tier)):
            part = slice(piece.first_page - run.first_page, piece.end_page - run.first_page)
            own = list(loads[part]), list(pages[part])
            chunk = LoadChunk(load, run.tier, *own, record, pool, self._loaded, is_of_piece)
            load.chunks.append(chunk)
            self._due.append(chunk)

    @property
    def num_due(self) -> int:
        """Number of chunks of loads that `begin_loads` will begin."""
        return len(self._due) + (self._due_layers is not None)

    def begin_loads(self) -> None:
        """Begins the loads that `start` has prepared: wipes and writes their pages."""
        for chunk in self._due:
            self._loader.give(chunk)
        self._due.clear()
        if self._due_layers is not None:
            self._loader.give(self._due_layers)
            self._due_layers = None

    def abandon(self, request: Request) -> bool:
        """Stops the load of a request that has ended; False: it had none.

        Pages of the chunk that a thread is loading stay in quarantine until the thread has finished
        it. The other pages become free at once.
        """
        planned = self._planned.pop(id(request), None)
        if planned is not None:
            for found in planned.loads:
                found.end()
            if planned.pieces is not None:
                self._give_back(planned.pieces.pieces)
        if self._layers is not None and self._layers.stop(request):
            return True
        load = self._loads.pop(id(request), None)
        if load is None:
            return False
        load.request = None
        # The thread sets `is_begun` before it reads `is_stopped`, so this thread does the reverse.
        load.is_stopped = True
        for chunk in load.chunks:
            chunk.is_fenced = chunk.is_begun  # Read once: the thread may set it meanwhile.
            if chunk.is_of_piece:
                assert load.pieces is not None
                load.pieces.num_fenced += chunk.is_fenced
            elif chunk.is_fenced:
                self._memory.quarantine(chunk.pages)
            else:
                self._memory.release(chunk.pages)
        # Pages that the ended chunks did not load.
        open_pages = {
            page for chunk in load.chunks if not chunk.is_of_piece for page in chunk.pages
        }
        self._memory.release([page for page in load.pages if page not in open_pages])
        if load.pieces is not None:
            self._memory.release(load.pieces.pages)
            if not load.pieces.num_fenced:
                self._give_back(load.pieces.pieces)
        return True

    def _give_back(self, pieces: Sequence[Sequence[int]]) -> None:
        for carried, own in zip(self._companions, pieces, strict=False):
            carried.companion.give_back(own)

    def _find(self, request: Request, first: int, end: int) -> list[TierRun]:
        """The pages [first, end) that tiers hold, up to the first gap. Of several tiers, the
        nearest counts.
        """
        runs: list[TierRun] = []
        tiers = [tier for tier in self._tiers if not self._is_stuck(tier)]
        keys = request.keys.upto(request.tokens, end)
        for index in range(first, end):
            tier = next((tier for tier in tiers if tier.pages.has(keys[index])), None)
            if tier is None:
                break
            if runs and runs[-1].tier is tier:
                runs[-1] = runs[-1]._replace(end_page=index + 1)
            else:
                runs.append(TierRun(tier, index, index + 1))
        return runs

    def _find_pieces(self, request: Request, held: int, begin: int) -> FoundPieces | None:
        tiers = [tier for tier in self._tiers if not self._is_stuck(tier)]
        keys = request.keys.upto(request.tokens, held)
        return find_pieces(self._companions, keys, begin, tiers)

    def _count(self, runs: list[TierRun], num_wanted: int) -> None:
        of_host = sum(run.num_pages for run in runs if run.tier is self.host)
        self.host.counters.queried_pages += num_wanted
        self.host.counters.hit_pages += of_host
        if self.disk is not None:
            self.disk.counters.queried_pages += num_wanted - of_host
            self.disk.counters.hit_pages += sum(run.num_pages for run in runs) - of_host

    def _chunk_pages(self, tier: Tier) -> int:
        is_direct = tier is self.host and self._rows.pinned is not None
        num_bytes = DIRECT_CHUNK_BYTES if is_direct else CHUNK_BYTES
        return max(1, min(num_bytes // self._page_bytes, self._most_chunk_pages))

    def _cost(self, run: TierRun) -> LoadCost:
        num_bytes = run.num_pages * self._page_bytes
        return LoadCost(run.tier.name, run.num_pages * self._page_size, num_bytes)

    def _record(self, request: Request, tier: Tier, start_token: int, end_token: int) -> FillRecord:
        now = self._clock() - request.timeline.submitted_at
        record = FillRecord(
            source=tier.name,
            worker_id="",
            transport="",
            start_token=start_token,
            end_token=end_token,
            start_s=now,
            end_s=now,
        )
        request.timeline.fills.append(record)
        return record

    def _loaded(self, chunk: LoadChunk) -> None:
        load, request = chunk.load, chunk.load.request
        num_bytes = chunk.num_good * self._page_bytes
        chunk.tier.counters.load_us += int(chunk.duration_s * 1e6)
        self._policy.observe(chunk.tier.name, num_bytes, chunk.duration_s)
        load.chunks.remove(chunk)
        load.last_progress_at = self._clock()
        if request is None:
            if chunk.is_fenced:
                self._end_fence(chunk)
            return
        good, record = chunk.num_good, chunk.record
        if chunk.is_of_piece:
            assert load.pieces is not None
            load.pieces.num_missing -= good
        else:
            if load.pieces is None:
                request.held.add(load.pages[:good])
            else:
                load.pieces.pages += load.pages[:good]
            del load.pages[:good]
        if load.pieces is None:
            position = request.num_computed + good * self._page_size
            request.continue_at(position, was_cached=True)
            record.accepted_tokens += good * self._page_size
        record.bytes += num_bytes
        record.end_s = self._clock() - request.timeline.submitted_at
        if any(found.outcome in ("corrupt", "failed") for found in chunk.loads):
            record.failure = DAMAGED
        if chunk.num_good and load.pieces is None:
            self._events.arrived(request)
        if not load.chunks:
            self._end(load, request)

    def _end(self, load: TierLoad, request: Request) -> None:
        del self._loads[id(request)]
        if load.pieces is not None:
            self._end_pieces(load, load.pieces, request)
        self._memory.release(load.pages)
        request.held.promise(self._memory, len(load.pages))
        self._events.completed(request)

    def _end_pieces(self, load: TierLoad, loaded: PieceLoad, request: Request) -> None:
        """Gives a request the pages that were loaded, if their pieces have come too."""
        if load.pages or loaded.num_missing:
            load.pages = loaded.pages + load.pages
            self._give_back(loaded.pieces)
            return
        end = loaded.border * self._page_size
        num_tokens = end - request.num_computed
        request.held.add(loaded.pages)
        request.continue_at(end, was_cached=True)
        # Records of tiers follow one another, and the last one ends at the border.
        for record in reversed(request.timeline.fills):
            record.accepted_tokens = record.end_token - record.start_token
            num_tokens -= record.accepted_tokens
            if num_tokens <= 0:
                break
        self._events.arrived(request)
        for carried, pieces in zip(self._companions, loaded.pieces, strict=True):
            carried.companion.adopt(request, loaded.border, pieces)
            carried.companion.committed(request)

    def _end_fence(self, chunk: LoadChunk) -> None:
        loaded = chunk.load.pieces
        if not chunk.is_of_piece:
            self._memory.end_quarantine(chunk.pages)
            return
        assert loaded is not None
        loaded.num_fenced -= 1
        if not loaded.num_fenced:
            self._give_back(loaded.pieces)

    # -- every turn ------------------------------------------------------------------------------

    def take(self) -> None:
        for mover in (self._loader, self._fetcher, self._saver, self._writer):
            mover.take()
        for mover, tier in list(self._stuck):
            mover.take()
            if not mover.num_open:
                self._stuck.remove((mover, tier))
                logger.info("%s: it goes on", tier.name)

    def tick(self) -> None:
        """Makes room, and starts to fetch for requests that could not be admitted at once."""
        self._piece_room = self._most_written_back
        self._make_room()
        self._leave_stuck()
        self._give_up_late()
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                if _still_waits(request):
                    self._fetch(request)

    def _give_up_late(self) -> None:
        """Abandons loads without progress, which may be queued after long ones, so that their
        requests continue without them.
        """
        limit = self._clock() - self._progress_timeout_s
        for load in list(self._loads.values()):
            if load.last_progress_at <= limit:
                assert load.request is not None
                load.request.sources.skips_tiers = (
                    True  # Otherwise it would queue for the same load.
                )
                self._give_up(load)

    def _give_up(self, load: TierLoad) -> None:
        request = load.request
        assert request is not None, "a load without a request is none of `_loads`"
        self.abandon(request)
        record = request.timeline.fills[-1]
        record.failure = f"nothing came for {self._progress_timeout_s:.0f} s"
        record.end_s = self._clock() - request.timeline.submitted_at
        self._events.failed(request)

    def _leave_stuck(self) -> None:
        """Replaces threads that are stalled in a tier: a disk may never answer.

        Jobs that a stalled thread has not begun are dropped, a new thread replaces it, and its tier
        is not used until the thread continues. The pages of its current job stay in quarantine.
        """
        now = self._clock()
        if self._loader.stuck_s(now) >= self._progress_timeout_s:
            at = self._loader.current
            tier = self.host
            if isinstance(at, LoadChunk):
                tier = at.tier
            elif isinstance(at, LayerLoad):
                assert isinstance(at.source, TierLayers)
                tier = at.source.tier
            layers = self._layers
            coming = None if layers is None else layers.present
            if layers is not None and coming is not None and isinstance(coming.source, TierLayers):
                layers.leave()
            self._load_pool = self._make_pool()
            self._piece_pools = [
                pools._replace(load=carried.make_pool())
                for pools, carried in zip(self._piece_pools, self._companions, strict=True)
            ]
            for load in list(self._loads.values()):
                self._give_up(load)
            self._loader = self._replace(self._loader, tier)
        if self.disk is None:
            return
        if self._fetcher.stuck_s(now) >= self._progress_timeout_s:
            self._fetcher = self._replace(self._fetcher, self.disk)
        if self._writer.stuck_s(now) >= self._progress_timeout_s:
            self._writer = self._replace(self._writer, self.disk)

    def _replace(self, mover: BackgroundThread, tier: Tier) -> BackgroundThread:
        logger.error(
            "%s: no progress for %g s: not used until it continues",
            tier.name,
            self._progress_timeout_s,
        )
        tier.counters.stalls += 1
        self._stuck.append((mover, tier))
        for move in mover.take_back():
            move.end()
        return BackgroundThread(mover.name, self._wake)

    def _is_stuck(self, tier: Tier | None) -> bool:
        return any(stuck is tier for _, stuck in self._stuck)

    def _remove_from_disk(self, places: Sequence[PagePlace]) -> None:
        assert self.disk is not None
        if self._is_stuck(self.disk):
            self.disk.remove_with_next_save(places)
        else:
            self._writer.give(Removal(self.disk, places))

    def _fetch(self, request: Request) -> None:
        assert self.disk is not None
        end = request.num_reusable_tokens // self._page_size
        first = self._num_cached_pages(request, end)
        keys = request.keys.upto(request.tokens, end)
        runs, found = self._find(request, first, end), None
        if self._companions:
            held = runs[-1].end_page if runs else first
            found = self._find_pieces(request, held, self._num_continuable_pages(request, end))
            runs = cut(runs, 0 if found is None else found.border)
        names = [
            PageName(keys[index], keys[index - 1] if index else b"")
            for run in runs
            for index in (run.indices if run.tier is self.disk else ())
        ]
        for pages in () if found is None else found.pages:
            names += [page.name for page in pages if page.tier is self.disk]
        most = min(MAX_OPEN_FETCHES, self.host.pages.memory.num_usable_pages // 2)
        for name in names:
            if self._fetcher.num_open >= most:
                return
            save = self.host.save(name, request.priority)
            if save is None:
                return
            load = self.disk.load(name.key)
            assert load is not None
            row = self._rows.row(save.place)
            self._fetcher.give(FetchMove(request, _still_waits, load, save, row))

    # -- for operators ---------------------------------------------------------------------------

    def flush(self) -> int:
        """Drops every page that is not being read, and returns their number."""
        self._reclaimed.clear()
        num_pages = len(self.host.flush())
        if self.disk is not None:
            places = self.disk.flush()
            num_pages += len(places)
            self.disk.remove(places)
        return num_pages

    def report(self) -> list[TierReport]:
        reports = []
        for tier in self._tiers:
            counts = tier.counts()
            reports.append(
                TierReport(
                    name=tier.name,
                    total_pages=counts.total,
                    free_pages=counts.free,
                    cached_pages=counts.cached,
                    used_pages=counts.used,
                    load_bytes_per_s=self._policy.bytes_per_s(tier.name),
                    counters=asdict(tier.counters),
                )
            )
        return reports

    @property
    def num_open(self) -> int:
        """Number of unfinished jobs, except stalled ones. Some of them hold pages."""
        movers = (self._loader, self._fetcher, self._saver, self._writer)
        return len(self._due) + sum(mover.num_open for mover in movers)

    def sizes(self) -> dict[str, int]:
        """Numbers of loads, of jobs of all threads, and of stalled threads."""
        return {
            "tier_loads": len(self._loads),
            "tier_moves": self.num_open,
            "tier_stalls": len(self._stuck),
        }

    def close(self) -> None:
        """Stops the threads, within limits. Unsaved pages are lost."""
        for mover in (self._loader, self._fetcher, self._saver, self._writer):
            mover.close()
        self._rows.close()
        if self._files is not None:
            self._files.close()


def _pinned(tier: Tier, key: bytes) -> PageLoad:
    load = tier.load(key)
    assert load is not None, "a page is held, and is not"
    return load


def _still_waits(request: Request) -> bool:
    return request.state in (State.WAITING, State.PREEMPTED)
