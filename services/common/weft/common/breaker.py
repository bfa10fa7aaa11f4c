"""A circuit breaker: a worker that fails again and again gets no requests for a while."""

from __future__ import annotations

import random
from enum import Enum

_BURST_S = 0.1
"""Failures that come together have one cause: they count once."""


class BreakerState(Enum):
    """Where a breaker is."""

    CLOSED = "closed"
    """Requests pass."""
    OPEN = "open"
    """None does."""
    HALF_OPEN = "half_open"
    """One at a time does, to see whether the worker is well again."""


class Breaker:
    """Counts what became of the requests that one worker was given.

    CLOSED -> OPEN after `max_failures` failures without a success between them. OPEN -> HALF_OPEN
    after `open_s`, which doubles from opening to opening up to `max_open_s`, with jitter, so that
    gateways do not come back together. HALF_OPEN -> CLOSED by a success, -> OPEN by a failure.

    A request that `begin` was called for is to be ended by `succeeded`, `failed` or `abandoned`.
    Times are of any one monotonic clock, in seconds.
    """

    def __init__(
        self, max_failures: int = 5, open_s: float = 1.0, max_open_s: float = 30.0
    ) -> None:
        """A closed breaker; `max_failures` of 0 never opens."""
        self._max_failures = max_failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._open_s = open_s
        self._open_until: float | None = None
        """None: closed."""
        self._is_probing = False
        self._last_failure = ""
        self._last_failure_at = float("-inf")
        self.num_failures = 0
        """Since the last success."""
        self.num_openings = 0
        """Since start."""

    def state(self, now: float) -> BreakerState:
        """Where it is at a time."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def problem(self, now: float) -> str:
        """Why no request may pass now; empty when one may."""
        if self._open_until is None:
            return ""
        if now < self._open_until:
            return (
                f"failed {self.num_failures} times in a row ({self._last_failure}); gets nothing "
                f"for {self._open_until - now:.1f} s more"
            )
        return "is being tried with one request after failures" if self._is_probing else ""

    def begin(self) -> None:
        """A request is sent to the worker."""
        self._is_probing = self._open_until is not None

    def succeeded(self) -> None:
        """The worker did something for a request."""
        self.num_failures = 0
        self._open_until = None
        self._open_s = self._first_open_s
        self._is_probing = False

    def failed(self, now: float, why: str) -> None:
        """A request, or the connection, broke by the worker's fault; `why` is for operators."""
        state = self.state(now)
        self._is_probing = False
        is_burst = now - self._last_failure_at < _BURST_S
        self._last_failure, self._last_failure_at = why, now
        if is_burst or state is BreakerState.OPEN:  # sent before it opened: nothing new
            return
        self.num_failures += 1
        if state is BreakerState.HALF_OPEN or 0 < self._max_failures <= self.num_failures:
            self.num_openings += 1
            self._open_until = now + self._open_s * random.uniform(0.8, 1.2)
            self._open_s = min(self._max_open_s, 2 * self._open_s)

    def abandoned(self) -> None:
        """A request ended in a way that tells nothing of the worker, such as by its client."""
        self._is_probing = False
