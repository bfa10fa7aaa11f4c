"""The store's disk: pages of the arena are copied there, and come back when they are asked for.

The same tier that workers have below their pools (`weft.engine.tiers`). What is known of it belongs
to the event loop; bytes move in two threads, one a direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from weft.engine.messages import TierReport
from weft.engine.tiers.keyed import PageName, Place
from weft.engine.tiers.policy import TierPolicy
from weft.engine.tiers.tier import PageLoad, PageSave, Tier
from weft.kvstore.pages import Incoming, Offer, PageStore

MAX_OPEN_SAVES = 1024
"""Pages on their way to disk; beyond them pages are in the arena alone."""
MAX_OPEN_FETCHES = 4
"""Prompts whose pages are brought back before anybody asks for a fill."""
FETCH_BYTES = 8 << 20
"""Brought back at a time; what has come is held at once."""
MOST_FETCHED_BYTES = 512 << 20
FETCH_TIMEOUT_S = 2.0
"""A fill begins without what has not come back by then."""
DISK_REST_S = 5.0
CLOSE_POLL_S = 0.01


class Spill:
    """Disk below an arena. Belongs to the event loop.

    Args:
        pages: What the arena holds.
        disk: Pages on disk, of the same size.
        namespace_quota: Share of the disk that one namespace may have.
    """

    def __init__(self, pages: PageStore, disk: Tier, namespace_quota: float) -> None:
        self.disk = disk
        self._pages = pages
        self._quota = max(1, int(disk.counts().total * namespace_quota))
        self._policy = TierPolicy()
        self._loop = asyncio.get_running_loop()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weft-spill-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-spill-write")
        self._fetching = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()
        self._saving: Counter[bytes] = Counter()
        """Pages on their way to disk, by group."""
        self._rests_until = 0.0
        pages.on_published = self._published

    # -- down ------------------------------------------------------------------------------------

    def _published(self, offers: Sequence[Offer], group: bytes) -> None:
        """Copies pages that have come to the arena."""
        for offer in offers:
            page = self._pages.page_of(offer.key)
            if page is None or self.disk.pages.knows(offer.key):
                continue
            if self._saving.total() >= MAX_OPEN_SAVES or time.monotonic() < self._rests_until:
                self.disk.counters.dropped_pages += 1
                continue
            self._keep_to_quota(group)
            save = self.disk.save(PageName(offer.key, offer.parent, group))
            if save is None:
                self.disk.counters.dropped_pages += 1
                continue
            self._pages.hold(page)
            self._saving[group] += 1
            work = self._loop.run_in_executor(self._writer, self._save, save, page, offer.digest)
            work.add_done_callback(partial(self._saved, save, page))

    def _keep_to_quota(self, group: bytes) -> None:
        coming = self._saving[group]
        while self.disk.pages.cache.num_pages_of(group) + coming >= self._quota:
            if not self.disk.evict_of(group):
                return

    def _save(self, save: PageSave, page: int, digest: int) -> None:
        started_at = time.monotonic()
        save.run(self._pages.pool[page], digest)
        self.disk.counters.save_us += int((time.monotonic() - started_at) * 1e6)

    def _saved(self, save: PageSave, page: int, work: asyncio.Future[None]) -> None:
        group = save.name.group
        self._saving[group] -= 1
        if not self._saving[group]:
            del self._saving[group]
        self._pages.unpin([page])
        if save.outcome == "failed":
            self._rests_until = time.monotonic() + DISK_REST_S
        save.end()

    # -- up --------------------------------------------------------------------------------------

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are in the arena or on disk; what is on disk alone is fetched."""
        num_arena = self._pages.num_held(keys)
        num_held, num_disk = num_arena, 0
        for key in keys[num_arena:]:
            if self._pages.page_of(key) is None:
                if not self.disk.pages.has(key):
                    break
                num_disk += 1
            num_held += 1
        self.disk.counters.queried_pages += len(keys) - num_arena
        self.disk.counters.hit_pages += num_disk
        if num_disk and len(self._tasks) < MAX_OPEN_FETCHES:
            task = self._loop.create_task(self._fetch(list(keys[:num_held])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return num_held

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Brings leading keys from disk to the arena, as far as that is done in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._fetch(keys)

    async def _fetch(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages came.

        Pages that are in the arena stay there meanwhile, so that those to come do not push out
        what comes before them in the prompt.
        """
        async with self._fetching:
            most = MOST_FETCHED_BYTES // self.disk.page_bytes
            step = max(1, FETCH_BYTES // self.disk.page_bytes)
            num_fetched = 0
            held: list[int] = []
            try:
                while num_fetched < most:
                    done = self._pages.num_held(keys)
                    held += self._pages.pin(keys[len(held) : done])
                    wanted = keys[done : done + step]
                    num_good = await self._bring(wanted) if wanted else 0
                    num_fetched += num_good
                    if not num_good:
                        break
            finally:
                self._pages.unpin(held)
            return num_fetched

    async def _bring(self, keys: Sequence[bytes]) -> int:
        """Reads consecutive pages into the arena; returns how many are right."""
        loads: list[PageLoad] = []
        for key in keys:
            load = None if self._pages.page_of(key) is not None else self.disk.load(key)
            if load is None:
                break
            loads.append(load)
        if not loads:
            return 0
        places = [load.place for load in loads]
        incoming = self._pages.begin(
            [Offer(place.name.key, place.digest, 0, place.name.parent) for place in places],
            places[0].name.group,
        )
        by_key = {load.place.name.key: load for load in loads}
        moving = [by_key[offer.key] for offer in incoming.offers]
        work = self._loop.run_in_executor(self._reader, self._read, moving, incoming)
        try:
            num_read, duration_s = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(
                lambda done: self._ended(
                    loads, incoming, 0 if done.cancelled() else done.result()[0]
                )
            )
            raise
        self._policy.observe("disk", num_read * self.disk.page_bytes, duration_s)
        self._ended(loads, incoming, num_read)
        return num_read

    def _read(self, loads: Sequence[PageLoad], incoming: Incoming) -> tuple[int, float]:
        started_at = time.monotonic()
        num_read = 0
        for load, page in zip(loads, incoming.pages, strict=True):
            if not load.run(self._pages.pool[page]):
                break
            num_read += 1
        duration_s = time.monotonic() - started_at
        self.disk.counters.load_us += int(duration_s * 1e6)
        return num_read, duration_s

    def _ended(self, loads: Sequence[PageLoad], incoming: Incoming, num_read: int) -> None:
        for load in loads:
            load.end()
        # What was not read gets a digest that it has not: its page is free again.
        digests = [
            offer.digest if index < num_read else offer.digest ^ 1
            for index, offer in enumerate(incoming.offers)
        ]
        self._pages.publish(incoming, digests)

    # -- for operators ---------------------------------------------------------------------------

    def flush(self) -> int:
        """Forgets every page that nobody reads; returns how many."""
        places = self.disk.flush()
        self._writer.submit(self._remove, places)
        return len(places)

    def _remove(self, places: Sequence[Place]) -> None:
        for place in places:
            self.disk.medium.remove(place)

    def report(self) -> TierReport:
        """State and counters."""
        counts = self.disk.counts()
        return TierReport(
            name="disk",
            total_pages=counts.total,
            free_pages=counts.free,
            cached_pages=counts.cached,
            used_pages=counts.used,
            load_bytes_per_s=self._policy.bytes_per_s("disk"),
            counters=asdict(self.disk.counters),
        )

    async def close(self, timeout_s: float) -> None:
        """Ends tasks and threads; what is not written by then is lost.

        Args:
            timeout_s: For what is on its way to disk.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._saving:
                    await asyncio.sleep(CLOSE_POLL_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
