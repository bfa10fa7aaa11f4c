"""A circuit breaker: a worker that fails repeatedly gets no requests for a while."""

from __future__ import annotations

import random
from enum import Enum

_BURST_S = 0.1
"""Seconds within which failures count as one, since they have one cause."""


class BreakerState(Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """All requests pass."""
    OPEN = "open"
    """No request passes."""
    HALF_OPEN = "half_open"
    """One request at a time passes, to probe whether the worker has recovered."""


class Breaker:
    """Tracks the outcomes of the requests sent to one worker.

    CLOSED -> OPEN after `max_failures` failures without a success between them. OPEN -> HALF_OPEN
    after `open_s`, which doubles from opening to opening up to `max_open_s`, with jitter, so that
    gateways do not come back together. HALF_OPEN -> CLOSED by a success, -> OPEN by a failure.

    For each `begin` the caller later calls `succeeded`, `failed` or `abandoned`. Times are seconds
    on one monotonic clock.
    """

    def __init__(
        self, max_failures: int = 5, open_s: float = 1.0, max_open_s: float = 30.0
    ) -> None:
        """Creates a closed breaker; with `max_failures` of 0 it never opens."""
        self._max_failures = max_failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._open_s = open_s
        self._open_until: float | None = None
        """Time until which the breaker is open; None: closed."""
        self._is_probing = False
        self._last_failure = ""
        self._counted_at = float("-inf")
        """Time of the last failure that counted."""
        self.num_failures = 0
        """Failures since the last success."""
        self.num_openings = 0
        """Number of openings since start."""

    def state(self, now: float) -> BreakerState:
        """State at the given time."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def problem(self, now: float) -> str:
        """Why no request may pass at the given time; empty if one may."""
        if self._open_until is None:
            return ""
        if now < self._open_until:
            return (
                f"failed {self.num_failures} times in a row ({self._last_failure}); gets nothing "
                f"for {self._open_until - now:.1f} s more"
            )
        return "is being tried with one request after failures" if self._is_probing else ""

    def begin(self) -> None:
        """Notes that a request is sent to the worker."""
        self._is_probing = self._open_until is not None

    def succeeded(self) -> None:
        """Notes that the worker has done something for a request."""
        self.num_failures = 0
        self._open_until = None
        self._open_s = self._first_open_s
        self._is_probing = False

    def failed(self, now: float, why: str) -> None:
        """Notes a failure of a request or connection through the worker; `why` is for operators."""
        state = self.state(now)
        self._is_probing = False
        is_burst = now - self._counted_at < _BURST_S
        self._last_failure = why
        # The request was sent before the breaker opened, so its failure says nothing new.
        if is_burst or state is BreakerState.OPEN:
            return
        # Only the first failure of a burst sets the time, so that a long series of failures is not
        # one burst.
        self._counted_at = now
        self.num_failures += 1
        if state is BreakerState.HALF_OPEN or 0 < self._max_failures <= self.num_failures:
            self.num_openings += 1
            self._open_until = now + self._open_s * random.uniform(0.8, 1.2)
            self._open_s = min(self._max_open_s, 2 * self._open_s)

    def abandoned(self) -> None:
        """Notes that a request ended without evidence about the worker, such as by its client."""
        self._is_probing = False
