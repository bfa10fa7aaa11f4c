"""Feed of the engine's prefix cache content to any number of gateways.

The feed mirrors the cache from the engine's changes, so a snapshot never waits for a step, and it
keeps the latest changes in one log for all watchers. A watcher is a position in that log and has no
queue: one whose position is no longer in the log gets a snapshot, and goes on from there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from itertools import islice

from weft.contract.codec.pairs import KV_CHANGE, KV_RUN
from weft.contract.kv_changes import MAX_CHANGE_PAGES, KvChange
from weft.pages.memory.events import runs_of
from weft.v1 import worker_pb2

MAX_LOG_PAGES = 1 << 16
"""Most changes to remember, in pages: some megabytes."""
MIN_INTERVAL_S = 0.1
"""Least interval between two messages to one watcher: changes in between are sent together."""
_RUN_PAGES = 16


class KvFeed:
    """Mirror and log of one engine's prefix cache. Used by the server's event loop. `max_log_pages`
    bounds the log, and two messages to one watcher are `min_interval_s` apart or more.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        *,
        max_log_pages: int = MAX_LOG_PAGES,
        min_interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._max_log_pages = max_log_pages
        self._min_interval_s = min_interval_s
        self._held: dict[int, int] = {}
        """Parent by key, in the order of storing."""
        self._log: deque[KvChange] = deque()
        self._log_pages = 0
        self._news = asyncio.Event()
        self._is_closed = False
        self.sequence = 0
        """Sequence number of the last change taken."""

    @property
    def num_pages(self) -> int:
        """Number of pages held now."""
        return len(self._held)

    def take(self, changes: Iterable[KvChange]) -> None:
        """Applies changes reported by the engine."""
        for change in changes:
            for key in change.removed:
                self._held.pop(key, None)
            for run in change.stored:
                parent = run.parent
                for key in run.keys:
                    self._held[key] = parent
                    parent = key
            self._log.append(change)
            self._log_pages += change.num_pages
            self.sequence = change.sequence
        while self._log_pages > self._max_log_pages:
            self._log_pages -= self._log.popleft().num_pages
        self._wake()

    def close(self) -> None:
        """Ends all watches, since the engine is gone."""
        self._is_closed = True
        self._wake()

    async def watch(
        self, request: worker_pb2.WatchKvRequest
    ) -> AsyncIterator[worker_pb2.WatchKvResponse]:
        """Yields a snapshot, unless the watcher can continue without one, then changes until
        `close`.
        """
        position = -1
        if request.HasField("after_sequence") and request.epoch == self._epoch:
            position = request.after_sequence
        while not self._is_closed:
            if not self._covers(position):
                position = self.sequence
                for part in self._snapshot():
                    yield part
            elif position < self.sequence:
                changes = self._since(position)
                position = changes[-1].sequence
                yield self._response(changes)
                await asyncio.sleep(self._min_interval_s)
            else:
                await self._news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _covers(self, position: int) -> bool:
        oldest = self._log[0].sequence if self._log else self.sequence + 1
        return oldest - 1 <= position <= self.sequence

    def _since(self, position: int) -> list[KvChange]:
        """At most one full message."""
        found: list[KvChange] = []
        num_pages = 0
        start = position + 1 - self._log[0].sequence
        for change in islice(self._log, start, None):
            num_pages += change.num_pages
            if found and num_pages > MAX_CHANGE_PAGES:
                break
            found.append(change)
        return found

    def _response(self, changes: Iterable[KvChange]) -> worker_pb2.WatchKvResponse:
        return worker_pb2.WatchKvResponse(
            worker_id=self._worker_id,
            epoch=self._epoch,
            changes=[KV_CHANGE.encode(change) for change in changes],
        )

    def _snapshot(self) -> Iterable[worker_pb2.WatchKvResponse]:
        """Sending the parts may take long; they are of the pages at the first one."""
        as_of, held = self.sequence, list(self._held.items())
        for start in range(0, max(1, len(held)), MAX_CHANGE_PAGES):
            end = start + MAX_CHANGE_PAGES
            snapshot = worker_pb2.KvSnapshotPart(
                as_of_sequence=as_of,
                held=[KV_RUN.encode(run) for run in runs_of(held[start:end], _RUN_PAGES)],
                is_last=end >= len(held),
            )
            yield worker_pb2.WatchKvResponse(
                worker_id=self._worker_id, epoch=self._epoch, snapshot=snapshot
            )
