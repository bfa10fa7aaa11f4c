"""Who computes a remainder: what each side takes is measured, and nothing stays unknown."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from weft.engine.protocol.timeline import FillCandidate, FillRecord
from weft.engine.sources.cost import MAX_TRIES, MIN_RESTS, TRY_AGAIN, FillCosts, FillDecision

PAGE = 16
PAGE_BYTES = 1 << 16
RATE = 1_000.0
"""Tokens a second of everybody."""
BYTES_PER_S = 1e9


def candidate(match: int = 0, queued: int = 0) -> FillCandidate:
    return FillCandidate(
        worker_id="prefill-0",
        address="",
        epoch=1,
        match_tokens=match,
        queued_tokens=queued,
        tokens_per_second=RATE,
    )


def decide(costs: FillCosts, num_tokens: int, match: int = 0, queued: int = 0) -> FillDecision:
    """Of a prompt of which nothing is known here."""
    request: Any = SimpleNamespace(
        num_tokens=num_tokens + 1,
        num_computed=0,
        num_partial_tokens=0,
        candidates=[candidate(match, queued)],
    )
    return costs.decide(request, num_tokens // PAGE * PAGE, PAGE_BYTES)


def fill(costs: FillCosts, num_tokens: int, rest_s: float, num_steps: int = 1) -> None:
    """A fill that was computed whole, and took so much longer than that; each step's pages leave
    while the next one computes.
    """
    num_bytes = num_tokens // PAGE * PAGE_BYTES
    moved_s = num_bytes / BYTES_PER_S
    record = FillRecord(
        source="prefill",
        worker_id="prefill-0",
        transport="nixl",
        start_token=0,
        end_token=num_tokens,
        start_s=0.0,
        computed_tokens=num_tokens,
        bytes=num_bytes,
        first_write_posted_s=num_tokens / RATE / num_steps,
        last_chunk_computed_s=num_tokens / RATE,
        last_write_complete_s=num_tokens / RATE + moved_s / num_steps,
    )
    costs.observe(record, num_tokens / RATE + moved_s / num_steps + rest_s)


def known(rest_s: float) -> FillCosts:
    costs = FillCosts(None, PAGE)
    for _ in range(MIN_RESTS):
        fill(costs, 64, rest_s)
    costs.observe_local(64, 64 / RATE)
    return costs


def test_each_side_is_tried_until_it_is_known() -> None:
    costs = FillCosts(None, PAGE)
    assert decide(costs, 64).is_remote
    fill(costs, 64, 0.0)
    assert decide(costs, 16).is_remote, "a step of so few tokens says nothing"
    assert decide(costs, 4_096).is_remote, "too much to try"
    assert not decide(costs, 64).is_remote
    costs.observe_local(64, 64 / RATE)
    decision = decide(costs, 64)
    assert decision.remote_s == pytest.approx(0.064 + 4 * PAGE_BYTES / BYTES_PER_S)
    assert decision.local_s == pytest.approx(0.064)


def test_what_tells_nothing_is_not_tried_for_ever() -> None:
    costs = FillCosts(None, PAGE)
    fill(costs, 64, 0.0)
    remote = [decide(costs, 64).is_remote for _ in range(3 * MAX_TRIES)]
    assert remote == [False] * MAX_TRIES + [True] * (2 * MAX_TRIES)


def test_it_goes_where_it_takes_less() -> None:
    costs = known(rest_s=0.02)
    num_tokens = random.randrange(320, 4_096, PAGE)
    match = num_tokens - 160
    assert decide(costs, num_tokens, match).is_remote
    assert not decide(costs, num_tokens, match, queued=num_tokens).is_remote
    assert not decide(costs, 16, 16).is_remote, "a fill takes longer than so few tokens here"


def test_what_moves_beside_computing_costs_nothing() -> None:
    """A fill of many steps says nothing about bandwidth, and exposes what one step ships."""
    costs = known(rest_s=0.01)
    for _ in range(3):
        fill(costs, 64_000, 0.01, num_steps=1_000)
    decision = decide(costs, 64_000)
    assert decision.remote_s == pytest.approx(64.0 + 4 * PAGE_BYTES / BYTES_PER_S + 0.01)
    assert not decision.is_remote
    # What the filler has cached moves all at once.
    cached = decide(costs, 64_000, match=64_000).remote_s
    assert cached == pytest.approx(4_000 * PAGE_BYTES / BYTES_PER_S + 0.01)


def test_prompts_that_wait_here_count() -> None:
    costs = known(rest_s=0.01)
    assert not decide(costs, 1_024).is_remote
    costs.local_queue = lambda: 512
    assert decide(costs, 1_024).is_remote


def test_one_slow_fill_says_nothing() -> None:
    costs = known(rest_s=0.01)
    before = decide(costs, 160, 128).remote_s
    fill(costs, 64, rest_s=30.0)
    assert decide(costs, 160, 128).remote_s == before


def test_what_loses_is_tried_again_now_and_then() -> None:
    costs = known(rest_s=10.0)
    remote = [decide(costs, 160, 128).is_remote for _ in range(4 * TRY_AGAIN)]
    assert sum(remote) == 4
    assert not any(remote[: TRY_AGAIN - 1])
    # But not where next to nothing is lacking here, and everything there.
    request: Any = SimpleNamespace(
        num_tokens=1_025, num_computed=960, num_partial_tokens=0, candidates=[candidate()]
    )
    remote = [costs.decide(request, 1_024, PAGE_BYTES).is_remote for _ in range(4 * TRY_AGAIN)]
    assert not any(remote)


def test_with_a_bound_nothing_is_measured() -> None:
    costs = FillCosts(100, PAGE)
    assert [decide(costs, num_tokens).is_remote for num_tokens in (99, 100, 101)] == [0, 0, 1]
