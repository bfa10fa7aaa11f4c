"""Chooses the worker with the least left to compute, by the workers' own reports."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray
from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import Column, PoolView, Rates, RoutingRequest

_LATE = 1 << 40
"""A cost above all others."""
_CROWDED = 1 << 39
"""A cost above every other, but below that of being late."""
_MAX_ENDS = 1 << 16


def _to_come(view: PoolView) -> Rates:
    """Share of its cache that each worker's queue will fill."""
    page_size = max(view.workers[0].page_size, 1)
    shares: Rates = view.queued_tokens / np.maximum(view.total_pages * page_size, 1)
    return shares


class CacheAware(Policy):
    """Chooses the least cost, in prompt tokens:

        cost = queued_tokens + compute_weight * (prompt - match) + request_tokens * num_requests
               + spread_tokens * inflow, of a prompt that may go anywhere

    `match` is the longest page-aligned prefix that the worker holds, exact to its KV events. A
    token to recompute weighs more than a queued one, because it also pushes other pages out of a
    full cache. `request_tokens` is the cost of each request that is on the worker already. `inflow`
    is the share of its cache that a worker has filled anew lately, and will fill with what is
    queued. It keeps new conversations with popular beginnings from meeting in few caches, where
    they would push one another out while other caches keep pages that nobody requests. Workers of
    equal cost take turns.

    Where requests share steps, workers with over `balance_abs_threshold` requests more than the
    least busy one come last, whatever they hold: a document that everybody asks about is worth
    computing on another worker as well. For a request with a target for its first token, workers
    that would be in time come before all that would not.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self.index: FleetPageIndex = FleetPageIndex(self.options.index_pages)
        self._ends: OrderedDict[int, None] = OrderedDict()
        """Numbers of pages at which longest matches ended, least recent first."""

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        matches = self.index.matches(view, request)
        cost = (
            view.queued_tokens
            + self.options.request_tokens * view.num_requests
            - (self.options.compute_weight * matches).astype(np.int64)
        )
        if self.options.spread_tokens and self._is_free(view, request, int(matches.max())):
            spread = self.options.spread_tokens * (self.index.inflow(view) + _to_come(view))
            cost = cost + spread.astype(np.int64)
        if self.options.request_tokens:
            more = view.num_requests - view.num_requests.min()
            cost = cost + _CROWDED * (more > self.options.balance_abs_threshold)
        if request.first_token_s is not None:
            cost = cost + _LATE * self._is_late(view, request, matches, request.first_token_s)
        # The prompt's length is the same for all workers, so it is left out.
        best = self.least(view, count, cost)
        return [Choice(position, int(matches[position])) for position in best]

    def _is_free(self, view: PoolView, request: RoutingRequest, match: int) -> bool:
        """Whether the cached part of the prompt is only a beginning that other prompts share.

        The longest match of a conversation's next turn ends where no match has ended before. That
        of a new conversation ends with its system prompt, like those of other new conversations.
        """
        worker = view.workers[0]
        if not match or not worker.page_size:
            return True
        last = match // worker.page_size - 1
        key = request.page_keys(worker).upto(last + 1)[last]
        is_known = key in self._ends
        self._ends[key] = None
        self._ends.move_to_end(key)
        if len(self._ends) > _MAX_ENDS:
            self._ends.popitem(last=False)
        return is_known

    @staticmethod
    def _is_late(
        view: PoolView, request: RoutingRequest, matches: Column, target_s: float
    ) -> NDArray[np.bool_]:
        """Workers of unknown speed are not late."""
        left = view.queued_tokens + len(request.prompt_ids) - matches
        late: NDArray[np.bool_] = left > target_s * np.where(
            view.tokens_per_s > 0, view.tokens_per_s, np.inf
        )
        return late
