"""Window pages in leases and tiers, which carry as many of a window group as a request needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.contract.handle import KvHandle
from weft.contract.layout import CacheLayout
from weft.engine.base.device_copies import Mark
from weft.engine.executor.orders import PackPages, UnpackPages, ZeroPages
from weft.engine.executor.port import Executor
from weft.engine.loop.parts import EngineComponents
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request
from weft.engine.requests.window_pages import WindowPages
from weft.engine.sources.tiers.blocks import WindowAccess
from weft.pages.fills.lease import FillJob
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import Node

SPARED_SHARE = 8
"""Copies for the KV store leave one part in this many of the first group's pages to requests."""


def num_pages_of_window_page(layout: CacheLayout) -> int:
    """Pages of a tier that hold one page of a window group; 0: there is no such group."""
    if len(layout.groups) == 1:
        return 0
    own, other = (group.page_bytes(layout.page_size) for group in layout.groups)
    return -(-other // own)


def window_access(
    parts: EngineComponents, windows: WindowPages, pages: RequestPages
) -> WindowAccess:
    num_pages, page_bytes = num_pages_of_window_page(parts.layout), parts.layout.page_bytes
    return WindowAccess(
        owner=windows,
        num_pages=num_pages,
        make_pool=lambda: parts.local.window_pool(num_pages, page_bytes),
        num_continuable_pages=pages.num_continuable_pages,
    )


class WindowPacker:
    """Carries pages of the window group in pages of the first group, so that leases ship them
    alike. It carries the pages that the window at the lease's end reaches and the owner lacks. The
    last one lies first, so that both sides find it whatever their number.

    Args:
        has_store: Whether leases may be of a KV store.
    """

    def __init__(
        self,
        layout: CacheLayout,
        windows: WindowPages,
        memory: PageMemory,
        executor: Executor,
        *,
        has_store: bool = False,
    ) -> None:
        self._page_size = layout.page_size
        self._own_bytes, self._bytes = (
            group.page_bytes(layout.page_size) for group in layout.groups
        )
        self._has_store = has_store
        self.stored_block_pages = num_pages_of_window_page(layout)
        self._windows = windows
        self._memory = memory
        self._executor = executor
        self._most = windows.num_needed(0, memory.num_usable_pages * layout.page_size)
        self.on_allocated: Callable[[], None] | None = None
        """Called before writing to pages that may have been taken from the prefix cache; None: no
        tiers copy what is taken.
        """

    @property
    def num_pages(self) -> int:
        if self._has_store:
            return self._most * self.stored_block_pages
        return self._carriers(self._most)

    def num_pages_of(
        self, asked: KvHandle | Request, end_token: int = 0, *, is_stored: bool = False
    ) -> int:
        if isinstance(asked, Request):
            count = self._windows.num_needed(asked.num_computed, end_token)
            return count * self.stored_block_pages if is_stored else self._carriers(count)
        return self._carriers(self._carried(asked.companion_pages, asked.end_token))

    def pack(self, job: FillJob, end_token: int) -> list[int] | None:
        assert isinstance(job, Request)
        count = self._carried(job.companion_pages, end_token)
        if job.held.num_promised < job.companion_pages:
            return None
        into = job.held.take_promised(self._memory, job.companion_pages, job.namespace)
        if self.on_allocated is not None:
            self.on_allocated()
        # Otherwise the next step would zero them.
        self._executor.order(ZeroPages(self._memory.take_wipes()))
        if count:
            pages = self._windows.last_pages(job, end_token // self._page_size, count)
            self._executor.order(PackPages(pages[::-1], 1, into))
        # Threads read these pages without waiting for steps.
        self._executor.mark().wait()
        return into

    def unpack(
        self, request: Request, pages: list[int], end_token: int, *, is_stored: bool
    ) -> None:
        new = self._windows.adopt(request, end_token // self._page_size)
        # Otherwise the next step would zero them.
        self._executor.order(ZeroPages(self._windows.memory.take_wipes(), 1))
        if new:
            sources = pages[: len(new) * self.stored_block_pages] if is_stored else pages
            self._executor.order(UnpackPages(new[::-1], 1, sources, is_each=is_stored))
        if self.on_allocated is not None:
            # Threads of tiers read these pages without waiting for steps.
            self._executor.mark().wait()

    def _carriers(self, count: int) -> int:
        """Pages of the first group that have room for `count` window pages."""
        return -(-count * self._bytes // self._own_bytes)

    def _carried(self, num_pages: int, end_token: int) -> int:
        """Window pages that `num_pages` pages of the first group carry, at most those before the
        end.
        """
        room = max(0, num_pages) * self._own_bytes // self._bytes
        return min(room, self._windows.num_needed(0, end_token))


class StoredWindows:
    """Implements `StoredBlocks`: each page of the window group is a separate block.

    Args:
        on_allocated: Called before writing to pages that may have been taken from the prefix cache.
    """

    def __init__(
        self,
        layout: CacheLayout,
        windows: WindowPages,
        memory: PageMemory,
        executor: Executor,
        on_allocated: Callable[[], None],
    ) -> None:
        self.num_pages = num_pages_of_window_page(layout)
        self.window_pages = windows.num_needed(0, memory.num_usable_pages * layout.page_size)
        self._windows = windows
        self._memory = memory
        self._executor = executor
        self._spared = memory.num_usable_pages // SPARED_SHARE
        self._copied: Mark | None = None
        self._on_allocated = on_allocated

    def copy(self, window_pages: Sequence[int], /, namespace: bytes) -> list[list[int]]:
        # Pages for copies must not make requests wait.
        room = max(0, self._memory.num_available_pages - self._spared) // self.num_pages
        window_pages = window_pages[:room]
        if not window_pages:
            return []
        pages = self._memory.allocate(len(window_pages) * self.num_pages, namespace)
        self._on_allocated()
        # Otherwise the next step would zero them.
        self._executor.order(ZeroPages(self._memory.take_wipes()))
        self._executor.order(PackPages(window_pages, 1, pages, is_each=True))
        self._copied = self._executor.mark()
        return [pages[at : at + self.num_pages] for at in range(0, len(pages), self.num_pages)]

    def settle(self) -> None:
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

    def kept_of(self, request: Request, first: int, end: int) -> Sequence[tuple[Node, int]]:
        return self._windows.kept_of(request, first, end)[::-1]
