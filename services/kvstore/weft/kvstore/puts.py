"""Puts: pages are read or received, checked against their digests, then published.

Threads move the bytes; only the event loop changes which pages are held. A put whose pages are
being read or checked is completed even if its caller goes away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from weft.contract import faults
from weft.contract.errors import DeadlineExceeded, InvalidRequest, Overloaded
from weft.contract.handle import DATA_CHUNK_BYTES, NixlTargetInfo
from weft.contract.store import PutOrder
from weft.kvstore.counters import Counters
from weft.kvstore.pages import Incoming, PageStore, group_of
from weft.kvstore.transport import StoreTransport
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.nixl import NoOneSidedLane, ReadAgents, TransferError
from weft.v1 import kvstore_pb2

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 0.2
MIN_POLL_S, MAX_POLL_S = 2e-4, 2e-3
FENCE_TIMEOUT_S, FENCE_RETRY_S = 1.0, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOutcome:
    """Outcome of the pages of a put."""

    stored: int = 0
    present: int = 0
    refused: int = 0
    send_data: bool = False
    """Whether the store cannot read the pages from the worker, so that it must send them as
    data.
    """


class Puts:
    """All puts in progress.

    Args:
        transport: Its agents read the pages.
        threads: Threads that read and digest pages.
        max_puts: Most puts at a time.
        timeout_s: Seconds in which a put's pages must have been read.
        data_timeout_s: Seconds in which a put's data must have arrived.
    """

    def __init__(
        self,
        pages: PageStore,
        transport: StoreTransport,
        counters: Counters,
        threads: ThreadPoolExecutor,
        *,
        max_puts: int,
        timeout_s: float,
        data_timeout_s: float,
    ) -> None:
        self._pages = pages
        self._readers = transport.readers
        self._nixl_version = transport.nixl_version
        self._counters = counters
        self._threads = threads
        self._max_puts = max_puts
        self._timeout_s = timeout_s
        self._data_timeout_s = data_timeout_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.num_open = 0
        """Number of puts in progress."""

    async def put(self, order: PutOrder) -> PutOutcome:
        """Reads pages from their source.

        Raises:
            InvalidRequest: There is no source.
            Overloaded: Too many puts are in progress.
            TransferError: The source cannot be read, or not in time.
        """
        source = order.source
        if source is None:
            raise InvalidRequest("source is missing; without NIXL use PutData", param="source")
        # A process without a GPU cannot read a GPU's memory one-sidedly.
        is_on_gpu = source.memory_type == "VRAM"
        if self._readers is None or source.version != self._nixl_version or is_on_gpu:
            return PutOutcome(refused=len(order.offers), send_data=True)
        self._readers.check(source)
        incoming = self._begin(order)
        reading = self._spawn(self._read(order, source, self._readers, incoming))
        return await asyncio.shield(reading)

    async def put_data(
        self, order: PutOrder, parts: AsyncIterator[kvstore_pb2.PutDataRequest]
    ) -> PutOutcome:
        """Receives a put's pages as data.

        Raises:
            InvalidRequest: A message does not fit, or bytes are missing at the end.
            Overloaded: Too many puts are in progress.
            DeadlineExceeded: The data did not arrive in time.
        """
        incoming = self._begin(order)
        try:
            async with asyncio.timeout(self._data_timeout_s):
                if incoming.pages:  # Without pages to store, the bytes are not needed.
                    await self._receive(order, incoming, parts)
        except BaseException as error:
            self.num_open -= 1
            self._counters.puts_failed += 1
            self._pages.abandon(incoming)
            if isinstance(error, TimeoutError):
                message = f"the pages did not come within {self._data_timeout_s:g} s"
                raise DeadlineExceeded(message, stage="put") from None
            raise
        return await asyncio.shield(self._spawn(self._check(order, incoming)))

    async def close(self, timeout_s: float) -> None:
        """Waits for the puts in progress; the end of the process ends the rest."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    # -- internals -------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, order: PutOrder) -> Incoming:
        if self.num_open >= self._max_puts:
            self._counters.puts_refused += 1
            raise Overloaded(
                f"{self.num_open} puts are in work", stage="put", retry_after_s=BUSY_RETRY_S
            )
        self.num_open += 1
        self._counters.puts += 1
        self._counters.offered_pages += len(order.offers)
        return self._pages.begin(order.offers, group_of(order.namespace))

    async def _read(
        self, order: PutOrder, source: NixlTargetInfo, readers: ReadAgents, incoming: Incoming
    ) -> PutOutcome:
        peer = (order.source_id, order.source_epoch)
        deadline = time.monotonic() + self._timeout_s
        try:
            digests = await self._loop.run_in_executor(
                self._threads, self._read_pages, readers, peer, source, incoming, deadline
            )
        except Exception as error:
            if isinstance(error, TransferError) and not error.may_still_arrive:
                self._pages.abandon(incoming)
                if isinstance(error, NoOneSidedLane):
                    return PutOutcome(refused=len(order.offers), send_data=True)
            else:
                self._pages.quarantine(incoming)
                self._spawn(self._fence(readers, peer, incoming))
            self._counters.puts_failed += 1
            raise
        finally:
            self.num_open -= 1
        return self._publish(order, incoming, digests)

    def _read_pages(
        self,
        readers: ReadAgents,
        peer: tuple[str, int],
        source: NixlTargetInfo,
        incoming: Incoming,
        deadline: float,
    ) -> list[int]:
        """Runs in a thread; returns the digests.

        Raises:
            TransferError: The read failed; `may_still_arrive` says whether a posted read has not
                ended.
        """
        if not incoming.pages:
            return []
        if time.monotonic() >= deadline:
            raise TransferError("no thread was free to read the pages in time")
        remote = [offer.source_page for offer in incoming.offers]
        handle = readers.read(peer, source, remote, incoming.pages)
        delay = MIN_POLL_S
        while handle.poll() == "pending":
            if time.monotonic() >= deadline:
                raise TransferError(
                    f"reading {len(remote)} pages from {peer[0]} did not end within "
                    f"{self._timeout_s:g} s",
                    may_still_arrive=True,
                    worker_id=peer[0],
                )
            time.sleep(delay)
            delay = min(delay * 1.5, MAX_POLL_S)
        return self._digests(incoming)

    def _digests(self, incoming: Incoming) -> list[int]:
        if faults.STORE_READ.is_armed:
            faults.STORE_READ.flip_bit(self._pages.pool, incoming.pages)
        digests: list[int] = digest_pages(self._pages.pool, incoming.pages).tolist()
        return digests

    async def _fence(self, readers: ReadAgents, peer: tuple[str, int], incoming: Incoming) -> None:
        """Destroys the agent of a read that did not end, which frees the read's pages."""
        logger.warning("reads from %s did not end well: its agent is closed", peer[0])
        while True:
            try:
                await self._loop.run_in_executor(self._threads, self._close_peer, readers, peer)
                break
            except TransferError as error:
                logger.error("%s", error)
                await asyncio.sleep(FENCE_RETRY_S)
        self._pages.end_quarantine(incoming)

    @staticmethod
    def _close_peer(readers: ReadAgents, peer: tuple[str, int]) -> None:
        readers.close_peer(peer, timeout_s=FENCE_TIMEOUT_S)

    async def _receive(
        self,
        order: PutOrder,
        incoming: Incoming,
        parts: AsyncIterator[kvstore_pb2.PutDataRequest],
    ) -> None:
        page_of = {
            offer.key: page for offer, page in zip(incoming.offers, incoming.pages, strict=True)
        }
        pages = [page_of.get(offer.key) for offer in order.offers]
        num_bytes = [0] * len(pages)
        async for part in parts:
            check_part(part, order, num_bytes)
            end = part.offset + len(part.data)
            page = pages[part.index]
            if page is not None:
                self._pages.pool[page, part.offset : end] = np.frombuffer(part.data, np.uint8)
            num_bytes[part.index] = end
        missing = [index for index, count in enumerate(num_bytes) if count < order.page_bytes]
        if missing:
            raise InvalidRequest(
                f"the data ended, and {len(missing)} pages are not complete", param="data"
            )

    async def _check(self, order: PutOrder, incoming: Incoming) -> PutOutcome:
        try:
            digests = await self._loop.run_in_executor(self._threads, self._digests, incoming)
        except BaseException:
            self._pages.abandon(incoming)
            raise
        finally:
            self.num_open -= 1
        return self._publish(order, incoming, digests)

    def _publish(self, order: PutOrder, incoming: Incoming, digests: list[int]) -> PutOutcome:
        bad = self._pages.publish(incoming, digests)
        for offer, digest in bad:
            logger.error(
                "page %d of %s has digest %016x, not %016x as it was told",
                offer.source_page,
                order.source_id,
                digest,
                offer.digest,
            )
        outcome = PutOutcome(
            stored=len(incoming.pages) - len(bad),
            present=incoming.num_present,
            refused=incoming.num_refused + len(bad),
        )
        counters = self._counters
        counters.stored_pages += outcome.stored
        counters.present_pages += outcome.present
        counters.refused_pages += outcome.refused
        counters.digest_mismatches += len(bad)
        counters.bytes_in += len(incoming.pages) * self._pages.page_bytes
        return outcome


def check_part(part: kvstore_pb2.PutDataRequest, order: PutOrder, num_bytes: Sequence[int]) -> None:
    """Checks that a part continues its page, of which `num_bytes` bytes have arrived so far.

    Raises:
        InvalidRequest: The part does not continue its page.
    """
    if part.HasField("header"):
        raise InvalidRequest("a second header", param="header")
    if part.index >= len(order.offers):
        raise InvalidRequest(f"index {part.index} of {len(order.offers)} pages", param="index")
    if part.offset != num_bytes[part.index]:
        raise InvalidRequest(
            f"offset {part.offset} of page {part.index} after {num_bytes[part.index]} bytes",
            param="offset",
        )
    end = part.offset + len(part.data)
    if not 0 < len(part.data) <= DATA_CHUNK_BYTES or end > order.page_bytes:
        raise InvalidRequest(
            f"{len(part.data)} bytes at {part.offset} of a page of {order.page_bytes}; at most "
            f"{DATA_CHUNK_BYTES} a message",
            param="data",
        )
