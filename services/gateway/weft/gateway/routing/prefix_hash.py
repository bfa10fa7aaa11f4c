"""Sends prompts with the same beginning to the same worker, unless it exceeds its share."""

from __future__ import annotations

import numpy as np
from weft.contract.keys import token_bytes
from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.rendezvous import Rendezvous
from weft.gateway.routing.view import PoolView, RoutingRequest


class PrefixHash(Policy):
    """Consistent hashing with bounded loads over the first `prefix_tokens` of the prompt.

    Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads" (2016): no worker
    gets more than ceil(c * (requests + 1) / workers) requests, c = `load_factor`; a key whose
    worker is full goes to the next in its order. It needs no index and no events.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._hashing = Rendezvous()

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        prefix = token_bytes(request.prompt_ids[: self.options.prefix_tokens])
        key = request.separator + prefix
        weights = self._hashing.weights(view, key)
        requests = view.num_requests
        bound = -(-self.options.load_factor * (int(requests.sum()) + 1) // len(view))
        has_room = requests < bound
        if count == 1:
            return [Choice(int(np.where(has_room, weights, np.uint64(0)).argmax()))]
        order = np.lexsort((weights, has_room))[::-1][:count]  # Workers with room come first.
        return [Choice(position) for position in order.tolist()]
