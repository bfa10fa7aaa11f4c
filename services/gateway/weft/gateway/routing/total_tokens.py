"""Chooses the worker with the fewest tokens."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy
from weft.gateway.routing.view import PoolView, RoutingRequest


class TotalTokens(Policy):
    """Orders by fewest tokens of all requests, then fewest requests; ties in turn.

    The view counts a request from the moment it is sent (`LoadEstimate`), so that requests between
    two reports do not all go to one worker.
    """

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        best = self.least(view, count, view.num_tokens, view.num_requests)
        return [Choice(position) for position in best]
