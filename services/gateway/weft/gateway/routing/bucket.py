"""Sends prompts of similar length to the same workers."""

from __future__ import annotations

from collections import deque

import numpy as np
from weft.gateway.routing.base import Choice, Policy, PolicyOptions, least
from weft.gateway.routing.view import Column, PoolView, RoutingRequest

_WINDOW = 4096
"""Number of prompts whose lengths determine the borders."""
_REFRESH = 64
"""Number of prompts between two updates of the borders."""


class Bucket(Policy):
    """Short prompts go to the first workers, long ones to the last, so that neither waits for the
    other.

    The borders between workers adapt: of the last prompts, sorted by length, each worker gets an
    equal share of the tokens. Prompts of one length that fill several shares go to the worker among
    those with the fewest queued tokens. While loads are out of balance (most and least requests
    differ by more than `balance_abs_threshold` and by more than `balance_rel_threshold` times) the
    worker with the fewest queued tokens is taken instead.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._sorted: Column = np.empty(0, np.int64)
        self._tokens_before: Column = np.zeros(1, np.int64)
        self._num_since = 0

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        length = len(request.prompt_ids)
        self._note(length)
        most, fewest = int(view.num_requests.max()), int(view.num_requests.min())
        is_uneven = (
            most - fewest > self.options.balance_abs_threshold
            and most > fewest * self.options.balance_rel_threshold
        )
        low, high = (0, len(view)) if is_uneven else self._shares(length, len(view))
        # Workers outside the bucket are only alternatives, the nearest ones first.
        positions = np.arange(len(view))
        distance = np.maximum(np.maximum(low - positions, positions - high + 1), 0)
        turn, self._turn = self._turn, self._turn + 1
        best = least(len(view), count, turn, distance, view.queued_tokens, view.num_requests)
        return [Choice(position) for position in best]

    def borders(self, num_workers: int) -> list[int]:
        """Lengths at which the next worker's share begins: `num_workers` - 1 of them."""
        if not len(self._sorted):
            return []
        total = int(self._tokens_before[-1])
        marks = [total * share // num_workers for share in range(1, num_workers)]
        found = np.searchsorted(self._tokens_before[1:], marks, side="right")
        lengths: list[int] = self._sorted[np.minimum(found, len(self._sorted) - 1)].tolist()
        return lengths

    def _note(self, length: int) -> None:
        self._lengths.append(length)
        self._num_since += 1
        # At first the borders are updated more often, so that they are useful soon.
        if self._num_since >= min(_REFRESH, len(self._lengths) // 8 + 1):
            self._num_since = 0
            self._sorted = np.sort(np.array(self._lengths, np.int64))
            self._tokens_before = np.concatenate([[0], np.cumsum(self._sorted)])

    def _shares(self, length: int, num_workers: int) -> tuple[int, int]:
        """Positions [low, high) whose share of the tokens has prompts of this length."""
        total = int(self._tokens_before[-1])
        if not total:
            return 0, num_workers
        first, last = np.searchsorted(self._sorted, [length, length + 1]).tolist()
        low = int(self._tokens_before[first]) * num_workers // total
        high = -(-int(self._tokens_before[last]) * num_workers // total)
        low = min(low, num_workers - 1)
        return low, max(high, low + 1)
