"""What workers can carry, by their measured speeds: the one model of admission and planning."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

_KEPT = 0.98
"""Factor on the weight of earlier reports with every new one."""
_HALF_LIFE_S = 10.0
"""Time in which the weight of a report also halves, even if few reports follow."""
_RECENT_S = 10.0
"""Time without steps after which the model is not recent."""
_MIN_SPREAD = 0.25
"""Variance of the number of requests, in requests squared, from which a slope is trusted."""

NUM_SIZES = 24
"""Prompts are counted by powers of two of their tokens; the last size has all longer ones."""


def size_of_prompt(num_tokens: int) -> int:
    """Index of a prompt's size, below `NUM_SIZES`."""
    return min(num_tokens.bit_length(), NUM_SIZES - 1)


def first_token_s(
    queued_tokens: ArrayLike, to_compute: ArrayLike, tokens_per_s: ArrayLike
) -> NDArray[np.float64]:
    """Time until a prompt is computed behind a queue, of each worker."""
    return np.divide(np.add(queued_tokens, to_compute), tokens_per_s, dtype=np.float64)


def requests_within(pace_s: float, base_s: ArrayLike, request_s: ArrayLike) -> NDArray[np.float64]:
    """Most requests whose steps take at most `pace_s`, of each worker; infinite where steps are not
    known to become slower with more requests, 0 where even an empty one is slower.
    """
    base, each = np.asarray(base_s, np.float64), np.asarray(request_s, np.float64)
    room = np.where(base <= pace_s, np.inf, 0.0)
    grows = each > 0
    room[grows] = np.maximum(0.0, (pace_s - base[grows]) // each[grows])
    return room


class StepModel:
    """A straight line through the latest reports, by least squares with exponential forgetting.

    A step reads the weights once, whatever the number of requests, and each request adds its own
    part: `base_s + request_s * requests`. Neither is taken to be negative. While the number of
    requests hardly changes the line is level. `clock` is monotonic, in seconds.
    """

    __slots__ = (
        *("_clock", "_last", "_last_at", "_n", "_nn", "_ns", "_s", "_weight"),
        *("base_s", "is_recent", "request_s"),
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._weight = self._n = self._nn = self._s = self._ns = 0.0
        self._last = (0.0, 0.0)
        self._last_at = clock()
        self.base_s = 0.0
        """Time of a step without requests; 0, with `request_s`, if not known yet."""
        self.request_s = 0.0
        """Time that each request adds."""
        self.is_recent = False
        """Whether there were steps lately. If there were none, requests must not be refused for
        slow steps: some have to be tried.
        """

    def observe(self, num_requests: float, step_s: float) -> None:
        """Records the mean step time with this many requests. A repeated report counts once and
        shows that there were no steps since.
        """
        now = self._clock()
        if step_s <= 0 or (num_requests, step_s) == self._last:
            if now - self._last_at > _RECENT_S:
                self.is_recent = False
            return
        self.is_recent = True
        kept = _KEPT * 0.5 ** ((now - self._last_at) / _HALF_LIFE_S)
        self._last, self._last_at = (num_requests, step_s), now
        self._weight = kept * self._weight + 1
        self._n = kept * self._n + num_requests
        self._nn = kept * self._nn + num_requests * num_requests
        self._s = kept * self._s + step_s
        self._ns = kept * self._ns + num_requests * step_s
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        spread = self._nn / self._weight - mean_n * mean_n
        slope = 0.0
        if spread > _MIN_SPREAD:
            slope = max(0.0, (self._ns / self._weight - mean_n * mean_s) / spread)
        # A line steeper than one through the origin would give empty steps a negative time.
        self.request_s = min(slope, mean_s / mean_n) if mean_n > 0 else 0.0
        self.base_s = max(0.0, mean_s - self.request_s * mean_n)

    def step_s(self, num_requests: float) -> float:
        """Time of a step with this many requests; 0: not known."""
        return self.base_s + self.request_s * num_requests
