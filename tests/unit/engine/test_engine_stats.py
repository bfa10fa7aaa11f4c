"""When an engine counts as stalled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from weft.engine.loop.stats import (
    MIN_STALE_S,
    RATE_WINDOW_S,
    STALE_STEPS,
    UNKNOWN_STALE_S,
    UNKNOWN_STEP_S,
    EngineStats,
)
from weft.engine.scheduler.plan import Plan, PlanItem
from weft.engine.sources.cost import FillCosts

MAX_STEP_TOKENS = 512


def run_step(stats: EngineStats, num_tokens: int, duration_s: float) -> None:
    request: Any = SimpleNamespace()
    item = PlanItem(request, 0, num_tokens, draws=True)
    stats.step(Plan(chunks=[item]), duration_s, FillCosts(None, 16))


def test_an_idle_engine_makes_no_tokens_a_second() -> None:
    now = 100.0
    stats = EngineStats(lambda: now, MAX_STEP_TOKENS)
    request: Any = SimpleNamespace()

    def run(seconds: float) -> None:
        """Decodes four tokens a step, ten steps a second."""
        nonlocal now
        for _ in range(round(10 * seconds)):
            now += 0.1
            stats.step(Plan(decodes=[request] * 4), 0.1, FillCosts(None, 16))

    run(3.5)
    assert stats.decode_tokens_per_s == pytest.approx(40.0, rel=0.05)
    now += 2 * RATE_WINDOW_S
    assert stats.decode_tokens_per_s == 0.0
    now += 1000.0
    run(RATE_WINDOW_S + 0.1)
    assert stats.decode_tokens_per_s == pytest.approx(40.0, rel=0.05)


def test_prompts_of_long_ago_are_not_of_lately() -> None:
    now = 100.0
    stats = EngineStats(lambda: now, MAX_STEP_TOKENS)
    assert not stats.prefilled_lately
    run_step(stats, 100, 0.1)
    assert stats.prefilled_lately
    now += 3 * RATE_WINDOW_S
    stats.step(Plan(decodes=[SimpleNamespace()]), 0.1, FillCosts(None, 16))  # type: ignore[list-item]
    assert not stats.prefilled_lately


def test_the_first_long_step_is_allowed_for() -> None:
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS)
    assert stats.stale_after_s > 10


@pytest.mark.parametrize("token_s", [1e-5, 5e-3, 1.0])
def test_what_was_tried_at_start_bounds_steps_until_a_prompt_comes(token_s: float) -> None:
    """On a worker that never computes one, a stall is to be noticed as well."""
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS, token_s)
    for _ in range(100):
        run_step(stats, 8, 1e-6)
    full_step_s = min(UNKNOWN_STEP_S, token_s * MAX_STEP_TOKENS)
    assert stats.stale_after_s == max(UNKNOWN_STALE_S, STALE_STEPS * full_step_s)
    run_step(stats, 64, 64e-4)
    assert stats.stale_after_s == MIN_STALE_S


@pytest.mark.parametrize("tokens_per_s", [100.0, 1_000.0, 100_000.0])
def test_a_full_step_is_allowed_for_long_after_the_last_one(tokens_per_s: float) -> None:
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS)
    run_step(stats, 64, 64 / tokens_per_s)
    for _ in range(10_000):
        run_step(stats, 1, 1e-6)
    full_step_s = MAX_STEP_TOKENS / tokens_per_s
    assert stats.stale_after_s == pytest.approx(max(MIN_STALE_S, STALE_STEPS * full_step_s))


def test_a_machine_that_became_fast_is_noticed() -> None:
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS)
    run_step(stats, MAX_STEP_TOKENS, 5.0)
    for _ in range(10_000):
        run_step(stats, MAX_STEP_TOKENS, 0.01)
    assert stats.stale_after_s == MIN_STALE_S


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_the_share_of_prompts_is_learned_where_somebody_always_decodes(page_size: int) -> None:
    costs = FillCosts(None, page_size)
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS)
    request: Any = SimpleNamespace()
    first = costs.tokens_within(0.1)
    prompt = PlanItem(request, 0, first, draws=False)
    one = np.zeros(1, np.int64)
    stats.step(Plan([request], one, one, [prompt]), first / 5_000, costs)
    share = costs.tokens_within(0.1)
    assert share % page_size == 0
    assert 500 - page_size <= share <= 550


def test_one_late_step_does_not_cut_prompts_for_good() -> None:
    costs = FillCosts(None, 16)
    stats = EngineStats(lambda: 0.0, MAX_STEP_TOKENS)
    request: Any = SimpleNamespace()
    late = PlanItem(request, 0, MAX_STEP_TOKENS, draws=True)
    stats.step(Plan(chunks=[late]), 10.0, costs)
    one = np.zeros(1, np.int64)
    for _ in range(20):
        # Somebody decodes from now on; decodes take 5 ms, prompts 0.1 ms a token.
        stats.step(Plan([request], one, one, []), 0.005, costs)
        tokens = min(MAX_STEP_TOKENS, costs.tokens_within(0.05))
        prompt = PlanItem(request, 0, tokens, draws=False)
        stats.step(Plan([request], one, one, [prompt]), 0.005 + 1e-4 * tokens, costs)
    assert costs.tokens_within(0.05) == pytest.approx(500, rel=0.1)


def test_steps_that_decode_are_told_with_how_many_requests_they_had() -> None:
    now = 0.0
    stats = EngineStats(lambda: now, MAX_STEP_TOKENS)
    request: Any = SimpleNamespace()
    costs = FillCosts(None, 16)
    assert stats.decode_step_s == 0

    def decode(num_requests: int, duration_s: float, num_prompt_tokens: int = 0) -> None:
        nonlocal now
        now += duration_s
        rows = np.zeros(num_requests, np.int64)
        chunks = [PlanItem(request, 0, num_prompt_tokens, draws=False)]
        plan = Plan([request] * num_requests, rows, rows, chunks if num_prompt_tokens else [])
        stats.step(plan, duration_s, costs)

    for _ in range(50):
        decode(4, 0.05)
        decode(8, 0.07, num_prompt_tokens=32)
    told_s = stats.decode_step_s
    assert told_s == pytest.approx(0.06, rel=0.05)
    assert stats.decode_step_requests == pytest.approx(6, rel=0.1)
    for _ in range(5):
        decode(0, 0.3, num_prompt_tokens=64)  # says nothing of the time between tokens
    assert stats.decode_step_s == pytest.approx(told_s, rel=0.2)
