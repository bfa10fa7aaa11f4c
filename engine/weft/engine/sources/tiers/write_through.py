"""Decides, from events of the prefix cache, which pages are offered to lower tiers and when."""

from __future__ import annotations

from weft.engine.requests.request import Request
from weft.engine.scheduler.events import SchedulerEvents
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.tiers import Tiers
from weft.pages.tiers.policy import TierPolicy


class WriteThrough:
    """Passes pages on from the scheduler to their receivers. The engine's tiers are offered every
    page that enters the pool. The KV store is offered only pages that were computed here, since
    other workers have offered theirs. `policy` decides how often a page must have been found.
    """

    def __init__(self, policy: TierPolicy, tiers: Tiers | None, store: StoreLink | None) -> None:
        self._policy = policy
        self._tiers = tiers
        self._store = store

    def on_published(self, request: Request, first: int, end: int) -> None:
        if self._tiers is not None and self._policy.is_written_through(0):
            self._tiers.offer(request, first, end)

    def on_computed(self, request: Request, first: int, end: int) -> None:
        """Called when pages [first, end) were computed here, or when the pool has them and the KV
        store lacks them.
        """
        if self._store is not None and self._policy.is_written_through(0):
            self._store.offer(request, first, end)

    def on_matched(self, request: Request) -> None:
        """Called when a request found pages here. Offers the pages that were found often enough."""
        end, node = request.held.num_published, request.held.leaf
        if self._policy.is_written_through(0):
            # The tiers were offered these pages when they entered the pool.
            if self._store is not None:
                self._store.offer_again(request, end)
            return
        # A page is found at least as often as those that follow it.
        while node is not None and end and not self._policy.is_written_through(node.num_hits):
            end, node = end - 1, node.parent
        for taker in (self._tiers, self._store):
            if taker is not None:
                taker.offer(request, 0, end)


def write_through(
    events: SchedulerEvents, policy: TierPolicy, tiers: Tiers | None, store: StoreLink | None
) -> None:
    """Connects tiers and KV store, where present, to a scheduler's events."""
    through = WriteThrough(policy, tiers, store)
    if tiers is not None:
        events.published.append(through.on_published)
    if store is not None:
        events.computed.append(through.on_computed)
    if tiers is not None or store is not None:
        events.matched.append(through.on_matched)
