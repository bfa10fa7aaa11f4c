"""Takes, holds or refuses requests by what latency they would get. Knows no event loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.engine.errors import TargetUnattainable
from weft.gateway.fair_queue import FairQueue
from weft.gateway.routing import RoutingRequest
from weft.gateway.slo.outlook import Forecast, Outlook
from weft.gateway.slo.targets import NO_TARGETS, Targets

_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_SMOOTHING = 0.05
"""Weight of the newest request in what is learned from those that ended."""
_FIRST_OUTPUT_TOKENS = 128.0
"""That a request is taken to generate before any has ended."""
_HEADROOM = 0.95
"""Of a target between tokens that steps are planned to take."""
_DRAIN_WINDOW_S = 5.0
"""Over which the speed of the held queue is measured; older times count less and less."""
_LEAST_DRAIN_S = 0.5
"""Of holding that must have been seen before that is believed."""
_BIAS_LIFE_S = 10.0
"""While no first token comes, the error of earlier forecasts halves in so long: it may be why none
comes."""


@dataclass(eq=False, slots=True, kw_only=True)
class Ask:
    """A request at the gate. Times are seconds of one clock."""

    prompts: Sequence[RoutingRequest]
    arrival: float
    targets: Targets = NO_TARGETS
    tenant: str = ""
    weight: float = 1.0
    """Of the tenant."""
    max_tokens: int = 1
    """Generated at most, over all prompts and samples."""
    cost: float = 1.0
    """Tokens that it makes the workers compute, about."""
    to_compute: int = 0
    """Of these, prompt tokens."""
    sent_at: float = 0.0
    first_token_s: float | None = None
    """Forecast when it was sent: from then to its first token. None = not known."""
    hopeless_at: float = math.inf
    """From then on it would miss its target even if it were sent at once."""
    is_sending: bool = field(default=False, repr=False)
    """Let through, and no load of a worker yet."""


class _Drain:
    """How fast held requests leave, in their cost a second."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._cost = self._time_s = 0.0

    def note(self, now: float, cost: float, *, is_holding: bool) -> None:
        """So much left just now; only times in which somebody was held count."""
        if self._at is not None and now > self._at:
            kept = math.exp((self._at - now) / _DRAIN_WINDOW_S)
            self._time_s = self._time_s * kept + now - self._at
            self._cost *= kept
        self._cost += cost
        self._at = now if is_holding else None

    @property
    def per_s(self) -> float | None:
        """None = not known yet."""
        return self._cost / self._time_s if self._time_s >= _LEAST_DRAIN_S else None


class LatencyGate:
    """Decides on every request when it comes, and on those held whenever something changes.

    - Refused at once: its predicted time to the first token is over its target. What it waits here
      is part of that, as are the times by which earlier forecasts were wrong in the mean.
    - Held: while targets are in force (`is_holding`), the workers have more than `ahead_s` of
      prompts queued, or one request more would slow the tokens of running requests below the
      tightest of their targets. Tenants take turns by what they cost (`FairQueue`).
    - Taken otherwise. Without a target nothing is refused here.

    Workers' queues stay short, so whose turn it is waits about `ahead_s` however much others send.

    Args:
        outlook: Predicts.
        ahead_s: Prompts that workers may have queued, as time of all of them together.
        is_holding: Somebody is known to have targets; without, nobody is held.
    """

    def __init__(
        self, outlook: Outlook, ahead_s: float, is_holding: Callable[[], bool] = lambda: True
    ) -> None:
        self._outlook = outlook
        self._ahead_s = ahead_s
        self._is_holding = is_holding
        self._held: FairQueue[Ask] = FairQueue()
        self._hopeful: dict[Ask, None] = {}
        """Those held that have a target, as an ordered set."""
        self._drain = _Drain()
        self._paces: Counter[float] = Counter()
        """Targets between tokens of requests that run."""
        self._num_sending = self._tokens_sending = 0
        self._mean_output = _FIRST_OUTPUT_TOKENS
        self.bias_s = 0.0
        """By which first tokens come later than forecast, in the mean."""
        self._bias_at: float | None = None
        """When that was last changed without a first token, or first used since one."""

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        return len(self._held)

    def offer(self, ask: Ask, now: float) -> bool:
        """Decides on a new request.

        Returns:
            It may be sent: `sending`, `began` and `ended` follow. Otherwise it is held until
            `release` names it, or `withdraw` takes it back.

        Raises:
            TargetUnattainable: A target would be missed.
        """
        self._fade_bias(now)
        forecast = self._weigh(ask)
        self._refuse_slow_pace(ask)
        must_wait = self._is_holding() and (len(self._held) > 0 or not self._has_room(ask))
        wait_s = self._wait_s(ask) if must_wait else 0.0
        self._check(ask, forecast, now, wait_s)
        if not must_wait:
            self._let_through(ask, forecast, now)
            return True
        self._drain.note(now, 0.0, is_holding=True)
        self._held.push(ask, ask.tenant, ask.cost, ask.weight)
        target_s = ask.targets.first_token_s
        if target_s is not None and forecast.first_token_s is not None:
            ask.hopeless_at = ask.arrival + target_s - self._service_s(forecast.first_token_s)
            self._hopeful[ask] = None
        return False

    def release(self, now: float) -> list[tuple[Ask, TargetUnattainable | None]]:
        """Held requests that leave now: to be sent, or with the error that refuses them."""
        left: list[tuple[Ask, TargetUnattainable | None]] = []
        for late in [held for held in self._hopeful if now > held.hopeless_at]:
            self.withdraw(late)
            target_s = late.targets.first_token_s or 0.0
            left.append((late, self._late(late, target_s + now - late.hopeless_at)))
        while (ask := self._next(now)) is not None:
            forecast = self._weigh(ask)
            try:
                self._check(ask, forecast, now, 0.0)
            except TargetUnattainable as error:
                left.append((ask, error))
            else:
                self._drain.note(now, ask.cost, is_holding=len(self._held) > 0)
                self._let_through(ask, forecast, now)
                left.append((ask, None))
        return left

    def _next(self, now: float) -> Ask | None:
        """Takes the next one out, if there is room for it."""
        ask = self._held.head()
        if ask is None or not (self._has_room(ask) or not self._is_holding()):
            if ask is not None:
                self._drain.note(now, 0.0, is_holding=True)
            return None
        self._held.pop()
        self._hopeful.pop(ask, None)
        return ask

    def withdraw(self, ask: Ask) -> None:
        """A held request goes away unserved."""
        self._held.remove(ask, ask.tenant)
        self._hopeful.pop(ask, None)

    def began(self, ask: Ask) -> None:
        """A request that was let through is in the workers' loads now, or never will be."""
        if ask.is_sending:
            ask.is_sending = False
            self._num_sending -= len(ask.prompts)
            self._tokens_sending -= ask.to_compute

    def ended(self, ask: Ask, first_token_at: float | None, num_generated: int) -> None:
        """A request that was let through is over.

        Args:
            ask: The request.
            first_token_at: When it had its first token; None = it had none.
            num_generated: Tokens, over its prompts and samples; 0 = nothing is to be learned.
        """
        self.began(ask)
        pace_s = ask.targets.between_tokens_s
        if pace_s is not None:
            self._paces[pace_s] -= 1
            if not self._paces[pace_s]:
                del self._paces[pace_s]
        if first_token_at is not None and ask.first_token_s is not None:
            error_s = first_token_at - ask.sent_at - ask.first_token_s
            self.bias_s += _SMOOTHING * (error_s - self.bias_s)
            self._bias_at = None
        if num_generated:
            self._mean_output += _SMOOTHING * (num_generated - self._mean_output)

    def first_token_s(self) -> float | None:
        """Forecast for a short prompt of a new tenant, sent now; None = not known."""
        backlog_s = self._outlook.backlog_s()
        if backlog_s is None:
            return None
        return self._service_s(min(backlog_s, self._ahead_s) if self._is_holding() else backlog_s)

    # -- internals -------------------------------------------------------------------------------

    def _fade_bias(self, now: float) -> None:
        if self._bias_at is None:
            self._bias_at = now
        elif now >= self._bias_at + _BIAS_LIFE_S:
            self.bias_s *= 0.5 ** ((now - self._bias_at) / _BIAS_LIFE_S)
            self._bias_at = now

    def _weigh(self, ask: Ask) -> Forecast:
        """Forecast of the prompt that comes last; notes what the request costs."""
        forecasts = [self._outlook.forecast(prompt) for prompt in ask.prompts]
        if not ask.is_sending:
            ask.to_compute = sum(forecast.to_compute for forecast in forecasts)
            ask.cost = ask.to_compute + min(ask.max_tokens, self._mean_output)
        return max(forecasts, key=lambda forecast: forecast.first_token_s or 0.0)

    def _has_room(self, ask: Ask) -> bool:
        if self._outlook.spare_tokens(self._ahead_s) <= self._tokens_sending:
            return False
        own_s = ask.targets.between_tokens_s
        pace_s = min(self._paces, default=math.inf)
        pace_s = pace_s if own_s is None else min(own_s, pace_s)
        if pace_s == math.inf:
            return True
        spare = self._outlook.spare_requests(_HEADROOM * pace_s)
        return spare >= self._num_sending + len(ask.prompts)

    def _wait_s(self, ask: Ask) -> float:
        """How long it would be held."""
        before = self._held.cost_before(ask.tenant, ask.cost, ask.weight)
        rate = self._drain.per_s or self._outlook.tokens_per_s()
        return before / rate if rate else 0.0

    def _service_s(self, forecast_s: float) -> float:
        return max(0.0, forecast_s + self.bias_s)

    def _check(self, ask: Ask, forecast: Forecast, now: float, wait_s: float) -> None:
        if ask.targets.first_token_s is None or forecast.first_token_s is None:
            return
        predicted_s = now - ask.arrival + wait_s + self._service_s(forecast.first_token_s)
        if predicted_s > ask.targets.first_token_s:
            raise self._late(ask, predicted_s)

    def _late(self, ask: Ask, predicted_s: float) -> TargetUnattainable:
        target_s = ask.targets.first_token_s or 0.0
        return TargetUnattainable(
            f"the first token would come after about {predicted_s:.2f} s, and the target is "
            f"{target_s:g} s; send the request again later",
            stage="admit",
            retry_after_s=min(_MOST_RETRY_S, max(_LEAST_RETRY_S, predicted_s - target_s)),
        )

    def _refuse_slow_pace(self, ask: Ask) -> None:
        """A worker that has nothing else to do is too slow for it."""
        pace_s, least_s = ask.targets.between_tokens_s, self._outlook.least_step_s()
        if pace_s is not None and least_s is not None and least_s > pace_s:
            raise TargetUnattainable(
                f"tokens come every {least_s * 1e3:.1f} ms at best, and the target is "
                f"{pace_s * 1e3:g} ms",
                stage="admit",
                retry_after_s=_MOST_RETRY_S,
            )

    def _let_through(self, ask: Ask, forecast: Forecast, now: float) -> None:
        ask.sent_at, ask.first_token_s = now, forecast.first_token_s
        ask.is_sending = True
        self._num_sending += len(ask.prompts)
        self._tokens_sending += ask.to_compute
        if ask.targets.between_tokens_s is not None:
            self._paces[ask.targets.between_tokens_s] += 1
