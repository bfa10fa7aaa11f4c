"""What a request would get if it were sent now, and how much room workers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from weft.gateway.routing import PageIndex, PoolView, RoutingRequest
from weft.gateway.routing.view import Column


class Forecast(NamedTuple):
    """Of one prompt."""

    first_token_s: float | None
    """From being sent to the end of its prompt on the best worker; None = rates are not known."""
    to_compute: int
    """Prompt tokens that the worker of `first_token_s` does not hold."""


class Side(NamedTuple):
    """A pool and what is known of who holds what."""

    view: PoolView
    pages: PageIndex | None


class Outlook:
    """Predicts from what workers report: queues, what they hold, and measured rates.

        time to first token = min over workers of (queued_tokens + prompt - match) / tokens_per_s
        time between tokens = step_base_s + step_request_s * requests, on one worker

    Prompts are computed by prefill workers while there are any, else by decode workers.

    What several gateways see as spare at the same time each of them fills to its share.

    Args:
        prefill: Gives the prefill pool as it is now; its view may be empty.
        decode: Likewise.
        num_replicas: Gateways that send to these workers, this one included.
    """

    def __init__(
        self, prefill: Callable[[], Side], decode: Callable[[], Side], num_replicas: int = 1
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._num_replicas = num_replicas

    def forecast(self, request: RoutingRequest) -> Forecast:
        """Predicts for a prompt."""
        view, pages = self._computing()
        num_tokens = len(request.prompt_ids)
        first_token_s, to_compute = None, num_tokens
        known = np.flatnonzero(view.tokens_per_s > 0)
        if len(known):
            matches: Column = np.zeros(len(view), np.int64)
            if pages is not None:
                matches = pages.matches(view, request)
            left = num_tokens - matches[known]
            times = (view.queued_tokens[known] + left) / view.tokens_per_s[known]
            best = int(times.argmin())
            first_token_s, to_compute = float(times[best]), int(left[best])
        return Forecast(first_token_s, to_compute)

    def spare_requests(self, pace_s: float) -> float:
        """Requests that this gateway may add so that decode steps last so long at most.

        A worker that has none can always take one. Infinite while steps are not known to grow, and
        while there is no worker: nobody is to wait for one here.
        """
        view = self._decode().view
        if not len(view):
            return np.inf
        room = np.where(view.step_base_s <= pace_s, np.inf, 0.0)
        grows = view.step_request_s > 0
        room[grows] = (pace_s - view.step_base_s[grows]) // view.step_request_s[grows]
        reported = view.num_requests - view.unreported_requests
        spare = float((np.maximum(room, 1) - reported).sum())
        return spare / self._num_replicas - float(view.unreported_requests.sum())

    def spare_tokens(self, ahead_s: float) -> float:
        """Prompt tokens that this gateway may add so that all are computed within so long.

        Infinite while rates are not known.
        """
        view, _ = self._computing()
        known = view.tokens_per_s > 0
        if not known.any():
            return np.inf
        unreported = view.unreported_tokens[known]
        reported = view.queued_tokens[known] - unreported
        spare = ahead_s * float(view.tokens_per_s[known].sum()) - float(reported.sum())
        return spare / self._num_replicas - float(unreported.sum())

    def least_step_s(self) -> float | None:
        """Between tokens of a request that is alone on the best decode worker; None: not known."""
        view = self._decode().view
        steps = view.step_base_s + view.step_request_s
        steps = steps[steps > 0]
        return float(steps.min()) if len(steps) else None

    def backlog_s(self) -> float | None:
        """Time in which all workers together compute what is queued there; None = not known."""
        view, _ = self._computing()
        known = view.tokens_per_s > 0
        rate = float(view.tokens_per_s[known].sum())
        return float(view.queued_tokens[known].sum()) / rate if rate else None

    def tokens_per_s(self) -> float:
        """Prompt tokens that all workers together compute a second; 0 = not known."""
        return float(self._computing().view.tokens_per_s.sum())

    def _computing(self) -> Side:
        prefill = self._prefill()
        return prefill if len(prefill.view) else self._decode()
