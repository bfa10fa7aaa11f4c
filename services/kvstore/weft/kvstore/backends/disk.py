"""Local disk as a back end: the arena's pages are copied to it, and fetched on demand.

It uses the tier that workers have below their pools (`weft.engine.sources.tiers`). The index
belongs to the event loop; two threads move the bytes, one for each direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from weft.contract.errors import ConfigError
from weft.contract.reports import TierReport
from weft.contract.store import Offer
from weft.kvstore.backends import fetching
from weft.kvstore.backends.fetching import Fetching
from weft.kvstore.pages import Incoming, PageStore
from weft.pages.memory.eviction import EvictionPolicy
from weft.pages.tiers.disk import PageFiles, discard_others, disk_tier, stored_page_bytes
from weft.pages.tiers.keyed import PageName, PagePlace
from weft.pages.tiers.policy import TierPolicy
from weft.pages.tiers.tier import PageLoad, PageSave, Tier

logger = logging.getLogger(__name__)

MAX_OPEN_SAVES = 1024
"""Most pages on their way to disk; beyond them pages stay in the arena only."""
DISK_REST_S = 5.0
CLOSE_POLL_S = 0.01


class DiskBackend:
    """Implements `Backend` with a disk below an arena. Used by the event loop. `disk` holds pages
    of the arena's size; `namespace_quota` is the share of it that one namespace may have.
    """

    def __init__(self, pages: PageStore, disk: Tier, namespace_quota: float) -> None:
        self.disk = disk
        self._pages = pages
        self._quota = max(1, int(disk.counts().total * namespace_quota))
        self._policy = TierPolicy()
        self._loop = asyncio.get_running_loop()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weft-spill-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weft-spill-write")
        self._fetching = Fetching(pages, self._bring)
        self._saving: Counter[bytes] = Counter()
        """Pages on their way to disk, by group."""
        self._rests_until = 0.0
        self._num_late = 0
        """Number of abandoned reads that have not ended: until they do, the disk is not used."""
        self._saved_at = time.monotonic()
        """Time at which the last page was saved, or the first of the pages under way was sent."""
        disk.remove = self._remove_later
        pages.on_published = self._published

    # -- down ------------------------------------------------------------------------------------

    def _published(self, offers: Sequence[Offer], group: bytes) -> None:
        for offer in offers:
            page = self._pages.page_of(offer.key)
            if page is None or self.disk.pages.knows(offer.key):
                continue
            if not self._may_save():
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

    def _may_save(self) -> bool:
        now, num_open = time.monotonic(), self._saving.total()
        if not num_open:
            self._saved_at = now
        is_stuck = now - self._saved_at > DISK_REST_S
        return num_open < MAX_OPEN_SAVES and not is_stuck and now >= self._rests_until

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
        self._saved_at = time.monotonic()
        if save.outcome == "failed":
            self._rests_until = time.monotonic() + DISK_REST_S
        save.end()

    # -- up --------------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[bytes]) -> int:
        num_arena = self._pages.num_held(keys)
        num_held, num_disk = num_arena, 0
        for key in keys[num_arena:] if not self._num_late else ():
            if self._pages.page_of(key) is None:
                if not self.disk.pages.has(key):
                    break
                num_disk += 1
            num_held += 1
        self._keep_on_disk(keys[:num_held])
        self.disk.counters.queried_pages += len(keys) - num_arena
        self.disk.counters.hit_pages += num_disk
        return num_held

    def prefetch(self, keys: Sequence[bytes]) -> None:
        if not self._num_late and self._pages.num_held(keys) < len(keys):
            self._fetching.begin(keys)

    async def held_of(self, keys: Sequence[bytes]) -> set[bytes]:
        return set() if self._num_late else {key for key in keys if self.disk.pages.has(key)}

    def _keep_on_disk(self, keys: Sequence[bytes]) -> None:
        """Pages read from the arena count as used on disk too, since the most wanted ones would
        otherwise leave the disk first. Only the last page is noted, because earlier pages stay as
        long as later ones.
        """
        held = self.disk.pages
        place = next((found for key in reversed(keys) if (found := held.pin(key))), None)
        if place is not None:
            held.unpin(place)

    async def fetch(self, keys: Sequence[bytes]) -> None:
        if not self._num_late:
            await self._fetching.fetch(keys)

    async def _bring(self, keys: Sequence[bytes]) -> int:
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
        began_at = time.monotonic()
        work = self._loop.run_in_executor(self._reader, self._read, moving, incoming)
        try:
            num_read, duration_s = await asyncio.shield(work)
        except asyncio.CancelledError:
            # Otherwise the waiting fill has gone, or had waited for other pages before.
            is_stalled = time.monotonic() - began_at >= fetching.FETCH_TIMEOUT_S / 2
            self._num_late += is_stalled
            self.disk.counters.stalls += is_stalled
            work.add_done_callback(partial(self._ended_late, loads, incoming, is_stalled))
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
        # A page that was not read gets a wrong digest, so that it is freed again.
        digests = [
            offer.digest if index < num_read else offer.digest ^ 1
            for index, offer in enumerate(incoming.offers)
        ]
        self._pages.publish(incoming, digests)

    def _ended_late(
        self,
        loads: Sequence[PageLoad],
        incoming: Incoming,
        is_stalled: bool,
        work: asyncio.Future[tuple[int, float]],
    ) -> None:
        self._num_late -= is_stalled
        self._ended(loads, incoming, 0 if work.cancelled() else work.result()[0])

    def _remove_later(self, places: Sequence[PagePlace]) -> None:
        with contextlib.suppress(RuntimeError):  # The store is ending.
            self._writer.submit(self.disk.remove_now, places)

    # -- for operators ---------------------------------------------------------------------------

    async def flush(self) -> int:
        places = self.disk.flush()
        self.disk.remove(places)
        return len(places)

    def report(self) -> TierReport:
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

    def sizes(self) -> dict[str, int]:
        return {}

    async def close(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._saving:
                    await asyncio.sleep(CLOSE_POLL_S)
        await self._fetching.close()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)


class DiskSource:
    """Implements `BackendSource` with a folder and the pages that an earlier store left in it.
    Pages of another size than the arena's are dropped when the back end opens.

    Args:
        folder: Folder of this store alone.
        num_bytes: Most bytes of pages.

    Raises:
        ConfigError: The folder cannot be used, or another process has it.
    """

    def __init__(self, folder: Path, num_bytes: int, policy: EvictionPolicy) -> None:
        self._files = PageFiles(folder)
        self._num_bytes = num_bytes
        self._policy = policy
        self._disk: Tier | None = None
        self._is_sure = False
        """Whether pages have the size that was found."""
        if page_bytes := stored_page_bytes(self._files):
            self._disk = self._open(page_bytes)

    async def page_bytes_of(self, key: bytes) -> int:
        # If pages were found, they are of the model that is served, so their size will be the page
        # size.
        return self._disk.page_bytes if self._disk is not None and self._disk.match([key]) else 0

    def open(
        self, pages: PageStore, namespace_quota: float, threads: ThreadPoolExecutor
    ) -> DiskBackend | None:
        was_sure, self._is_sure = self._is_sure, True
        if self._disk is None or self._disk.page_bytes != pages.page_bytes:
            self._disk = self._open(pages.page_bytes)
        elif not was_sure:
            threads.submit(discard_others, self._files, pages.page_bytes)
        return None if self._disk is None else DiskBackend(pages, self._disk, namespace_quota)

    async def flush(self) -> int:
        if self._disk is None:
            return 0
        places = self._disk.flush()
        await asyncio.to_thread(self._disk.remove_now, places)
        return len(places)

    def describe(self) -> str:
        return ""

    async def close(self) -> None:
        self._files.close()

    def _open(self, page_bytes: int) -> Tier | None:
        try:
            disk = disk_tier(
                self._files, self._num_bytes, page_bytes, self._policy, is_sure=self._is_sure
            )
        except (ConfigError, OSError) as error:
            logger.error("no pages are kept on disk: %s", error)
            return None
        logger.info("%d pages are on disk", disk.counts().cached)
        return disk
