"""The parts of a store that depend on the size of a page, which the first put fixes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from weft.contract.clock import monotonic
from weft.contract.errors import InvalidRequest, WeftError
from weft.contract.fills import FillReply
from weft.kvstore.backends.base import BackendSource
from weft.kvstore.counters import Counters
from weft.kvstore.fills import StoreFills
from weft.kvstore.holds import Holds
from weft.kvstore.pages import PageStore
from weft.kvstore.puts import Puts
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.transport import StoreTransport, TransportChoice
from weft.pages.memory.eviction import EVICTION_POLICIES

MIN_PAGES, MAX_PAGES = 4, 1 << 22


class PageSizeMismatch(WeftError):
    """The store holds pages of another size."""

    reason = "PAGE_SIZE_MISMATCH"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class PageArena:
    """Pages, transport, puts and fills over the arena. Used by the event loop.

    Args:
        epoch: Incarnation of the store.
        arena: uint8 `[memory_bytes]`; outlives this object.
        reply: Hands a fill's event to its stream.
        wake: Called from the shipping thread when `take_shipped` has something to take.
        source: Opens the back end; None: pages are in the arena alone.

    Raises:
        InvalidRequest: The arena is too small for a few pages of that size.
    """

    def __init__(
        self,
        settings: KvStoreSettings,
        name: str,
        epoch: int,
        arena: NDArray[np.uint8],
        page_bytes: int,
        transport: TransportChoice,
        counters: Counters,
        threads: ThreadPoolExecutor,
        reply: Callable[[FillReply], None],
        wake: Callable[[], None],
        source: BackendSource | None = None,
    ) -> None:
        num_pages = min(len(arena) // page_bytes, MAX_PAGES)
        if num_pages < MIN_PAGES:
            raise InvalidRequest(
                f"pages of {page_bytes:,} bytes: the arena has {len(arena):,} bytes, which is less "
                f"than {MIN_PAGES} of them; start the store with a larger --memory-bytes",
                param="page_bytes",
            )
        pool = arena[: num_pages * page_bytes].reshape(num_pages, page_bytes)
        policy = EVICTION_POLICIES[settings.eviction_policy]
        self.pages = PageStore(pool, policy, settings.namespace_quota)
        self.backend = (
            None if source is None else source.open(self.pages, settings.namespace_quota, threads)
        )
        self.transport = StoreTransport(transport, f"kvstore-{name}", pool, wake)
        self.puts = Puts(
            self.pages,
            self.transport,
            counters,
            threads,
            max_puts=settings.max_puts,
            timeout_s=settings.put_timeout_s,
            data_timeout_s=settings.put_data_timeout_s,
        )
        self.holds = Holds(self.pages, self.transport, settings.max_fills)
        self.fills = StoreFills(
            self.pages,
            self.transport,
            epoch,
            reply,
            max_fills=settings.max_fills,
            chunk_bytes=settings.chunk_bytes,
            clock=monotonic,
            backend=self.backend,
        )
