"""Chooses a key's worker by hashing, with minimal changes when workers come and go."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.rendezvous import Rendezvous
from weft.gateway.routing.view import PoolView, RoutingRequest


class ConsistentHashing(Policy):
    """Chooses by the routing key; without one, by the request's id.

    Gateways agree without communicating. When one of n workers leaves, only its keys move; a new
    one takes 1/n of all keys.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._hashing = Rendezvous()

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        key = (request.routing_key or request.request_id).encode()
        return [Choice(position) for position in self._hashing.first(view, key, count)]
