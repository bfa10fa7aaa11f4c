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
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weft.contract.clock import Clock
from weft.contract.timeline import FillRecord
from weft.engine.requests.incoming import IncomingPages
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.events import FillEvents
from weft.pages.memory.page_memory import PageMemory
from weft.pages.tiers.layer_pool import LayerPool
from weft.pages.tiers.tier import PageLoad, Tier

DAMAGED = "a page could not be read or was not what was saved"
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


class LayerSource(Protocol):
    """Where the pages of one load come from."""

    @property
    def problem(self) -> str:
        """What was wrong with the pages; empty: nothing that is known."""

    def copy(self, group: int) -> bool:
        """Copies the layers of a group into the pool, in the loading thread. False: it cannot."""
        ...

    def check(self, digests: Sequence[int]) -> int:
        """Number of leading pages that have arrived with the digests that they should have."""
        ...

    def failed(self) -> None:
        """`copy` or `check` has raised an error."""
        ...

    def end(self, num_good: int, duration_s: float) -> None:
        """Ends the load, in the engine's thread."""
        ...


@dataclass(slots=True, kw_only=True)
class TierLayers:
    """Implements `LayerSource` over host memory and disk."""

    tier: Tier
    """The farthest of the pages' tiers."""
    loads: Sequence[PageLoad]
    pages: Sequence[int]
    pool: LayerPool
    observe: Callable[[str, int, float], None]

    @property
    def problem(self) -> str:
        is_damaged = any(found.outcome in ("corrupt", "failed") for found in self.loads)
        return DAMAGED if is_damaged else ""

    def copy(self, group: int) -> bool:
        return self.pool.copy(group, self.loads, self.pages)

    def check(self, digests: Sequence[int]) -> int:
        for count, (load, digest) in enumerate(zip(self.loads, digests, strict=True)):
            if not load.arrived(digest):
                return count
        return len(digests)

    def failed(self) -> None:
        for load in self.loads:
            load.outcome = load.outcome or "failed"

    def end(self, num_good: int, duration_s: float) -> None:
        for load in self.loads:
            load.end()
        self.tier.counters.load_us += int(duration_s * 1e6)
        self.observe(self.tier.name, num_good * self.tier.page_bytes, duration_s)


@dataclass(eq=False, slots=True, kw_only=True)
class LayerLoad:
    """Implements `BackgroundJob`: all pages of one request."""

    request: Request
    source: LayerSource
    pages: Sequence[int]
    records: Sequence[FillRecord]
    pool: LayerPool
    wake: Callable[[], None]
    ended: Callable[[LayerLoad], None]
    incoming: IncomingPages = field(default_factory=IncomingPages)
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
                self.num_good = self.source.check(self.pool.digests(self.pages))
            is_whole = self.num_good == len(self.pages) and not self.pool.was_left
        except Exception:
            self.source.failed()
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
            if self.incoming.is_stopped or not self.source.copy(group):
                return False
            self.pool.open(group)
        if self.pool.is_enqueued:
            self._let_begin()
        return True

    def _let_begin(self) -> None:
        self.may_begin = True
        self.wake()

    def end(self) -> None:
        self.source.end(self.num_good, self.duration_s)
        self.ended(self)


class LayerLoads:
    """The loads by layer of an engine, of which there is one at a time. Used by its thread.

    Args:
        policy: When loads go by layer.
        prefill_tokens_per_s: Returns the measured local rate; 0: unknown.
        is_alone: Returns whether no request is being computed or filled.
        wake: Called by other threads when the engine should take a turn.
    """

    def __init__(
        self,
        pool: LayerPool,
        policy: LayerPolicy,
        memory: PageMemory,
        page_size: int,
        page_bytes: int,
        prefill_tokens_per_s: Callable[[], float],
        is_alone: Callable[[], bool],
        events: FillEvents,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self.pool, self.policy = pool, policy
        self._memory = memory
        self._page_size, self._page_bytes = page_size, page_bytes
        self._prefill_rate = prefill_tokens_per_s
        self._is_alone = is_alone
        self._events = events
        self._clock = clock
        self._wake = wake
        self.present: LayerLoad | None = None
        """The load, until its thread has ended."""

    def suits(self, request: Request, end_page: int, load_s: float) -> bool:
        """Whether the request may begin to compute while its pages up to `end_page` come."""
        policy, sources = self.policy, request.sources
        if self.present is not None or sources.loads_whole or not request.draws:
            return False
        if not self._is_alone():
            return False
        rate = self._prefill_rate()
        num_tokens = request.num_tokens - end_page * self._page_size
        return policy.pays(load_s, num_tokens / rate if rate else 0.0)

    def make(
        self,
        request: Request,
        source: LayerSource,
        pages: Sequence[int],
        records: Sequence[FillRecord],
    ) -> LayerLoad:
        """The present load from now on, which the caller gives to a thread."""
        self.present = LayerLoad(
            request=request,
            source=source,
            pages=pages,
            records=records,
            pool=self.pool,
            wake=self._wake,
            ended=self._ended,
        )
        return self.present

    def is_of(self, request: Request) -> bool:
        """Whether the present load is a request's."""
        return self.present is not None and self.present.request is request

    def stop(self, request: Request) -> bool:
        """Stops the load of a request that has ended and has not got its pages; False: it has
        none.
        """
        load = self.present
        if load is None or load.request is not request or load.is_given:
            return False
        load.incoming.stop()
        return True

    def give(self) -> None:
        """Lets a request go on whose first layers may be there soon."""
        load = self.present
        if load is None or load.is_given or not load.may_begin or load.incoming.is_stopped:
            return
        self._memory.retain(load.pages)  # For the request: the load keeps its own reference.
        load.request.held.await_load(load.incoming)
        self._take_in(load)
        self._events.completed(load.request)

    def leave(self) -> None:
        """Gives up the load, whose thread does not go on. Its pages stay with it."""
        load = self.present
        if load is None:
            return
        request, self.present = load.request, None
        load.incoming.stop()
        if load.is_given:
            if request.held.incoming is load.incoming and not request.num_launched:
                self._events.lost(request)
        elif request.state is State.LOADING:
            request.sources.skips_tiers = True
            self._events.failed(request)

    def _take_in(self, load: LayerLoad) -> None:
        request, load.is_given = load.request, True
        request.held.add(load.pages)
        num_tokens = len(load.pages) * self._page_size
        request.continue_at(request.num_computed + num_tokens, was_cached=True)

    def _ended(self, load: LayerLoad) -> None:
        if self.present is load:
            self.present = None
        request, incoming = load.request, load.incoming
        is_whole = incoming.has_ended and incoming.wait(0.0)
        self._note(load, is_whole=is_whole)
        if load.is_given:
            self._memory.release(load.pages)
            # The pipeline knows the outcome before this thread where a step waited for it.
            if request.held.incoming is not incoming:
                return
            if is_whole:
                request.held.end_load()
                self._events.arrived(request)
            elif not request.num_launched:
                self._events.lost(request)
        elif incoming.is_stopped:
            self._memory.release(load.pages)
        elif is_whole:
            self._take_in(load)
            self._events.arrived(request)
            self._events.completed(request)
        else:
            request.sources.loads_whole = True
            self._memory.release(load.pages)
            request.held.promise(self._memory, len(load.pages))
            self._events.completed(request)

    def _note(self, load: LayerLoad, *, is_whole: bool) -> None:
        now = self._clock() - load.request.timeline.submitted_at
        for record in load.records:
            record.end_s = now
            if is_whole:
                record.accepted_tokens = record.end_token - record.start_token
                record.bytes = record.accepted_tokens // self._page_size * self._page_bytes
            else:
                record.failure = load.source.problem or "it was given up"
