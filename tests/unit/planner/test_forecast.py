"""Numbers of workers by the forecast, beside queues that are simulated."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from weft.planner.forecast import (
    Demand,
    Speed,
    Targets,
    late_share,
    meets_first_token,
    meets_inter_token,
    need,
    step_s,
)
from weft.planner.replay.fleet import Fleet
from weft.planner.replay.traces import Arrival

SPEED = Speed(prefill_tokens_per_s=2000.0, step_base_s=0.015, step_request_s=0.001)
TARGETS = Targets(first_token_s=2.0, inter_token_s=0.05)
SIZES = ((400.0, 0.5), (1000.0, 0.3), (2400.0, 0.2))


def demand(requests_per_s: float, output_tokens: float = 150.0) -> Demand:
    return Demand(requests_per_s=requests_per_s, sizes=SIZES, output_tokens=output_tokens)


def arrivals(requests_per_s: float, count: int, seed: int) -> list[Arrival]:
    draw, now_s, found = random.Random(seed), 0.0, []
    sizes, shares = zip(*SIZES, strict=True)
    for _ in range(count):
        now_s += draw.expovariate(requests_per_s)
        found.append(Arrival(now_s, int(draw.choices(sizes, shares)[0]), 150))
    return found


@pytest.mark.parametrize(
    ("requests_per_s", "workers", "refuses"),
    [(2.0, 2, False), (5.0, 4, False), (12.0, 8, False), (3.0, 2, True), (7.0, 4, True)],
)
def test_late_first_tokens_are_those_of_a_queue(
    requests_per_s: float, workers: int, refuses: bool
) -> None:
    targets = replace(TARGETS, is_enforced=refuses)
    fleet = Fleet(SPEED, targets, workers, 50, refuses=refuses)
    for arrival in arrivals(requests_per_s, 5_000, seed=workers):
        fleet.offer(arrival)
    seen = (fleet.tally.refused if refuses else fleet.tally.late_first) / fleet.tally.requests
    told = late_share(demand(requests_per_s), SPEED, targets, workers)
    # The tail is an approximation for prompts of several sizes.
    assert told == pytest.approx(seen, rel=0.5, abs=0.01)
    # Those that would wait longer are many more than those that are refused.
    assert not refuses or late_share(demand(requests_per_s), SPEED, TARGETS, workers) > 3 * seen


def test_steps_are_those_of_a_queue() -> None:
    fleet = Fleet(SPEED, TARGETS, 100, 4, refuses=False)
    for arrival in arrivals(16.0, 5_000, seed=1):
        fleet.offer(arrival)
    # n = a (base + request n) on each, with a = 16 * 150 / 4 tokens a second.
    tokens = 16.0 * 150 / 4
    mean = tokens * SPEED.step_base_s / (1 - tokens * SPEED.step_request_s)
    assert step_s(demand(16.0), SPEED, 4) >= SPEED.step_base_s + SPEED.step_request_s * mean
    assert fleet.tally.slow <= 0.05 * fleet.tally.requests


def test_needs_are_the_least_that_meet_the_targets() -> None:
    for rate in (0.5, 3.0, 20.0):
        found = need(demand(rate), SPEED, TARGETS)
        assert meets_first_token(demand(rate), SPEED, TARGETS, found.prefill)
        assert meets_inter_token(demand(rate), SPEED, TARGETS, found.decode)
        assert found.prefill == 1 or not meets_first_token(
            demand(rate), SPEED, TARGETS, found.prefill - 1
        )
        assert found.decode == 1 or not meets_inter_token(
            demand(rate), SPEED, TARGETS, found.decode - 1
        )


def test_a_prompt_that_is_too_long_alone_asks_for_no_more_workers() -> None:
    few = need(demand(3.0), SPEED, TARGETS).prefill
    giant = Demand(
        requests_per_s=3.0,
        sizes=(*((tokens, share * 0.999) for tokens, share in SIZES), (60_000.0, 0.001)),
        output_tokens=150.0,
    )
    enforced = Targets(first_token_s=2.0, inter_token_s=0.05, is_enforced=True)
    assert need(giant, SPEED, enforced).prefill == few


def test_a_queue_asks_for_workers_that_end_it() -> None:
    waiting = Demand(
        requests_per_s=3.0, sizes=SIZES, output_tokens=150.0, queued_tokens=1_000_000.0
    )
    assert need(waiting, SPEED, TARGETS).prefill > need(demand(3.0), SPEED, TARGETS).prefill


def test_a_pace_that_no_worker_has_is_told() -> None:
    told = need(demand(1.0), SPEED, Targets(first_token_s=2.0, inter_token_s=0.01))
    assert told.decode == 1
    assert "no number meets 0.01 s between tokens" in told.why
    assert math.isinf(step_s(demand(1e6), SPEED, 1))
