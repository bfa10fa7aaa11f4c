"""Each worker in its turn."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy, RoutingRequest
from weft.gateway.routing.view import PoolView


class RoundRobin(Policy):
    """Starts one worker further for every request, whatever their load."""

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        """See `Policy.choose`."""
        start, size = self._turn, len(view)
        self._turn += 1
        return [Choice((start + offset) % size) for offset in range(min(count, size))]
