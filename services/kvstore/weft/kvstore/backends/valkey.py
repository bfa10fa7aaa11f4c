"""Pages in a Valkey or Redis server or cluster, below the arena and shared by several stores.

Pages are copied to the server as they enter the arena, unless another store has done so, and are
fetched when they are asked for. The server decides what it evicts. A lost server or node causes
misses, and pages that are not kept. Fetched pages are checked against the digest that was stored
with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from valkey.exceptions import OutOfMemoryError
from weft.common.tasks import start_logged
from weft.common.valkey_servers import Command, Reply, ValkeyServers, read_password
from weft.contract.clock import monotonic
from weft.contract.reports import TierReport
from weft.contract.store import Offer
from weft.kvstore.backends.fetching import Fetching
from weft.kvstore.backends.valkey_values import (
    HEADER_BYTES,
    StoredPage,
    pack,
    unpack,
    value_name,
)
from weft.kvstore.pages import Incoming, PageStore
from weft.kvstore.settings import KvStoreSettings
from weft.pages.tiers.policy import TierPolicy
from weft.pages.tiers.tier import TierCounters
from weft.pages.transfer.digest import digest_pages

logger = logging.getLogger(__name__)

LOOKUP_KEYS = 256
"""Most keys per lookup."""
SAVE_BYTES = 8 << 20
"""Most bytes per save."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes queued for the server; beyond them pages stay in the arena only."""
FULL_REST_S = 5.0
"""Seconds for which no pages are sent to a full server."""
FLUSH_TIMEOUT_S = 30.0
CLOSE_POLL_S = 0.01


class _Waiting(NamedTuple):
    """A page to be saved, which is pinned in the arena until then."""

    offer: Offer
    group: bytes
    page: int


class ValkeySource:
    """Implements `BackendSource`: the servers, which exist before the page size is known. They know
    no namespace quotas.

    Raises:
        ConfigError: The `valkey_*` settings contradict each other.
    """

    def __init__(self, settings: KvStoreSettings) -> None:
        password = None
        if settings.valkey_password_file is not None:
            password = read_password(settings.valkey_password_file, "valkey_password_file")
        self._settings = settings
        self._servers = ValkeyServers(settings.valkey_url, password, settings.valkey_timeout_s)
        self._greeting = start_logged(self._servers.greet())

    async def page_bytes_of(self, key: bytes) -> int:
        settings = self._settings
        command = ("STRLEN", value_name(settings.valkey_prefix, key))
        (size,) = await self._servers.call([command], settings.valkey_lookup_timeout_s)
        return max(0, size - HEADER_BYTES) if isinstance(size, int) else 0

    def open(
        self, pages: PageStore, namespace_quota: float, threads: ThreadPoolExecutor
    ) -> ValkeyBackend:
        return ValkeyBackend(self._servers, pages, threads, self._settings)

    async def flush(self) -> int:
        return await remove_all(self._servers, self._settings.valkey_prefix)

    def describe(self) -> str:
        return self._servers.describe()

    async def close(self) -> None:
        self._greeting.cancel()
        await self._servers.close()


class ValkeyBackend:
    """Implements `Backend`. Used by the event loop. Other stores share the servers: `flush` drops
    their pages too, and only the servers know how many pages they hold.
    """

    def __init__(
        self,
        servers: ValkeyServers,
        pages: PageStore,
        threads: ThreadPoolExecutor,
        settings: KvStoreSettings,
    ) -> None:
        self._servers = servers
        self._pages = pages
        self._threads = threads
        self._prefix = settings.valkey_prefix
        self._timeout_s = settings.valkey_timeout_s
        self._lookup_timeout_s = settings.valkey_lookup_timeout_s
        self._ttl_ms = round(settings.valkey_ttl_s * 1000)
        self._loop = asyncio.get_running_loop()
        self._policy = TierPolicy()
        self._fetching = Fetching(pages, self._bring)
        self._coming: set[bytes] = set()
        """Keys of pages being fetched, which are not to be saved again."""
        self._brings: set[asyncio.Task[int]] = set()
        self._waiting: deque[_Waiting] = deque()
        self._num_saving = 0
        self._rests_until = 0.0
        self._has_waiting = asyncio.Event()
        self._saver = self._loop.create_task(self._save_all())
        self.counters = TierCounters()
        pages.on_published = self._published

    # -- down ------------------------------------------------------------------------------------

    def _published(self, offers: Sequence[Offer], group: bytes) -> None:
        most = min(
            MAX_WAITING_BYTES // self._pages.page_bytes, self._pages.memory.num_usable_pages // 2
        )
        for offer in offers:
            page = self._pages.page_of(offer.key)
            if page is None or offer.key in self._coming:
                continue
            num_open = len(self._waiting) + self._num_saving
            if num_open >= max(1, most) or monotonic() < self._rests_until:
                self.counters.dropped_pages += 1
                continue
            self._pages.hold(page)
            self._waiting.append(_Waiting(offer, group, page))
            self._has_waiting.set()

    async def _save_all(self) -> None:
        most = max(1, SAVE_BYTES // self._pages.page_bytes)
        while True:
            if not self._waiting:
                self._has_waiting.clear()
                await self._has_waiting.wait()
            batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._num_saving = len(batch)
            try:
                await self._save(batch)
            except Exception:
                logger.exception("pages were not kept")
                self.counters.failed_saves += len(batch)
            finally:
                self._num_saving = 0
                self._pages.unpin([waiting.page for waiting in batch])

    async def _save(self, batch: Sequence[_Waiting]) -> None:
        started_at = monotonic()
        asked: list[Command] = [("EXISTS", self._name(waiting.offer.key)) for waiting in batch]
        known = await self._servers.call(asked, self._timeout_s)
        # A server that did not say whether it has the page is not sent the page either.
        lacking = [w for w, reply in zip(batch, known, strict=True) if _is_number(reply, 0)]
        present = sum(_is_number(reply, 1) for reply in known)
        commands = await self._loop.run_in_executor(self._threads, self._packed, lacking)
        replies = await self._servers.call(commands, self._timeout_s) if commands else []
        num_saved = sum(reply is True for reply in replies)
        counters = self.counters
        counters.saved_pages += num_saved
        counters.saved_bytes += num_saved * self._pages.page_bytes
        counters.failed_saves += len(batch) - present - num_saved
        counters.save_us += int((monotonic() - started_at) * 1e6)
        if any(isinstance(reply, OutOfMemoryError) for reply in replies):
            self._rest()

    def _packed(self, batch: Sequence[_Waiting]) -> list[Command]:
        """Runs in a thread; the caller holds the pages."""
        commands: list[Command] = []
        for offer, group, page in batch:
            value = pack(offer.key, offer.digest, offer.parent, group, self._pages.pool[page])
            command: Command = ("SET", self._name(offer.key), value)
            commands.append((*command, "PX", self._ttl_ms) if self._ttl_ms else command)
        return commands

    def _rest(self) -> None:
        if monotonic() >= self._rests_until:
            logger.warning(
                "valkey is full and evicts nothing (maxmemory-policy): pages are not kept"
            )
        self._rests_until = monotonic() + FULL_REST_S
        while self._waiting:
            self.counters.dropped_pages += 1
            self._pages.unpin([self._waiting.popleft().page])

    # -- up --------------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[bytes]) -> int:
        deadline = monotonic() + self._lookup_timeout_s
        num_arena = num_held = self._pages.num_held(keys)
        num_kept = 0
        while num_held < len(keys) and (left_s := deadline - monotonic()) > 0:
            part = keys[num_held : num_held + LOOKUP_KEYS]
            asked = [key for key in part if self._pages.page_of(key) is None]
            commands: list[Command] = [("EXISTS", self._name(key)) for key in asked]
            replies = await self._servers.call(commands, left_s)
            kept = {key for key, reply in zip(asked, replies, strict=True) if _is_number(reply, 1)}
            num_found = _num_leading(
                [key in kept or self._pages.page_of(key) is not None for key in part]
            )
            num_kept += sum(key in kept for key in part[:num_found])
            num_held += num_found
            if num_found < len(part):
                break
        self.counters.queried_pages += len(keys) - num_arena
        self.counters.hit_pages += num_kept
        return num_held

    def prefetch(self, keys: Sequence[bytes]) -> None:
        if self._pages.num_held(keys) < len(keys):
            self._fetching.begin(keys)

    async def held_of(self, keys: Sequence[bytes]) -> set[bytes]:
        deadline = monotonic() + self._lookup_timeout_s
        held: set[bytes] = set()
        for first in range(0, len(keys), LOOKUP_KEYS):
            if (left_s := deadline - monotonic()) <= 0:
                break
            part = keys[first : first + LOOKUP_KEYS]
            commands: list[Command] = [("EXISTS", self._name(key)) for key in part]
            replies = await self._servers.call(commands, left_s)
            pairs = zip(part, replies, strict=True)
            held.update(key for key, reply in pairs if _is_number(reply, 1))
        return held

    async def fetch(self, keys: Sequence[bytes]) -> None:
        await self._fetching.fetch(keys)

    async def _bring(self, keys: Sequence[bytes]) -> int:
        """Continues even if its caller goes away."""
        lacking = keys[: _num_leading([self._pages.page_of(key) is None for key in keys])]
        if not lacking:
            return 0
        task = self._loop.create_task(self._bring_all(lacking))
        self._brings.add(task)
        task.add_done_callback(self._brings.discard)
        return await asyncio.shield(task)

    async def _bring_all(self, keys: Sequence[bytes]) -> int:
        started_at = monotonic()
        commands: list[Command] = [("GET", self._name(key)) for key in keys]
        replies = await self._servers.call(commands, self._timeout_s)
        stored: dict[bytes, StoredPage] = {}
        bad: list[bytes] = []
        for key, reply in zip(keys, replies, strict=True):
            if not isinstance(reply, bytes):
                break  # Later pages are useless without this one.
            page = unpack(key, reply)
            if page is None or len(page.content) != self._pages.page_bytes:
                bad.append(key)
                break
            stored[key] = page
        num_good = 0
        if stored:
            num_good = await self._take(stored, bad)
            num_bytes = num_good * self._pages.page_bytes
            self._policy.observe("valkey", num_bytes, monotonic() - started_at)
        self.counters.load_us += int((monotonic() - started_at) * 1e6)
        await self._drop(bad)
        return num_good

    async def _take(self, stored: dict[bytes, StoredPage], bad: list[bytes]) -> int:
        """Stores pages in the arena; returns how many are valid, adds the others to `bad`."""
        group = next(iter(stored.values())).group
        incoming = self._pages.begin(
            [Offer(key, page.digest, 0, page.parent) for key, page in stored.items()], group
        )
        try:
            digests = await self._loop.run_in_executor(
                self._threads, self._copy_in, incoming, stored
            )
        # A cancellation is not caught: the thread may still write, and the store is ending.
        except Exception:
            self._pages.abandon(incoming)
            raise
        self._coming.update(offer.key for offer in incoming.offers)
        wrong = self._pages.publish(incoming, digests)
        self._coming.difference_update(offer.key for offer in incoming.offers)
        bad += [offer.key for offer, _ in wrong]
        num_good = len(incoming.offers) - len(wrong)
        self.counters.loaded_pages += num_good
        self.counters.loaded_bytes += num_good * self._pages.page_bytes
        return num_good

    def _copy_in(self, incoming: Incoming, stored: dict[bytes, StoredPage]) -> list[int]:
        """Runs in a thread; returns the digests of the copies."""
        for offer, page in zip(incoming.offers, incoming.pages, strict=True):
            self._pages.pool[page] = np.frombuffer(stored[offer.key].content, np.uint8)
        digests: list[int] = digest_pages(self._pages.pool, incoming.pages).tolist()
        return digests

    async def _drop(self, bad: Sequence[bytes]) -> None:
        if not bad:
            return
        for key in bad:
            logger.error("valkey: page %s differs from what was saved and is dropped", key.hex())
        self.counters.corrupt_pages += len(bad)
        await self._servers.call([("UNLINK", self._name(key)) for key in bad], self._timeout_s)

    # -- for operators ---------------------------------------------------------------------------

    async def flush(self) -> int:
        return await remove_all(self._servers, self._prefix)

    def report(self) -> TierReport:
        counters = asdict(self.counters) | {
            f"backend_{name}": count for name, count in asdict(self._servers.counters).items()
        }
        return TierReport(
            name="valkey",
            total_pages=0,
            free_pages=0,
            cached_pages=0,
            used_pages=0,
            load_bytes_per_s=self._policy.bytes_per_s("valkey"),
            counters=counters,
        )

    def sizes(self) -> dict[str, int]:
        servers = self._servers
        return {"backend_nodes": servers.num_nodes, "backend_nodes_resting": servers.num_resting}

    async def close(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting or self._num_saving or self._brings:
                    await asyncio.sleep(CLOSE_POLL_S)
        await self._fetching.close()
        tasks = [self._saver, *self._brings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _name(self, key: bytes) -> bytes:
        return value_name(self._prefix, key)


async def remove_all(servers: ValkeyServers, prefix: str) -> int:
    """Removes all pages whose names begin with a prefix; returns how many."""
    return await servers.remove_all(value_name(prefix, b"").decode() + "*", FLUSH_TIMEOUT_S)


def _is_number(reply: Reply, number: int) -> bool:
    return isinstance(reply, int) and reply == number


def _num_leading(are_true: Sequence[bool]) -> int:
    return next((index for index, is_true in enumerate(are_true) if not is_true), len(are_true))
