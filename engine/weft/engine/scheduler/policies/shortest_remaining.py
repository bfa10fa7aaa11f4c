"""Admits the prompt with the fewest tokens left to compute first; waiting makes up for length."""

from __future__ import annotations

from weft.engine.requests.request import Request
from weft.engine.scheduler.policies.base import Key, SortedQueue


class ShortestRemainingQueue(SortedQueue):
    """Admits by the tokens that are still to be computed, cached ones not counted.

    A short prompt then does not wait for long ones, which lowers the mean time to the first token
    (shortest remaining processing time first; Schrage and Miller, 1966). Each `ageing_s` of waiting
    makes up for one full step of tokens: a prompt that needs n steps goes before one that comes n *
    `ageing_s` later. All age alike, so the order between two requests never changes, and the queue
    stays sorted.

    Args:
        ageing_s: Seconds of waiting that make up for one full step.
        step_tokens: Prompt tokens of a full step.
    """

    def __init__(self, ageing_s: float, step_tokens: int) -> None:
        super().__init__()
        self._s_per_token = ageing_s / step_tokens
        self._keys: dict[Request, Key] = {}
        """Keys of the waiting requests. They are kept because the number of cached tokens may
        change while a request waits.
        """

    def key(self, request: Request) -> Key:
        if request not in self._keys:
            self._keys[request] = (self.rank(request), request.arrival)
        return self._keys[request]

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._keys[request]

    def precedes(self, one: Request, other: Request) -> bool:
        return self.rank(one) < self.rank(other)

    def rank(self, request: Request) -> float:
        return request.timeline.submitted_at + self._s_per_token * request.num_to_compute
