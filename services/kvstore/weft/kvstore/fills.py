"""Fills from the arena: the store's half of the filler protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.contract import faults
from weft.contract.clock import Clock
from weft.contract.fills import FillReply, FillStart
from weft.contract.handle import KvHandle
from weft.contract.keys import PageKeys, PromptMedia, blocks_keys
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.kvstore.backends.base import Backend
from weft.kvstore.jobs import MAX_FILL_PAGES, StoreJobs
from weft.kvstore.pages import PageStore
from weft.kvstore.transport import StoreTransport
from weft.pages.fills.filler import Filler
from weft.pages.transfer.chunks import ChunkPosted, PeerOpened, ShipResult

MAX_INLINE_PAGES = 256
"""Longest prompt, in pages, whose keys are hashed on the event loop; longer ones in a thread."""


class StoreFills:
    """Leases and their streams; used by the event loop.

    Args:
        epoch: Incarnation of the store.
        reply: Hands an event to its stream.
        max_fills: Most fills at a time.
        chunk_bytes: Most bytes of a fill that are written at a time. The owner checks one chunk
            while the next one travels.
        clock: Monotonic seconds.
        backend: Copies of the pages outside the arena; None: there are none.
    """

    def __init__(
        self,
        pages: PageStore,
        transport: StoreTransport,
        epoch: int,
        reply: Callable[[FillReply], None],
        *,
        max_fills: int,
        chunk_bytes: int,
        clock: Clock,
        backend: Backend | None = None,
    ) -> None:
        self._pages = pages
        self._backend = backend
        self._shipper = transport.shipper
        self._jobs = StoreJobs(pages, transport.shipper, max_fills)
        self.filler = Filler(
            None,
            epoch,
            pages.page_bytes,
            pages.memory,
            self._jobs,
            self._jobs,
            reply,
            clock,
            lanes=transport.lanes,
            pieces=self._jobs,
            max_chunk_bytes=chunk_bytes,
        )

    def take_shipped(self) -> None:
        """Takes the results of the shipping thread."""
        for item in self._shipper.take():
            if isinstance(item, ChunkPosted):
                self.filler.on_posted(item)
            elif isinstance(item, ShipResult):
                self.filler.on_shipped(item)
            elif isinstance(item, PeerOpened):
                self.filler.on_opened(item)
            else:
                self.filler.on_data(*item)

    async def start(self, start: FillStart) -> None:
        """Starts a fill. It needs keys, which are hashed in a thread if the prompt is long; the
        filler handles all other messages of owners.
        """
        handle = start.handle
        num_pages = len(handle.tokens) // max(1, handle.page_size)
        keys: list[bytes] | None = None
        if num_pages <= MAX_INLINE_PAGES:
            keys = _keys_of(handle, num_pages)
        elif num_pages <= MAX_FILL_PAGES:
            keys = await asyncio.to_thread(_keys_of, handle, num_pages)
        if keys and self._backend is not None and handle.page_size > 0:
            await self._backend.fetch(keys[handle.start_token // handle.page_size :])
            most = MAX_FILL_PAGES if handle.block_pages else MAX_STORED_BLOCK_PAGES
            if 0 < (num_more := self._jobs.num_pages_of(handle)) <= most:
                shape = handle.block_pages, handle.state_pages
                await self._backend.fetch(blocks_keys(keys, num_more, *shape))
        is_used = self._jobs.get(handle.lease_id) is not None
        self._jobs.expected_keys = keys
        self.filler.on_start(start)
        self._jobs.expected_keys = None
        job = self._jobs.get(handle.lease_id)
        if job is not None and not is_used:
            if faults.STORE_FILL.is_armed:
                await faults.STORE_FILL.flip_bit_async(self._pages.pool, job.pinned)
                if self._jobs.get(handle.lease_id) is not job:  # The lease has ended meanwhile.
                    return
            job.num_computed = len(job.tokens)
            self.filler.on_progress(job)


def _keys_of(handle: KvHandle, num_pages: int) -> list[bytes]:
    if num_pages < 1 or handle.page_size < 1:
        return []  # The fill will be declined.
    media = PromptMedia(handle.spans, handle.encoder_digest)
    return PageKeys(handle.namespace, handle.page_size, media=media).upto(handle.tokens, num_pages)
