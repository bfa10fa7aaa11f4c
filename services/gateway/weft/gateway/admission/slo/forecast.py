"""Forecast of the latency that a request would get now, and of the workers' spare capacity."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from weft.common.capacity import first_token_s, requests_within
from weft.gateway.routing import FleetPageIndex, PoolView, RoutingRequest
from weft.gateway.routing.view import Column


class Forecast(NamedTuple):
    """Forecast for one prompt."""

    first_token_s: float | None
    """Time from sending to the end of its prompt on the best worker; None: rates are not known."""
    to_compute: int
    """Prompt tokens that the worker of `first_token_s` does not hold."""


class IndexedPool(NamedTuple):
    """A pool and its prefix index."""

    view: PoolView
    pages: FleetPageIndex | None


class LatencyForecaster:
    """Predicts latency from workers' reports: queues, cached prefixes, and measured rates.

        time to first token = min over workers of (queued_tokens + prompt - match) / tokens_per_s
        time between tokens = step_base_s + step_request_s * requests, on one worker

    Prefill workers compute prompts while there are any. Without them, and for prompts that are
    computed anew, decode workers do.

    Several gateways see the same spare capacity, so each uses only its share of it.

    Args:
        prefill: Returns the prefill pool as it is now; its view may be empty.
        decode: Returns the decode pool.
        num_replicas: Gateways that send to these workers, this one included.
    """

    def __init__(
        self,
        prefill: Callable[[], IndexedPool],
        decode: Callable[[], IndexedPool],
        num_replicas: int = 1,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._num_replicas = num_replicas

    def forecast(self, request: RoutingRequest) -> Forecast:
        """Forecasts a prompt's latency."""
        view, pages = self._computing(is_by_owner=request.is_computed_anew)
        num_tokens = len(request.prompt_ids)
        found_s, to_compute = None, num_tokens
        known = np.flatnonzero(view.tokens_per_s > 0)
        if len(known):
            matches: Column = np.zeros(len(view), np.int64)
            if pages is not None:
                matches = pages.matches(view, request)
            left = num_tokens - matches[known]
            times = first_token_s(view.queued_tokens[known], left, view.tokens_per_s[known])
            best = int(times.argmin())
            found_s, to_compute = float(times[best]), int(left[best])
        return Forecast(found_s, to_compute)

    def spare_requests(self, pace_s: float) -> float:
        """Number of requests that this gateway may add so that decode steps take at most `pace_s`.

        A worker without requests can always take one. Infinite while steps are not known to become
        slower with more requests, and while there is no worker, since requests do not wait for
        workers here.
        """
        view = self._decode().view
        if not len(view):
            return np.inf
        room = requests_within(pace_s, view.step_base_s, view.step_request_s)
        reported = view.num_requests - view.unreported_requests
        spare = float((np.maximum(room, 1) - reported).sum())
        return spare / self._num_replicas - float(view.unreported_requests.sum())

    def spare_tokens(self, ahead_s: float, *, is_by_owner: bool = False) -> float:
        """Number of prompt tokens that this gateway may add so that all are computed within
        `ahead_s`, by decode workers if `is_by_owner`.

        Infinite while rates are not known.
        """
        view, _ = self._computing(is_by_owner=is_by_owner)
        known = view.tokens_per_s > 0
        if not known.any():
            return np.inf
        unreported = view.unreported_tokens[known]
        reported = view.queued_tokens[known] - unreported
        spare = ahead_s * float(view.tokens_per_s[known].sum()) - float(reported.sum())
        return spare / self._num_replicas - float(unreported.sum())

    def least_step_s(self) -> float | None:
        """Time between tokens of a request alone on the best decode worker; None if it is not
        recently known for all workers.
        """
        view = self._decode().view
        steps = view.step_base_s + view.step_request_s
        is_known = (steps > 0) & view.has_recent_steps
        return float(steps.min()) if len(steps) and is_known.all() else None

    def backlog_s(self) -> float | None:
        """Time in which all workers together compute their queues; None: unknown."""
        view, _ = self._computing()
        known = view.tokens_per_s > 0
        rate = float(view.tokens_per_s[known].sum())
        return float(view.queued_tokens[known].sum()) / rate if rate else None

    def tokens_per_s(self) -> float:
        """Prompt tokens that all workers together compute per second; 0: unknown."""
        return float(self._computing().view.tokens_per_s.sum())

    def _computing(self, *, is_by_owner: bool = False) -> IndexedPool:
        prefill = self._prefill()
        return prefill if len(prefill.view) and not is_by_owner else self._decode()
