"""Sends all requests with the same key to the same worker."""

from __future__ import annotations

from collections import OrderedDict

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.view import PoolView, RoutingRequest


class Manual(Policy):
    """Pins each routing key to a worker for as long as that worker is healthy.

    A new key is pinned to the worker with the fewest requests. When that worker has gone, the key
    is pinned to another one and stays there. Requests without a key go to the worker with the
    fewest requests.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._pins: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Worker and time of last use by key, the least recently used first."""
        self._view: PoolView | None = None
        self._positions: dict[str, int] = {}

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        key = request.routing_key
        best = self.least(view, count, view.num_requests, view.queued_tokens)
        if key:
            pinned = self._pinned(view, key)
            if pinned is not None:
                best = [pinned, *(position for position in best if position != pinned)][:count]
            self._pin(key, view.workers[best[0]].worker_id)
        return [Choice(position) for position in best]

    @property
    def num_pins(self) -> int:
        """Number of keys remembered."""
        return len(self._pins)

    def _pinned(self, view: PoolView, key: str) -> int | None:
        if view is not self._view:
            self._positions = {worker.worker_id: i for i, worker in enumerate(view.workers)}
            self._view = view
        worker_id, _ = self._pins.get(key, ("", 0.0))
        return self._positions.get(worker_id)

    def _pin(self, key: str, worker_id: str) -> None:
        now, pins = self.options.clock(), self._pins
        pins[key] = (worker_id, now)
        pins.move_to_end(key)
        oldest, (_, used_at) = next(iter(pins.items()))
        if len(pins) > self.options.max_pins or now - used_at > self.options.pin_idle_s:
            del pins[oldest]
