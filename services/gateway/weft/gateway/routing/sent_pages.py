"""An index of the pages sent to each worker, used instead of workers' reports. The least recently
used pages are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import WorkerView

_MAX_EXCESS = 2
"""Factor by which a worker's pages may exceed the limit between two evictions."""
_ABSENT_INTERVALS = 60
"""Evictions after which a worker that was sent nothing is forgotten."""


@dataclass(slots=True, eq=False)
class _Sent:
    """Pages of one incarnation, the least recently sent first.

    A page is always more recent than those that follow it in a prompt, so evictions leave whole
    prefixes.
    """

    worker: WorkerView
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)
    used_at: float = 0.0


class SentPages:
    """Maintains an index of the pages that were sent.

    Args:
        max_pages: Most pages remembered of a worker; fewer if its pool is smaller.
        interval_s: Seconds between evictions.
    """

    def __init__(self, max_pages: int, interval_s: float) -> None:
        self.index = FleetPageIndex(1 << 62)  # `SentPages` bounds each worker itself.
        self._max_pages = max_pages
        self._interval_s = interval_s
        self._look_at = 0.0
        self._sent: dict[str, _Sent] = {}

    def add(self, worker: WorkerView, keys: Sequence[int], now: float) -> None:
        """Records that a worker was sent a prefix, of whose pages these are the keys, from the
        first page on. `now` is in seconds.
        """
        sent = self._sent.get(worker.worker_id)
        if sent is None or sent.worker.epoch != worker.epoch:
            sent = self._sent[worker.worker_id] = _Sent(worker)
        sent.used_at = now
        for key in reversed(keys):
            sent.pages[key] = None
            sent.pages.move_to_end(key)
        self.index.add(worker.worker_id, worker.epoch, keys)
        if now >= self._look_at:
            self._look_at = now + self._interval_s
            self._look(now)
        elif len(sent.pages) > _MAX_EXCESS * self._bound(worker):
            self._shrink(sent)

    def clear(self) -> int:
        """Forgets everything; returns the number of pages."""
        self._sent.clear()
        return self.index.clear()

    def _look(self, now: float) -> None:
        for worker_id, sent in list(self._sent.items()):
            if now - sent.used_at > _ABSENT_INTERVALS * self._interval_s:
                del self._sent[worker_id]
                self.index.forget(worker_id)
            else:
                self._shrink(sent)

    def _bound(self, worker: WorkerView) -> int:
        return min(self._max_pages, worker.total_pages or self._max_pages)

    def _shrink(self, sent: _Sent) -> None:
        num_excess = len(sent.pages) - self._bound(sent.worker)
        evicted = [sent.pages.popitem(last=False)[0] for _ in range(num_excess)]
        self.index.remove(sent.worker.worker_id, sent.worker.epoch, evicted)
