"""Fetches pages from a back end to the arena: prompt by prompt, a few pages at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from weft.kvstore.pages import PageStore

MAX_OPEN_FETCHES = 4
"""Most prompts whose pages are fetched ahead of a fill."""
FETCH_BYTES = 8 << 20
"""Most bytes fetched at a time; pages are usable as they arrive."""
MAX_FETCHED_BYTES = 512 << 20
FETCH_TIMEOUT_S = 2.0
"""Seconds that a fill waits for pages being fetched."""


class Fetching:
    """Fetches consecutive pages of prompts into an arena. Used by the event loop. `bring` fetches
    the leading pages of a few keys that the arena lacks, and returns their number.
    """

    def __init__(
        self, pages: PageStore, bring: Callable[[Sequence[bytes]], Awaitable[int]]
    ) -> None:
        self._pages = pages
        self._bring = bring
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()

    def begin(self, keys: Sequence[bytes]) -> None:
        """Starts fetching leading keys, unless too much is under way."""
        if len(self._tasks) < MAX_OPEN_FETCHES:
            task = asyncio.create_task(self._fetch(list(keys)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Fetches leading keys, as far as time allows."""
        if self._pages.num_held(keys) == len(keys):
            return  # The fill does not wait for other prompts' pages.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._fetch(keys)

    async def close(self) -> None:
        """Cancels the fetches in progress."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, keys: Sequence[bytes]) -> int:
        """Pages that are in the arena are pinned meanwhile, so that the fetched ones do not evict
        earlier pages of the prompt.
        """
        async with self._lock:
            most = MAX_FETCHED_BYTES // self._pages.page_bytes
            step = max(1, FETCH_BYTES // self._pages.page_bytes)
            num_fetched = 0
            held: list[int] = []
            try:
                while num_fetched < most:
                    done = self._pages.num_held(keys)
                    held += self._pages.pin(keys[len(held) : done])
                    wanted = keys[done : done + step]
                    num_good = 0
                    if wanted:
                        async with asyncio.timeout(FETCH_TIMEOUT_S):
                            num_good = await self._bring(wanted)
                    num_fetched += num_good
                    if not num_good:
                        break
            except TimeoutError:
                pass  # The back end does not answer.
            finally:
                self._pages.unpin(held)
            return num_fetched
