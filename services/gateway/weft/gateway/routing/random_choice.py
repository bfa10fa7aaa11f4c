"""Chooses a worker at random."""

from __future__ import annotations

import random

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.view import PoolView, RoutingRequest


class RandomChoice(Policy):
    """Draws workers evenly, whatever their load."""

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._rng = random.Random(self.options.seed)

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        drawn = self._rng.sample(range(len(view)), min(count, len(view)))
        return [Choice(position) for position in drawn]
