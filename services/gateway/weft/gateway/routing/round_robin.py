"""Chooses the workers in turn."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy
from weft.gateway.routing.view import PoolView, RoutingRequest


class RoundRobin(Policy):
    """Starts with the next worker for every request, whatever the loads."""

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        start, size = self._turn, len(view)
        self._turn += 1
        return [Choice((start + offset) % size) for offset in range(min(count, size))]
