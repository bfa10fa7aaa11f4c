"""Token buckets against a fine-grained simulation, and the limits that are made of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.contract.errors import RateLimited
from weft.gateway.admission.limits import RateLimits
from weft.gateway.admission.tenants import Rates
from weft.gateway.admission.token_bucket import TokenBucket

NONE = Rates()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_bucket_is_what_a_clock_that_ticks_would_make_of_it(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1.0, 60.0, 6000.0])
    bucket = TokenBucket(capacity, 0.0)
    level, ticks = capacity, 0
    for _ in range(60):
        for _ in range(rng.randrange(200)):  # of 10 ms
            level = min(capacity, level + capacity / 60 / 100)
            ticks += 1
        now = ticks / 100
        assert bucket.level(now) == pytest.approx(level, rel=1e-6, abs=1e-6)
        amount = rng.uniform(0, 1.5 * capacity)
        wait_s = bucket.wait_s(amount, now)
        due_s = max(0.0, min(amount, capacity) - level) * 60 / capacity
        assert wait_s == pytest.approx(due_s, rel=1e-6, abs=1e-6)
        if wait_s == 0 or rng.random() < 0.2:
            bucket.take(amount)
            level -= amount
        elif rng.random() < 0.3:
            bucket.take(-amount)
            level = min(capacity, level + amount)


def test_more_than_a_minute_allows_needs_a_full_bucket_and_is_owed() -> None:
    bucket = TokenBucket(60.0, 0.0)
    assert bucket.wait_s(100, 0.0) == 0
    bucket.take(100)
    assert bucket.wait_s(1, 0.0) == pytest.approx(41)
    assert bucket.wait_s(100, 0.0) == pytest.approx(100)


def test_a_limit_that_changes_keeps_what_was_used() -> None:
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(50)
    bucket.resize(100.0)
    assert bucket.level(0.0) == 50
    bucket.resize(40.0)
    assert bucket.level(0.0) == -10


def make(
    everybody: Rates = NONE, replicas: int = 1, backlog_s: float = 0.0, load_s: float | None = None
) -> tuple[RateLimits, list[tuple[str, str]]]:
    refused: list[tuple[str, str]] = []
    limits = RateLimits(
        everybody, replicas, backlog_s, lambda: load_s, lambda *what: refused.append(what)
    )
    return limits, refused


def test_requests_are_refused_until_the_next_one_is_due() -> None:
    limits, refused = make()
    rates = Rates(requests_per_minute=6)
    for _ in range(6):
        limits.begin("a", rates, 0.0)
    with pytest.raises(RateLimited) as error:
        limits.begin("a", rates, 4.0)
    assert error.value.retry_after_s == pytest.approx(6.0)
    assert (error.value.http_status, error.value.grpc_code) == (429, "RESOURCE_EXHAUSTED")
    assert dict(error.value.metadata)["x-ratelimit-remaining-requests"] == "0"
    limits.begin("a", rates, 10.0)
    limits.begin("b", rates, 4.0)  # another tenant has a bucket of its own
    assert refused == [("tenant", "requests")]


def test_tokens_are_reserved_and_given_back() -> None:
    limits, refused = make()
    rates = Rates(tokens_per_minute=600)
    first = limits.begin("a", rates, 0.0)
    limits.reserve(first, 500, 0.0)
    second = limits.begin("a", rates, 0.0)
    with pytest.raises(RateLimited) as error:
        limits.reserve(second, 200, 0.0)
    assert error.value.retry_after_s == pytest.approx(10.0)
    assert refused == [("tenant", "tokens")]
    limits.settle(second, None)
    limits.settle(first, 30)
    third = limits.begin("a", rates, 0.0)
    limits.reserve(third, 570, 0.0)
    limits.settle(third, 1000)  # more than it said: owed
    with pytest.raises(RateLimited):
        limits.begin("a", rates, 30.0)
    limits.begin("a", rates, 45.0)


def test_everybody_together_has_a_limit_beside_the_tenants() -> None:
    limits, refused = make(Rates(requests_per_minute=3, tokens_per_minute=100))
    rates = Rates(requests_per_minute=2)
    limits.begin("a", rates, 0.0)
    limits.begin("a", rates, 0.0)
    with pytest.raises(RateLimited):
        limits.begin("a", rates, 0.0)
    charge = limits.begin("b", rates, 0.0)
    with pytest.raises(RateLimited):
        limits.begin("c", NONE, 0.0)
    assert refused == [("tenant", "requests"), ("global", "requests")]
    limits.settle(charge, None)  # refused later on: it counts as if it had never come
    limits.begin("c", NONE, 0.0)


def test_replicas_take_their_share() -> None:
    limits, _ = make(replicas=3)
    rates = Rates(requests_per_minute=6, tokens_per_minute=300)
    limits.begin("a", rates, 0.0)
    limits.begin("a", rates, 0.0)
    with pytest.raises(RateLimited):
        limits.begin("a", rates, 0.0)
    assert dict(limits.headers("a", 0.0)) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0ms",
    }


@pytest.mark.parametrize(
    ("load_s", "scale"), [(None, 1.0), (1.9, 1.0), (4.0, 0.5), (8.0, 0.25), (1e6, 0.1)]
)
def test_limits_shrink_with_load(load_s: float | None, scale: float) -> None:
    limits, _ = make(backlog_s=2.0, load_s=load_s)
    rates = Rates(requests_per_minute=60)
    assert limits.scale == pytest.approx(scale)
    for _ in range(60):
        limits.begin("a", rates, 0.0)
    with pytest.raises(RateLimited) as error:
        limits.begin("a", rates, 0.0)
    assert error.value.retry_after_s == pytest.approx(1 / scale)
    for _ in range(int(40 * scale)):
        limits.begin("a", rates, 40.0)
    with pytest.raises(RateLimited):
        limits.begin("a", rates, 40.0)


def test_without_limits_there_are_no_headers_and_no_buckets() -> None:
    limits, _ = make(backlog_s=1.0, load_s=100.0)
    for number in range(10_000):
        limits.settle(limits.begin(f"tenant {number}", NONE, 0.0), 10**6)
    assert limits.headers("tenant 1", 0.0) == ()
    assert limits.describe(0.0, 10)["tenants"] == {}


def test_tenants_that_have_all_of_their_rate_are_forgotten() -> None:
    limits, _ = make()
    rates = Rates(requests_per_minute=1)
    for number in range(10_000):
        limits.begin(f"tenant {number}", rates, 60.0 * number)
    tenants = limits.describe(600_000.0, 10_000)["tenants"]
    assert isinstance(tenants, dict)
    assert len(tenants) <= 4097
