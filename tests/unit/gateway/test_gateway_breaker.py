"""The circuit breaker of a worker, by its states."""

from __future__ import annotations

import pytest
from weft.common.rpc.breaker import Breaker, BreakerState

LATER_S = 1.0
"""Between failures that are not one burst."""


def tripped(**settings: float) -> tuple[Breaker, float]:
    """A breaker that has just opened, and when."""
    breaker = Breaker(3, **settings)
    now = 0.0
    for _ in range(3):
        now += LATER_S
        assert breaker.state(now) is BreakerState.CLOSED
        breaker.begin()
        breaker.failed(now, "it broke")
    assert breaker.state(now) is BreakerState.OPEN
    return breaker, now


def test_failures_in_a_row_open_it() -> None:
    breaker, now = tripped()
    assert "3 times in a row (it broke)" in breaker.problem(now)
    assert (breaker.num_failures, breaker.num_openings) == (3, 1)


def test_a_success_between_them_keeps_it_closed() -> None:
    breaker = Breaker(3)
    for number in range(20):
        breaker.begin()
        breaker.failed(number * LATER_S, "it broke")
        if number % 2:
            breaker.succeeded()
        assert not breaker.problem(number * LATER_S)


def test_failures_that_come_together_count_once() -> None:
    breaker = Breaker(3)
    for number in range(64):
        breaker.failed(1.0 + number / 1000, "a step of 64 requests failed")
    assert breaker.num_failures == 1
    assert not breaker.problem(2.0)


@pytest.mark.parametrize("failures_a_second", [9, 11, 1000])
def test_many_failures_a_second_open_it_too(failures_a_second: int) -> None:
    breaker, now = Breaker(3), 1.0
    while not breaker.problem(now):
        assert now < 2.0
        breaker.failed(now, "every request fails")
        now += 1 / failures_a_second
    assert breaker.num_openings == 1


def test_after_its_rest_one_request_at_a_time_is_let_through() -> None:
    breaker, now = tripped(open_s=10.0)
    assert breaker.problem(now + 7.9)
    now += 12.1
    assert breaker.state(now) is BreakerState.HALF_OPEN
    assert not breaker.problem(now)
    breaker.begin()
    assert "being tried" in breaker.problem(now)
    breaker.abandoned()  # its client left: nothing is known
    assert breaker.state(now) is BreakerState.HALF_OPEN
    assert not breaker.problem(now)
    breaker.begin()
    breaker.succeeded()
    assert breaker.state(now) is BreakerState.CLOSED
    assert not breaker.problem(now)
    assert breaker.num_failures == 0


def test_a_failed_trial_opens_it_for_longer() -> None:
    breaker, now = tripped(open_s=10.0, max_open_s=25.0)
    for least_s, most_s in ((8, 12), (16, 24), (20, 30), (20, 30)):
        assert breaker.state(now + 0.99 * least_s) is BreakerState.OPEN
        now += 1.01 * most_s
        assert breaker.state(now) is BreakerState.HALF_OPEN
        breaker.begin()
        breaker.failed(now, "again")
        assert breaker.state(now) is BreakerState.OPEN
    breaker.succeeded()
    assert breaker.state(now) is BreakerState.CLOSED


def test_what_was_sent_before_it_opened_does_not_prolong_its_rest() -> None:
    breaker, now = tripped(open_s=10.0)
    breaker.failed(now + 7.0, "an old request")
    assert breaker.num_failures == 3
    assert breaker.state(now + 12.1) is BreakerState.HALF_OPEN


@pytest.mark.parametrize("count", [1, 50])
def test_zero_never_opens(count: int) -> None:
    breaker = Breaker(0)
    for number in range(count):
        breaker.failed(number * LATER_S, "it broke")
    assert not breaker.problem(count * LATER_S)
