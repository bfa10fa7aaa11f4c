"""The KV store: an arena of pages by key, for all workers of a mesh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict

import numpy as np
from weft.common.tasks import start_logged
from weft.common.telemetry.tracing import make_tracer
from weft.contract.clock import monotonic
from weft.contract.errors import Draining
from weft.contract.keys import PieceShape, block_keys, blocks_keys
from weft.contract.reports import TierReport
from weft.contract.store import PutOrder, StoreHeld
from weft.kvstore.backends import open_source
from weft.kvstore.counters import Counters
from weft.kvstore.front import FillFront
from weft.kvstore.page_arena import PageArena, PageSizeMismatch
from weft.kvstore.puts import PutOutcome
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.transport import TransportChoice
from weft.pages.fills.quarantine import QuarantineWatch
from weft.pages.memory.page_memory import PageCounts
from weft.pages.tiers.host import map_memory
from weft.pages.transfer.digest import digest_pages, native_digest
from weft.v1 import kvstore_pb2

logger = logging.getLogger(__name__)

TICK_S, IDLE_TICK_S = 0.05, 0.5
"""Seconds between two looks at the leases; the second while there are none."""
IDLE_CHECK_S = 30.0
NUM_THREADS = 4
"""Most puts read, and pages digested, in parallel."""
CLOSE_TIMEOUT_S = 2.0
CONTINUABLE_KEYS = 256
"""Pages of a prompt after which blocks are looked for at a time."""


class KvStore:
    """Owns the arena and all records of it. Used by the event loop.

    Holds nothing until the first put fixes the size of a page. `store_id` is the same after a
    restart.

    Raises:
        ConfigError: The requested transport does not work here, or the back end cannot be used.
    """

    def __init__(self, settings: KvStoreSettings, store_id: str) -> None:
        self.store_id = store_id
        self.tracer = make_tracer(settings, store_id)
        self.epoch = secrets.randbits(64) | 1
        self.transport = TransportChoice(settings.page_transport)
        self.counters = Counters()
        self.started_at = monotonic()
        self.front = FillFront(self.tracer)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._arena = np.frombuffer(map_memory(settings.memory_bytes), np.uint8)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weft-store")
        self._arena_pages: PageArena | None = None
        self._source = open_source(settings, store_id)
        """Opens the back end once the page size is known."""
        self._is_draining = False
        self._quarantine = QuarantineWatch(settings.max_quarantine_fraction, monotonic)
        self.pool_lost = asyncio.Event()
        """Set once quarantine has held too much of the arena for longer than a put may take. No
        agent takes that long to be destroyed, so only the end of this process frees the pages.
        """
        self._tasks = [
            start_logged(self._tick()),
            start_logged(self._close_idle_agents()),
        ]

    async def warm_up(self) -> str | None:
        """Compiles native code before its first use; returns why digests are slow, if they are."""
        native = await self._loop.run_in_executor(self._threads, native_digest)
        return native.reason

    # -- what is held ----------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 until the first put."""
        return self._arena_pages.pages.page_bytes if self._arena_pages else 0

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return len(self._arena)

    def counts(self) -> PageCounts:
        """Pages by state; free + cached + used + quarantined = total."""
        return self._arena_pages.pages.counts() if self._arena_pages else PageCounts(0, 0, 0, 0, 0)

    @property
    def quarantine_over_s(self) -> float:
        """Seconds for which quarantine has held more than its share of the arena."""
        return self._quarantine.over_s

    def all_counters(self) -> dict[str, int]:
        """Counts since start, by name."""
        found = asdict(self.counters)
        if self._arena_pages is not None:
            fills = self._arena_pages.fills.filler.counters
            found |= {
                "evicted_pages": self._arena_pages.pages.memory.num_evictions,
                "quota_evicted_pages": self._arena_pages.pages.num_quota_evictions,
                "fills_accepted": fills.leases_accepted,
                "fills_declined": fills.leases_declined,
                "fills_done": fills.leases_done,
                "fills_stopped": fills.leases_stopped,
                "filled_pages": fills.shipped_pages,
                "bytes_out": fills.shipped_bytes,
                "open_puts": self._arena_pages.puts.num_open,
                "open_fills": self._arena_pages.fills.filler.num_active,
                "open_holds": self._arena_pages.holds.num_open,
            }
        return found

    async def look_up(self, keys: list[bytes], shape: PieceShape) -> int:
        """Number of leading keys that are held. With `block_pages`, the number ends at a page from
        which a request can continue: all pieces that it needs are held.
        """
        if self._arena_pages is None and self._source is not None and keys:
            page_bytes = await self._source.page_bytes_of(keys[0])
            if page_bytes and self._arena_pages is None:
                self._make_arena_pages(page_bytes)
        num_held = 0
        if (arena := self._arena_pages) is not None:
            backend = arena.backend
            num_held = (
                arena.pages.num_held(keys) if backend is None else await backend.look_up(keys)
            )
            if shape.block_pages:
                num_held = await self._continuable(arena, keys[:num_held], shape)
            if num_held and backend is not None:
                backend.prefetch(keys[:num_held])
                if shape.block_pages:
                    num_pieces = min(max(1, shape.window_pages), num_held)
                    num_pages = shape.state_pages + num_pieces * shape.block_pages
                    sizes = num_pages, shape.block_pages, shape.state_pages
                    backend.prefetch(blocks_keys(keys[:num_held], *sizes))
        self.counters.lookups += 1
        self.counters.lookup_pages += len(keys)
        self.counters.hit_pages += num_held
        return num_held

    async def _continuable(self, arena: PageArena, keys: list[bytes], shape: PieceShape) -> int:
        """The most leading keys after which a request finds all pieces that it needs."""
        of_last = shape.block_pages, shape.state_pages
        border, last = len(keys), -1
        while border != last:
            last = border
            num_needed = max(1, shape.window_pages)
            border = await self._last_whole(arena, keys[:border], *of_last, num_needed)
            if not shape.state_pages:
                break
            border = await self._last_whole(arena, keys[:border], shape.state_pages, 0, 1)
        return border

    async def _last_whole(
        self, arena: PageArena, keys: list[bytes], num_pages: int, first: int, num_needed: int
    ) -> int:
        """The most leading keys of which the last `num_needed`, or all if there are fewer, have
        whole pieces of `num_pages` pages.

        Args:
            first: Number of keys beside a page before those of the piece.
        """
        border = len(keys)
        for end in range(len(keys), 0, -CONTINUABLE_KEYS):
            part = keys[max(0, end - CONTINUABLE_KEYS) : end]
            starts = {key: block_keys(key, 1, first)[0] for key in part}
            held = await self._held_of(arena, list(starts.values()))
            some = [key for key in part if starts[key] in held]
            sizes = num_pages, first
            # Window pages are short and many, blocks of recurrent layers long and few.
            whole = await self._whole(arena, some, *sizes) if num_needed > 1 else set()
            for index in range(len(part) - 1, -1, -1):
                number, key = end - len(part) + index, part[index]
                if num_needed == 1 and starts[key] in held:
                    whole = await self._whole(arena, [key], *sizes)
                if key not in whole:
                    border = number
                elif border - number == num_needed:
                    return border
            await asyncio.sleep(0)  # So that other calls are served during a long search.
        return border

    async def _whole(
        self, arena: PageArena, keys: list[bytes], num_pages: int, first: int
    ) -> set[bytes]:
        blocks = {key: block_keys(key, num_pages, first) for key in keys}
        held = await self._held_of(arena, [name for names in blocks.values() for name in names])
        return {key for key, names in blocks.items() if held.issuperset(names)}

    async def _held_of(self, arena: PageArena, keys: list[bytes]) -> set[bytes]:
        """Fetches none."""
        held = set(arena.pages.held_of(keys))
        lacking = [key for key in keys if key not in held]
        if lacking and arena.backend is not None:
            held |= await arena.backend.held_of(lacking)
        return held

    async def report_corrupt(self, key: bytes) -> bool:
        """Checks a page's bytes against its digest; returns whether they were wrong and the page
        was dropped.
        """
        self.counters.corrupt_reports += 1
        if self._arena_pages is None:
            return False
        pages = self._arena_pages.pages
        pinned = pages.pin([key])
        if not pinned:
            return False
        try:
            (told,) = pages.digests_of(pinned)
            work = self._loop.run_in_executor(self._threads, digest_pages, pages.pool, pinned)
            (found,) = (await work).tolist()
            if found != told:
                logger.error("page %s has digest %016x, not %016x", key.hex(), found, told)
                self.counters.corrupt_pages += 1
                pages.drop(key, pinned[0])
        finally:
            pages.unpin(pinned)
        return bool(found != told)

    async def flush(self) -> int:
        """Drops every page that is not being read; returns how many."""
        flushed = self._arena_pages.pages.flush() if self._arena_pages else 0
        if self._arena_pages is not None and self._arena_pages.backend is not None:
            flushed += await self._arena_pages.backend.flush()
        # These pages were left by an earlier store and not requested yet.
        elif self._source is not None:
            flushed += await self._source.flush()
        self.counters.flushed_pages += flushed
        return flushed

    async def describe_transport(self) -> str:
        """Transports and lanes, for people."""
        if self._arena_pages is not None:
            text = await self._loop.run_in_executor(
                self._threads, self._arena_pages.transport.describe
            )
        else:
            version = self.transport.nixl_version
            text = f"NIXL {version}" if version else self.transport.names[0]
        kept = self._source.describe() if self._source is not None else ""
        return f"{text}. {kept}" if kept else text

    @asynccontextmanager
    async def hold(self, keys: list[bytes]) -> AsyncIterator[StoreHeld]:
        """Pages that stay still meanwhile, as `Holds.hold` says. Raises what it raises, and
        Draining: this process is ending.
        """
        self._refuse_if_draining("hold")
        if self._arena_pages is None:
            yield StoreHeld(hold=0)
            return
        async with self._arena_pages.holds.hold(keys) as held:
            self.counters.held_pages += len(held.pages)
            yield held

    # -- puts ------------------------------------------------------------------------------------

    async def put(self, order: PutOrder) -> PutOutcome:
        """Reads pages, as `Puts.put` does.

        Raises:
            Draining: This process is ending.
            PageSizeMismatch: The arena's pages have another size.
            InvalidRequest: The arena cannot have pages of this size.
        """
        return await self._arena_for(order.page_bytes).puts.put(order)

    async def put_data(
        self, order: PutOrder, parts: AsyncIterator[kvstore_pb2.PutDataRequest]
    ) -> PutOutcome:
        """Receives pages, as `Puts.put_data` does. Raises what `put` raises."""
        return await self._arena_for(order.page_bytes).puts.put_data(order, parts)

    def _arena_for(self, page_bytes: int) -> PageArena:
        """The first call fixes the size of a page."""
        self._refuse_if_draining("put")
        arena_pages = self._arena_pages or self._make_arena_pages(page_bytes)
        if arena_pages.pages.page_bytes != page_bytes:
            self.counters.puts_refused += 1
            raise PageSizeMismatch(
                f"pages of {page_bytes:,} bytes: this store holds pages of "
                f"{arena_pages.pages.page_bytes:,}; restart it for another model or layout",
                stage="put",
            )
        return arena_pages

    def _refuse_if_draining(self, stage: str) -> None:
        if self._is_draining:
            raise Draining("the KV store is shutting down", stage=stage)

    def _make_arena_pages(self, page_bytes: int) -> PageArena:
        self._arena_pages = PageArena(
            self._settings,
            self.store_id,
            self.epoch,
            self._arena,
            page_bytes,
            self.transport,
            self.counters,
            self._threads,
            self.front.streams.deliver,
            self._wake,
            self._source,
        )
        self.front.open(self._arena_pages.fills)
        logger.info("pages have %d bytes", page_bytes)
        return self._arena_pages

    # -- life ------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuses new work; returns once no put, fill or hold is in progress. A hold ends after
        HOLD_S at the latest.
        """
        self._is_draining = True
        arena_pages = self._arena_pages
        if arena_pages is None:
            return
        filler, puts, holds = arena_pages.fills.filler, arena_pages.puts, arena_pages.holds
        filler.is_draining = True
        while filler.num_active or puts.num_open or holds.num_open:
            await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        """Ends tasks, threads and agents."""
        self._is_draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._arena_pages is not None:
            await self._arena_pages.puts.close(CLOSE_TIMEOUT_S)
            if self._arena_pages.backend is not None:
                await self._arena_pages.backend.close(CLOSE_TIMEOUT_S)
            await self._loop.run_in_executor(self._threads, self._arena_pages.transport.close)
        if self._source is not None:
            await self._source.close()
        self._threads.shutdown(wait=False)

    def tiers(self) -> list[TierReport]:
        """State and counters of the tiers below the arena."""
        backend = self._arena_pages.backend if self._arena_pages is not None else None
        return [backend.report()] if backend is not None else []

    def backend_sizes(self) -> dict[str, int]:
        """Numbers of servers that keep the store's pages, by name."""
        backend = self._arena_pages.backend if self._arena_pages is not None else None
        return backend.sizes() if backend is not None else {}

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop has ended.
            self._loop.call_soon_threadsafe(self._take_shipped)

    def _take_shipped(self) -> None:
        if self._arena_pages is not None:
            self._arena_pages.fills.take_shipped()

    async def _tick(self) -> None:
        while True:
            is_busy = self._arena_pages is not None and self._arena_pages.fills.filler.num_active
            await asyncio.sleep(TICK_S if is_busy else IDLE_TICK_S)
            if self._arena_pages is not None:
                self._arena_pages.fills.filler.tick()
                memory = self._arena_pages.pages.memory
                self._quarantine.note(memory.counts().quarantined, memory.num_usable_pages)
                if self.quarantine_over_s > self._settings.put_timeout_s:
                    self.pool_lost.set()

    async def _close_idle_agents(self) -> None:
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            if self._arena_pages is not None:
                await self._loop.run_in_executor(
                    self._threads, self._arena_pages.transport.close_idle
                )
