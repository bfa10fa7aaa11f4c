"""Chooses the better of two random workers."""

from __future__ import annotations

import random

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.view import PoolView, RoutingRequest


class PowerOfTwo(Policy):
    """Draws one worker more than are wanted and takes those with fewer requests, then fewer tokens.

    Mitzenmacher, "The power of two choices in randomized load balancing" (2001). With old reports
    it does not send everything to the one worker that was least loaded then.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._rng = random.Random(self.options.seed)

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        drawn = self._rng.sample(range(len(view)), min(count + 1, len(view)))
        drawn.sort(key=lambda at: (view.num_requests[at], view.num_tokens[at]))
        return [Choice(position) for position in drawn[:count]]
