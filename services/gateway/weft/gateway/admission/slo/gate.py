"""Accepts, holds or refuses requests by their forecast latency. Independent of the event loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.contract.errors import TargetUnattainable
from weft.gateway.admission.fair_queue import TenantFairQueue
from weft.gateway.admission.slo.forecast import Forecast, LatencyForecaster
from weft.gateway.request import NO_TARGETS, Targets
from weft.gateway.routing import RoutingRequest

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SMOOTHING = 0.05
"""Weight of the newest request in the averages over finished requests."""
_FIRST_OUTPUT_TOKENS = 128.0
"""Assumed number of generated tokens until a request has ended."""
_HEADROOM = 0.95
"""Share of an inter-token target that steps are planned to take."""
_DRAIN_WINDOW_S = 5.0
"""Window over which the speed of the held queue is measured; older times count less."""
_MIN_DRAIN_S = 0.5
"""Least holding time after which that speed is trusted."""
SHORT_PROMPT_TOKENS = 128
"""Tokens of the prompt that `LatencyGate.first_token_s` forecasts; no worker holds any of them."""
_BIAS_LIFE_S = 10.0
"""Half-life of the learned forecast error while no first token comes, since the error itself may be
the reason.
"""


@dataclass(eq=False, slots=True, kw_only=True)
class SloTicket:
    """A request at the gate. Times are seconds of one clock."""

    prompts: Sequence[RoutingRequest]
    arrival: float
    targets: Targets = NO_TARGETS
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant."""
    max_tokens: int = 1
    """Most tokens to generate, over all prompts and samples."""
    cost: float = 1.0
    """Approximate tokens that the workers have to compute for it."""
    to_compute: int = 0
    """Prompt tokens among them."""
    sent_at: float = 0.0
    first_token_s: float | None = None
    """Forecast when it was sent: time from then to its first token. None: unknown."""
    hopeless_at: float = math.inf
    """Time from which it would miss its target even if it were sent at once."""
    is_sending: bool = field(default=False, repr=False)
    """Whether it was released and is not yet counted in a worker's load."""


class _Drain:
    """Speed at which held requests leave, as cost per second."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._cost = self._time_s = 0.0

    def note(self, now: float, cost: float, *, is_holding: bool) -> None:
        """Records cost that left just now; only times in which requests were held count."""
        if self._at is not None and now > self._at:
            kept = math.exp((self._at - now) / _DRAIN_WINDOW_S)
            self._time_s = self._time_s * kept + now - self._at
            self._cost *= kept
        self._cost += cost
        self._at = now if is_holding else None

    @property
    def per_s(self) -> float | None:
        return self._cost / self._time_s if self._time_s >= _MIN_DRAIN_S else None


class LatencyGate:
    """Decides on every new request, and on the held ones whenever something changes.

    - Refused at once: its predicted time to the first token is over its target. The prediction
      includes its time here and the mean error of earlier forecasts. Also refused is a request
      whose client asks for a tighter time between tokens than its tenant has, while workers are too
      busy for that.
    - Held: while targets are in force (`is_holding`), the workers have more than `ahead_s` of
      prompts queued, or one request more would slow the tokens of running requests below the
      tightest of their targets. Tenants take turns by what they cost (`TenantFairQueue`).
    - Taken otherwise. Without a target nothing is refused here.

    Workers' queues stay short, so a released request waits about `ahead_s`, however much others
    send.

    Args:
        ahead_s: Prompts that workers may have queued, as time of all of them together.
        is_holding: Returns whether any tenant has targets; if none has, no request is held.
    """

    def __init__(
        self,
        forecaster: LatencyForecaster,
        ahead_s: float,
        is_holding: Callable[[], bool] = lambda: True,
    ) -> None:
        self._forecaster = forecaster
        self._ahead_s = ahead_s
        self._is_holding = is_holding
        self._held: TenantFairQueue[SloTicket] = TenantFairQueue()
        self._hopeful: dict[SloTicket, None] = {}
        """Held requests that have a target, as an ordered set."""
        self._drain = _Drain()
        self._paces: Counter[float] = Counter()
        """Targets between tokens of the running requests."""
        self._num_sending = self._tokens_sending = 0
        self._mean_output = _FIRST_OUTPUT_TOKENS
        self.bias_s = 0.0
        """Mean lateness of first tokens relative to the forecast."""
        self._bias_at: float | None = None
        """Time of the bias's last change, or of its last use if no first token came since."""

    @property
    def num_held(self) -> int:
        """Number of requests held here."""
        return len(self._held)

    def offer(self, ticket: SloTicket, now: float) -> bool:
        """Decides on a new request. Returns whether it may be sent; then `sending`, `began` and
        `ended` follow. Otherwise it is held until `release` returns it or `withdraw` removes it.

        Raises:
            TargetUnattainable: A target would be missed.
        """
        self._fade_bias(now)
        forecast = self._weigh(ticket)
        self._refuse_slow_pace(ticket)
        must_wait = self._must_wait(ticket)
        self._check(ticket, forecast, now, self._wait_s(ticket) if must_wait else 0.0)
        if not must_wait:
            self._let_through(ticket, forecast, now)
            return True
        self._drain.note(now, 0.0, is_holding=True)
        self._held.push(ticket, ticket.tenant, ticket.cost, ticket.weight)
        target_s = ticket.targets.first_token_s
        if target_s is not None and forecast.first_token_s is not None:
            service_s = self._service_s(forecast.first_token_s, now)
            ticket.hopeless_at = ticket.arrival + target_s - service_s
            self._hopeful[ticket] = None
        return False

    def release(self, now: float) -> list[tuple[SloTicket, TargetUnattainable | None]]:
        """The held requests that leave now, each to be sent or with the error that refuses it."""
        left: list[tuple[SloTicket, TargetUnattainable | None]] = []
        for late in [held for held in self._hopeful if now > held.hopeless_at]:
            self.withdraw(late)
            target_s = late.targets.first_token_s or 0.0
            left.append((late, self._late(late, target_s + now - late.hopeless_at)))
        while (ticket := self._next(now)) is not None:
            forecast = self._weigh(ticket)
            try:
                self._refuse_slow_pace(ticket)
                self._check(ticket, forecast, now, 0.0)
            except TargetUnattainable as error:
                left.append((ticket, error))
            else:
                self._drain.note(now, ticket.cost, is_holding=len(self._held) > 0)
                self._let_through(ticket, forecast, now)
                left.append((ticket, None))
        return left

    def _next(self, now: float) -> SloTicket | None:
        """None: there is no room for the next request."""
        ticket = self._held.head()
        if ticket is None:
            return None
        if self._is_holding() and not self._has_room(ticket) and not self._lacks_own_pace(ticket):
            self._drain.note(now, 0.0, is_holding=True)
            return None
        self._held.pop()
        self._hopeful.pop(ticket, None)
        return ticket

    def withdraw(self, ticket: SloTicket) -> None:
        """Removes a held request that goes away unserved."""
        self._held.remove(ticket, ticket.tenant)
        self._hopeful.pop(ticket, None)

    def began(self, ticket: SloTicket) -> None:
        """Notes that a released request is now in the workers' loads, or never will be."""
        if ticket.is_sending:
            ticket.is_sending = False
            self._num_sending -= len(ticket.prompts)
            self._tokens_sending -= ticket.to_compute

    def ended(self, ticket: SloTicket, first_token_at: float | None, num_generated: int) -> None:
        """Notes that a released request is over.

        Args:
            first_token_at: Time of the first token; None: there was none.
            num_generated: Generated tokens over its prompts and samples; with 0 the averages leave
                the request out.
        """
        self.began(ticket)
        pace_s = ticket.targets.pace_s
        if pace_s is not None:
            self._paces[pace_s] -= 1
            if not self._paces[pace_s]:
                del self._paces[pace_s]
        if first_token_at is not None and ticket.first_token_s is not None:
            error_s = first_token_at - ticket.sent_at - ticket.first_token_s
            self.bias_s += _SMOOTHING * (error_s - self.bias_s)
            self._bias_at = None
        if num_generated:
            self._mean_output += _SMOOTHING * (num_generated - self._mean_output)

    def first_token_s(self, now: float) -> float | None:
        """What `offer` would forecast for a short prompt of a new tenant; None: unknown. Changes
        nothing.
        """
        prompt = RoutingRequest(
            request_id="", prompt_ids=range(SHORT_PROMPT_TOKENS), cache_salt="forecast"
        )
        ticket = SloTicket(prompts=(prompt,), arrival=now)
        forecast_s = self._weigh(ticket).first_token_s
        if forecast_s is None:
            return None
        wait_s = self._wait_s(ticket) if self._must_wait(ticket) else 0.0
        return self._predicted_s(ticket, forecast_s, now, wait_s)

    # -- internals -------------------------------------------------------------------------------

    def _fade_bias(self, now: float) -> None:
        if self._bias_at is None:
            self._bias_at = now
        elif now >= self._bias_at + _BIAS_LIFE_S:
            self.bias_s, self._bias_at = self._faded_bias_s(now), now

    def _faded_bias_s(self, now: float) -> float:
        if self._bias_at is None or now < self._bias_at + _BIAS_LIFE_S:
            return self.bias_s
        return self.bias_s * math.pow(0.5, (now - self._bias_at) / _BIAS_LIFE_S)

    def _must_wait(self, ticket: SloTicket) -> bool:
        return self._is_holding() and (len(self._held) > 0 or not self._has_room(ticket))

    def _weigh(self, ticket: SloTicket) -> Forecast:
        """Forecasts the slowest of its prompts; records the cost of the request."""
        forecasts = [self._forecaster.forecast(prompt) for prompt in ticket.prompts]
        if not ticket.is_sending:
            ticket.to_compute = sum(forecast.to_compute for forecast in forecasts)
            ticket.cost = ticket.to_compute + min(ticket.max_tokens, self._mean_output)
        return max(forecasts, key=lambda forecast: forecast.first_token_s or 0.0)

    def _has_room(self, ticket: SloTicket) -> bool:
        is_by_owner = any(prompt.is_computed_anew for prompt in ticket.prompts)
        spare = self._forecaster.spare_tokens(self._ahead_s, is_by_owner=is_by_owner)
        if spare <= self._tokens_sending:
            return False
        own_s = ticket.targets.between_tokens_s
        pace_s = min(self._paces, default=math.inf)
        pace_s = pace_s if own_s is None else min(own_s, pace_s)
        if pace_s == math.inf:
            return True
        spare = self._forecaster.spare_requests(_HEADROOM * pace_s)
        return spare >= self._num_sending + len(ticket.prompts)

    def _wait_s(self, ticket: SloTicket) -> float:
        before = self._held.cost_before(ticket.tenant, ticket.cost, ticket.weight)
        rate = self._drain.per_s or self._forecaster.tokens_per_s()
        return before / rate if rate else 0.0

    def _service_s(self, forecast_s: float, now: float) -> float:
        return max(0.0, forecast_s + self._faded_bias_s(now))

    def _predicted_s(
        self, ticket: SloTicket, forecast_s: float, now: float, wait_s: float
    ) -> float:
        """Time from its arrival to its first token, if it is held for another `wait_s`."""
        return now - ticket.arrival + wait_s + self._service_s(forecast_s, now)

    def _check(self, ticket: SloTicket, forecast: Forecast, now: float, wait_s: float) -> None:
        if ticket.targets.first_token_s is None or forecast.first_token_s is None:
            return
        predicted_s = self._predicted_s(ticket, forecast.first_token_s, now, wait_s)
        if predicted_s > ticket.targets.first_token_s:
            raise self._late(ticket, predicted_s)

    def _late(self, ticket: SloTicket, predicted_s: float) -> TargetUnattainable:
        target_s = ticket.targets.first_token_s or 0.0
        return TargetUnattainable(
            f"the first token would come after about {predicted_s:.2f} s, and the target is "
            f"{target_s:g} s; send the request again later",
            stage="admit",
            retry_after_s=min(_MAX_RETRY_S, max(_MIN_RETRY_S, predicted_s - target_s)),
        )

    def _refuse_slow_pace(self, ticket: SloTicket) -> None:
        """Refuses a request for which even an idle worker is too slow, or that
        `_lacks_own_pace`.
        """
        pace_s, least_s = ticket.targets.between_tokens_s, self._forecaster.least_step_s()
        if pace_s is not None and least_s is not None and least_s > pace_s:
            raise TargetUnattainable(
                f"tokens come every {least_s * 1e3:.1f} ms at best, and the target is "
                f"{pace_s * 1e3:g} ms",
                stage="admit",
                retry_after_s=_MAX_RETRY_S,
            )
        if pace_s is not None and self._lacks_own_pace(ticket):
            raise TargetUnattainable(
                f"workers are too busy for a token every {pace_s * 1e3:g} ms; send the request "
                "again later",
                stage="admit",
                retry_after_s=_MIN_RETRY_S,
            )

    def _lacks_own_pace(self, ticket: SloTicket) -> bool:
        """Whether the request would have to wait for a tighter pace than its tenant has."""
        own_s = ticket.targets.between_tokens_s
        if own_s is None or own_s == ticket.targets.pace_s or not self._is_holding():
            return False
        spare = self._forecaster.spare_requests(_HEADROOM * own_s)
        return spare < self._num_sending + len(ticket.prompts)

    def _let_through(self, ticket: SloTicket, forecast: Forecast, now: float) -> None:
        ticket.sent_at, ticket.first_token_s = now, forecast.first_token_s
        ticket.is_sending = True
        self._num_sending += len(ticket.prompts)
        self._tokens_sending += ticket.to_compute
        if ticket.targets.pace_s is not None:
            self._paces[ticket.targets.pace_s] += 1
