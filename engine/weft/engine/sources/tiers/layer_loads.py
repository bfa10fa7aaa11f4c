"""Loads by layer: a request's step begins with the first layers while the others still come.

         engine's thread                              loading thread
    give ───────────────────────────────────────────> begin: all layers closed
    take: the request has its pages <──────────────── its steps may begin
    its step waits for layers 0 to 2 ...  <────────── open the first group
    ...                                               ..., open the last, check all digests
    commit and publish, or drop what was computed <── whole, or lost

The load holds a reference to its pages until the thread has ended, so that no page is lent to
others while bytes may still be written to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.contract.timeline import FillRecord
from weft.engine.requests.incoming import IncomingPages
from weft.engine.requests.request import Request
from weft.pages.tiers.layer_pool import LayerPool
from weft.pages.tiers.tier import PageLoad, Tier

MIN_GAIN_S = 2e-3
"""Least time that a load by layer must hide behind the computation, or the other way round. One
more step of the engine's loop costs part of it.
"""
MAX_LOAD_SHARE = 4.0
"""Longest load by layer, in times of the computation. A longer one is little shortened, and
requests that come meanwhile would wait for the step.
"""


class LayerPolicy(NamedTuple):
    """When a load goes by layer: where no other request would wait for the step, and it pays."""

    is_forced: bool
    """Whether times do not count."""

    def pays(self, load_s: float, compute_s: float) -> bool:
        """Times are measured; 0: unknown, and then the load measures them."""
        if self.is_forced or not (load_s and compute_s):
            return True
        return min(load_s, compute_s) >= MIN_GAIN_S and load_s <= MAX_LOAD_SHARE * compute_s


@dataclass(eq=False, slots=True, kw_only=True)
class LayerLoad:
    """Implements `BackgroundJob`: all pages of one request."""

    request: Request
    tier: Tier
    """The farthest of the pages' tiers."""
    loads: Sequence[PageLoad]
    pages: Sequence[int]
    records: Sequence[FillRecord]
    pool: LayerPool
    incoming: IncomingPages
    wake: Callable[[], None]
    ended: Callable[[LayerLoad], None]
    may_begin: bool = False
    """Whether steps may read the pages, waiting for each layer. The thread sets it."""
    is_given: bool = False
    """Whether the request has the pages."""
    num_good: int = 0
    """Number of leading pages that are what was saved."""
    duration_s: float = 0.0

    def run(self) -> None:
        began_at, is_whole = time.monotonic(), False
        self.pool.begin()
        try:
            if self._copy():
                self.num_good = self._check()
            is_whole = self.num_good == len(self.pages) and not self.pool.was_left
        except Exception:
            for load in self.loads:
                load.outcome = load.outcome or "failed"
            raise
        finally:
            self.duration_s = time.monotonic() - began_at
            # The outcome comes first: a step that stops waiting must find it.
            self.incoming.end(is_whole=is_whole)
            self.pool.open_all()

    def _copy(self) -> bool:
        """False: the load was given up, or a page could not be read."""
        if not self.pool.is_enqueued:
            self._let_begin()
        for group in range(self.pool.num_groups):
            if self.incoming.is_stopped or not self.pool.copy(group, self.loads, self.pages):
                return False
            self.pool.open(group)
        if self.pool.is_enqueued:
            self._let_begin()
        return True

    def _let_begin(self) -> None:
        self.may_begin = True
        self.wake()

    def _check(self) -> int:
        digests = self.pool.digests(self.pages)
        for count, (load, digest) in enumerate(zip(self.loads, digests, strict=True)):
            if not load.arrived(digest):
                return count
        return len(digests)

    def end(self) -> None:
        for load in self.loads:
            load.end()
        self.ended(self)
