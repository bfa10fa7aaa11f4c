"""Computes digests of pages of a pool in host memory outside the steps, and reads and writes single
pages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from weft.contract import faults
from weft.contract.pages import StagingPages
from weft.pages.transfer.digest import digest_pages

MAX_PUT_PAGES = 64
MAX_QUEUED_PAGES = 512
CLOSE_TIMEOUT_S = 5.0
Tag = tuple[bytes, int] | int
"""Purpose of digests: (lease, chunk) of a fill to verify, or the number of a put."""


class Digested(NamedTuple):
    """Digests of some pages as they are in the pool."""

    tag: Tag
    digests: list[int]
    pages: list[int]
    """Pages of the exchange: those that the store reads, or those in which a fill has landed."""


class DigestThread:
    """Implements `PagePort` over a pool in host memory, uint8 `[num_pages, page_bytes]`. Any thread
    may call `wake`, after a result was queued.

    Args:
        landing: Pages that peers write to, and that are copied into the pool, of the same shape but
            for their number; None: peers write into the pool.
    """

    max_put_pages = MAX_PUT_PAGES
    max_queued_pages = MAX_QUEUED_PAGES
    is_moving = False
    """Whether the engine must ask `has_moved`, since no thread wakes it."""

    def __init__(
        self, pool: np.ndarray, wake: Callable[[], None], landing: np.ndarray | None = None
    ) -> None:
        self._pool = pool
        self._landing = pool if landing is None else landing
        self._wake = wake
        self.before_digest: Callable[[StagingPages, Sequence[int]], None] | None = None
        """Test hook, called with the pool and the pages before their digests."""
        self._jobs: SimpleQueue[tuple[Tag, list[int], list[int]] | None] = SimpleQueue()
        self._out: deque[Digested] = deque()
        self._thread = threading.Thread(target=self._run, name="weft-digest", daemon=True)
        self._thread.start()

    def read(self, page: int) -> bytes:
        return bytes(self._pool[page])

    def write(self, page: int, offset: int, data: bytes) -> None:
        self._landing[page, offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def mark(self) -> None: ...

    def verify(
        self, tag: tuple[bytes, int], landed: Sequence[int], pages: Sequence[int], after: object
    ) -> None:
        self._jobs.put((tag, list(landed), list(pages)))

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        self._jobs.put((number, list(pages), list(pages)))
        return True

    def conceal(self, exposed: Sequence[int]) -> None: ...

    def has_moved(self) -> bool:
        """Whether `take` has results for which no thread has woken the engine. Takes
        microseconds.
        """
        return False

    def take(self) -> list[Digested]:
        taken = []
        while self._out:
            taken.append(self._out.popleft())
        return taken

    def sizes(self) -> dict[str, int]:
        """Approximate numbers of digests that were requested or not taken yet."""
        return {"digests": self._jobs.qsize() + len(self._out)}

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            tag, exchanged, pages = job
            where = self._landing if isinstance(tag, tuple) else self._pool
            if self.before_digest is not None:
                self.before_digest(where, exchanged)
            if faults.FILL_DIGEST.is_armed and isinstance(tag, tuple):
                faults.FILL_DIGEST.flip_bit(where, exchanged)
            if where is self._pool:
                digests = digest_pages(self._pool, pages).tolist()
            else:
                digests = []
                for landed, page in zip(exchanged, pages, strict=True):
                    np.copyto(self._pool[page], where[landed])
                    digests += digest_pages(
                        self._pool, [page]
                    ).tolist()  # It is still in the cache.
            self._out.append(Digested(tag, digests, exchanged))
            self._wake()
