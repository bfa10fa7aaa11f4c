"""Chooses the worker with the fewest requests."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy
from weft.gateway.routing.view import PoolView, RoutingRequest


class TotalRequests(Policy):
    """Orders by fewest requests, then fewest prompt tokens waiting; ties in turn."""

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        best = self.least(view, count, view.num_requests, view.queued_tokens)
        return [Choice(position) for position in best]
