"""The way back from a back end to the arena: prompt by prompt, a few pages at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from weft.kvstore.pages import PageStore

MAX_OPEN_FETCHES = 4
"""Prompts whose pages are brought back before anybody asks for a fill."""
FETCH_BYTES = 8 << 20
"""Brought back at a time; what has come is held at once."""
MOST_FETCHED_BYTES = 512 << 20
FETCH_TIMEOUT_S = 2.0
"""A fill begins without what has not come back by then."""


class Fetching:
    """Brings consecutive pages of prompts into an arena. Belongs to the event loop.

    Args:
        pages: What the arena holds.
        bring: Brings the leading pages of a few keys that the arena lacks; how many came.
    """

    def __init__(
        self, pages: PageStore, bring: Callable[[Sequence[bytes]], Awaitable[int]]
    ) -> None:
        self._pages = pages
        self._bring = bring
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()

    def begin(self, keys: Sequence[bytes]) -> None:
        """Begins to bring leading keys, unless too much is under way."""
        if len(self._tasks) < MAX_OPEN_FETCHES:
            task = asyncio.create_task(self._fetch(list(keys)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Brings leading keys, as far as that is done in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await self._fetch(keys)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages came.

        Pages that are in the arena stay there meanwhile, so that those to come do not push out
        what comes before them in the prompt.
        """
        async with self._lock:
            most = MOST_FETCHED_BYTES // self._pages.page_bytes
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
                pass  # What is below stands still.
            finally:
                self._pages.unpin(held)
            return num_fetched
