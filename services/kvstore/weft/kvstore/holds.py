"""Holds: pages that stay still while workers read them from the arena, without the store's help."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from weft.contract import faults
from weft.contract.errors import Overloaded
from weft.contract.store import StoreHeld
from weft.kvstore.pages import PageStore
from weft.kvstore.transport import StoreTransport

HOLD_S = 30.0
"""Longest time for which a caller may hold pages."""
BUSY_RETRY_S = 0.2


class Holds:
    """Used by the event loop.

    Args:
        max_holds: Most holds at a time.
    """

    def __init__(self, pages: PageStore, transport: StoreTransport, max_holds: int) -> None:
        self._pages = pages
        self._transport = transport
        self._max_holds = max_holds
        self.num_open = 0

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[StoreHeld]:
        """Pins the pages of the leading keys that the arena holds.

        Raises:
            Overloaded: Too many pages are held for others.
            TransferError: NIXL cannot be used here.
        """
        if self.num_open >= self._max_holds:
            raise Overloaded(
                f"{self.num_open} holds are open", stage="hold", retry_after_s=BUSY_RETRY_S
            )
        self.num_open += 1
        pinned: list[int] = []
        try:
            # The first call takes half a second.
            target = await asyncio.to_thread(self._transport.arena_target)
            pinned = self._pages.pin(keys)
            if faults.STORE_FILL.is_armed:
                await faults.STORE_FILL.flip_bit_async(self._pages.pool, pinned)
            yield StoreHeld(
                hold=0,
                arena_address=self._pages.pool.ctypes.data,
                page_bytes=self._pages.page_bytes,
                pages=pinned,
                digests=self._pages.digests_of(pinned),
                nixl_version=target.version,
                agent_name=target.agent_name,
                agent_metadata=target.metadata,
            )
        finally:
            self.num_open -= 1
            self._pages.unpin(pinned)
