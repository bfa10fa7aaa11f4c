"""Chooses a decode worker near the prefill worker."""

from __future__ import annotations

import numpy as np
from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.view import Column, PoolView, RoutingRequest


class Follow(Policy):
    """Prefers workers on the host of the request's prefill worker, the least loaded first.

    Pages then travel through shared memory or NVLink and not over a network. Without a prefill
    worker, or without decode workers on its host, the worker with the fewest requests is taken.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._view: PoolView | None = None
        self._is_elsewhere: dict[str, Column] = {}
        """Columns by host: 0 for its workers, 1 for others."""

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        if view is not self._view:
            self._view, self._is_elsewhere = view, {}
        host = request.prefill_host
        elsewhere = self._is_elsewhere.get(host)
        if elsewhere is None:
            others = [int(not host or worker.host != host) for worker in view.workers]
            elsewhere = self._is_elsewhere[host] = np.array(others, np.int64)
        best = self.least(view, count, elsewhere, view.num_requests, view.num_tokens)
        return [Choice(position) for position in best]
