"""Rates of requests and tokens, for all together and for each tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weft.contract.errors import RateLimited
from weft.gateway.admission.tenants import Rates
from weft.gateway.admission.token_bucket import TokenBucket

ASSUMED_OUTPUT_TOKENS = 1024
"""Most tokens reserved for a sample whose request does not limit its output."""
_MIN_SCALE = 0.1
_MIN_RETRY_S = 1.0
_MAX_IDLE_TENANTS = 4096

Headers = tuple[tuple[str, str], ...]


class _Pair:
    """The buckets of one tenant, or of all together; None: no such limit."""

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None

    def follow(self, rates: Rates, share: float, now: float) -> None:
        self.requests = _followed(self.requests, rates.requests_per_minute, share, now)
        self.tokens = _followed(self.tokens, rates.tokens_per_minute, share, now)

    def kinds(self) -> Iterator[tuple[str, TokenBucket]]:
        if self.requests is not None:
            yield "requests", self.requests
        if self.tokens is not None:
            yield "tokens", self.tokens


def _followed(
    bucket: TokenBucket | None, per_minute: float | None, share: float, now: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute * share, now)
    if bucket.capacity != per_minute * share:
        bucket.resize(per_minute * share)
    return bucket


@dataclass(slots=True)
class Charge:
    """Requests and tokens that one request has taken from its buckets."""

    tenant: str
    num_requests: int = 0
    num_tokens: int = 0


class RateLimits:
    """Buckets of the gateway and of its tenants.

    Every limit is divided by the number of replicas and scaled by load: with more than `backlog_s`
    of prompts queued at the workers, buckets fill more slowly in proportion, but at no less than a
    tenth of their rate.

    Args:
        everybody: Limits of all tenants together.
        num_replicas: Gateways that share the limits.
        backlog_s: Queue, in seconds, above which load counts; 0: never.
        load_s: Returns the workers' queue in seconds; None: unknown.
        on_refused: Called with the scope (global, tenant) and the kind (requests, tokens) of each
            refusal.
    """

    def __init__(
        self,
        everybody: Rates,
        num_replicas: int,
        backlog_s: float,
        load_s: Callable[[], float | None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._everybody = everybody
        self._share = 1 / num_replicas
        self._backlog_s = backlog_s
        self._load_s = load_s
        self._on_refused = on_refused
        self._global = _Pair()
        self._tenants: dict[str, _Pair] = {}

    @property
    def scale(self) -> float:
        """Factor on the rates at which buckets fill now."""
        load_s = self._load_s() if self._backlog_s else None
        if load_s is None or load_s <= self._backlog_s:
            return 1.0
        return max(_MIN_SCALE, self._backlog_s / load_s)

    def begin(self, tenant: str, rates: Rates, now: float) -> Charge:
        """Charges a request at its start.

        Raises:
            RateLimited: A limit of requests is used up, or tokens are owed.
        """
        self.check(tenant, rates, now)
        charge = Charge(tenant)
        self._take(charge, num_requests=1, num_tokens=0)
        return charge

    def check(self, tenant: str, rates: Rates, now: float) -> None:
        """Raises what `begin` raises, and charges nothing."""
        self._follow(tenant, rates, now)
        self._check(tenant, now, num_requests=1, num_tokens=1)

    def reserve(self, charge: Charge, num_tokens: int, now: float) -> None:
        """Takes the most tokens that a request may use.

        Raises:
            RateLimited: A limit of tokens is used up.
        """
        self._check(charge.tenant, now, num_requests=0, num_tokens=num_tokens)
        self._take(charge, num_requests=0, num_tokens=num_tokens)

    def settle(self, charge: Charge, num_tokens: int | None) -> None:
        """Returns reserved tokens that were not used, or takes those used in excess. `num_tokens`
        are used; None: the request was refused, and gets everything back.
        """
        num_requests = 0 if num_tokens is not None else -charge.num_requests
        used = num_tokens or 0
        self._take(charge, num_requests=num_requests, num_tokens=used - charge.num_tokens)

    def headers(self, tenant: str, now: float) -> Headers:
        """Rate-limit headers under OpenAI's names, of the tenant's limits, and of the common limit
        of a kind for which the tenant has none.
        """
        own = self._tenants.get(tenant, _Pair())
        told: dict[str, str] = {}
        scale = self.scale
        # The tenant's buckets take precedence.
        for kind, bucket in (*self._global.kinds(), *own.kinds()):
            level = bucket.level(now, scale)
            told[f"x-ratelimit-limit-{kind}"] = str(int(bucket.capacity))
            told[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(level)))
            full_s = (bucket.capacity - level) * 60 / (bucket.capacity * scale)
            told[f"x-ratelimit-reset-{kind}"] = _shown(full_s)
        return tuple(told.items())

    def describe(self, now: float, max_tenants: int) -> Mapping[str, object]:
        """Levels of all buckets, for operators."""
        scale = self.scale

        def levels(pair: _Pair) -> dict[str, float]:
            return {kind: round(bucket.level(now, scale), 1) for kind, bucket in pair.kinds()}

        tenants = list(self._tenants.items())[:max_tenants]
        return {
            "scale": scale,
            "everybody": levels(self._global),
            "tenants": {name: levels(pair) for name, pair in tenants},
        }

    # -- internals -------------------------------------------------------------------------------

    def _follow(self, tenant: str, rates: Rates, now: float) -> None:
        self._global.follow(self._everybody, self._share, now)
        if tenant not in self._tenants and not rates.are_limited:
            return
        if len(self._tenants) >= _MAX_IDLE_TENANTS:
            self._forget_idle(now)
        self._tenants.setdefault(tenant, _Pair()).follow(rates, self._share, now)

    def _forget_idle(self, now: float) -> None:
        """Full buckets equal new ones."""
        self._tenants = {
            name: pair
            for name, pair in self._tenants.items()
            if any(bucket.level(now) < bucket.capacity for _, bucket in pair.kinds())
        }

    def _scopes(self, tenant: str) -> Iterator[tuple[str, _Pair]]:
        yield "global", self._global
        if tenant in self._tenants:
            yield "tenant", self._tenants[tenant]

    def _check(self, tenant: str, now: float, *, num_requests: int, num_tokens: int) -> None:
        wanted, scale = {"requests": num_requests, "tokens": num_tokens}, self.scale
        waits = [
            (bucket.wait_s(wanted[kind], now, scale), scope, kind, bucket)
            for scope, pair in self._scopes(tenant)
            for kind, bucket in pair.kinds()
            if wanted[kind]
        ]
        wait_s, scope, kind, bucket = max(
            waits, key=lambda each: each[0], default=(0.0, "", "", None)
        )
        if not wait_s or bucket is None:
            return
        self._on_refused(scope, kind)
        whose = "all tenants together" if scope == "global" else "this tenant"
        raise RateLimited(
            f"Rate limit reached for {whose}: {bucket.capacity:g} {kind} per minute. Try again in "
            f"{_shown(wait_s)}.",
            stage="limit",
            retry_after_s=max(_MIN_RETRY_S, wait_s),
            metadata=self.headers(tenant, now),
        )

    def _take(self, charge: Charge, *, num_requests: int, num_tokens: int) -> None:
        charge.num_requests += num_requests
        charge.num_tokens += num_tokens
        for _, pair in self._scopes(charge.tenant):
            if pair.requests is not None and num_requests:
                pair.requests.take(num_requests)
            if pair.tokens is not None and num_tokens:
                pair.tokens.take(num_tokens)


def _shown(seconds: float) -> str:
    """The form of OpenAI's headers: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1e3)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
