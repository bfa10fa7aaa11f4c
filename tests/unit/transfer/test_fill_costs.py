"""Who computes a remainder: what each side takes is measured, and nothing stays unknown."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from weft.contract.timeline import FillCandidate, FillRecord, Timeline
from weft.engine.requests.request import HeldPages, PageSources
from weft.engine.sources.cost import (
    MAX_TRIED_FACTOR,
    MAX_TRIES,
    MIN_RESTS,
    NUM_BEHIND,
    TRIED_SHARE,
    TRY_AGAIN,
    FillCosts,
    FillDecision,
    LocalLoad,
)

PAGE = 16
PAGE_BYTES = 1 << 16
RATE = 1_000.0
"""Tokens a second of everybody."""
BYTES_PER_S = 1e9
NUM_LEARNING = 100


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
        held=HeldPages(),
        sources=PageSources([candidate(match, queued)]),
    )
    return costs.decide(request, 0, num_tokens // PAGE * PAGE, PAGE_BYTES)


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


def known(rest_s: float, weight: float = 1.0) -> FillCosts:
    costs = FillCosts(None, PAGE, weight)
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
    assert not decide(costs, num_tokens, match).is_overflow
    queued = decide(costs, num_tokens, match, queued=num_tokens)
    assert not queued.is_remote
    assert queued.is_overflow
    few = decide(costs, 16, 16, queued=num_tokens)
    assert not few.is_remote, "a fill takes longer than so few tokens here"
    assert not few.is_overflow


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
    costs.local_load = lambda: LocalLoad(queued_tokens=512)
    assert decide(costs, 1_024).is_remote


def test_one_slow_fill_says_nothing() -> None:
    costs = known(rest_s=0.01)
    before = decide(costs, 160, 128).remote_s
    fill(costs, 64, rest_s=30.0)
    assert decide(costs, 160, 128).remote_s == before


def test_the_tail_counts() -> None:
    """The owner's own step behind a fill, and whatever it waits for."""
    costs = known(rest_s=0.01)
    before = decide(costs, 1_024, 640)
    assert before.is_remote
    for _ in range(MIN_RESTS):
        costs.observe_first_token(first_token(fill_s=0.4, first_s=1.4))
    after = decide(costs, 1_024, 640)
    assert after.remote_s == pytest.approx((before.remote_s or 0.0) + 1.0)
    assert not after.is_remote
    # Neither a failed fill nor a request that was preempted tells anything.
    costs.observe_first_token(first_token(fill_s=0.4, first_s=90.0, failure="lost"))
    costs.observe_first_token(first_token(fill_s=0.4, first_s=90.0, num_preemptions=1))
    assert decide(costs, 1_024, 640).remote_s == after.remote_s


def test_running_requests_slow_local_prompts() -> None:
    costs = known(rest_s=0.01)
    costs.observe_decode(0.05)
    costs.observe_beside(64, 0.05 + 64 / RATE)
    costs.local_load = lambda: LocalLoad(num_running=3, step_tokens=128)
    assert decide(costs, 1_024).local_s == pytest.approx(1_024 / RATE + 8 * 0.05)


@pytest.mark.parametrize("weight", [0.5, 1.0, 3.0])
def test_the_delay_of_running_requests_counts_against_a_local_prompt(weight: float) -> None:
    """A prompt of a second, beside eight requests that would wait for it."""
    costs = known(rest_s=0.01, weight=weight)
    costs.local_load = lambda: LocalLoad(num_running=8, step_tokens=10**6)
    costs.observe_beside(64, 64 / RATE)
    delay_s = 8 * 0.96 / (weight * NUM_BEHIND)
    for queued_s, is_remote in ((0.0, True), (0.9 * delay_s, True), (1.1 * delay_s + 0.1, False)):
        found = decide(costs, 960, queued=round(queued_s * RATE))
        assert found.is_remote is is_remote, (queued_s, delay_s, found)
        assert found.local_s == pytest.approx(0.96, rel=0.01), "the forecast of its first token"


def test_half_the_fillers_rate_stands_in_until_a_long_prompt_was_measured_here() -> None:
    costs = FillCosts(None, PAGE)
    for _ in range(MIN_RESTS):
        fill(costs, 64, 0.01)
    assert decide(costs, 2_048).local_s == pytest.approx(2 * 2_048 / RATE)
    assert decide(costs, 2_048).is_remote
    assert not decide(costs, 2_048, queued=2_100).is_remote
    costs.observe_local(40, 40 / (0.05 * RATE))  # A short step takes what any step takes.
    assert decide(costs, 2_048).local_s == pytest.approx(2 * 2_048 / RATE)
    assert decide(costs, 160).local_s == pytest.approx(160 / (0.05 * RATE))
    costs.local_load = lambda: LocalLoad(chunk_tokens=512)
    for _ in range(3):
        costs.observe_local(512, 512 / (0.2 * RATE))
    for num_tokens in (160, 2_048, 2_064, 16_384):
        assert decide(costs, num_tokens).local_s == pytest.approx(num_tokens / (0.2 * RATE))


def test_a_prompt_of_many_steps_has_the_rate_of_such_steps() -> None:
    """The steps beside running requests have few prompt tokens, however long a prompt is."""
    costs = known(rest_s=0.01)
    costs.observe_decode(0.05)
    for _ in range(100):
        costs.observe_beside(64, 0.05 + 64 / (0.1 * RATE))
    costs.local_load = lambda: LocalLoad(num_running=3, step_tokens=64, chunk_tokens=256)
    for num_steps in (1, 4, 5, 64):
        forecast_s = decide(costs, 64 * num_steps).local_s
        assert forecast_s == pytest.approx(num_steps * (64 / (0.1 * RATE) + 0.05))


def test_a_remainder_of_no_tokens_takes_no_time_here() -> None:
    costs = known(rest_s=0.01)
    costs.local_load = lambda: LocalLoad(num_running=3, step_tokens=64)
    assert not costs.tokens_per_s_beside
    decision = decide(costs, 0)
    assert decision.local_s == 0.0
    assert not decision.is_remote


def test_first_tokens_of_no_worth_never_delay_running_requests() -> None:
    costs = known(rest_s=0.01, weight=0.0)
    assert not decide(costs, 960, queued=100_000).is_remote
    costs.local_load = lambda: LocalLoad(num_running=1, step_tokens=10**6)
    assert decide(costs, 960, queued=100_000).is_remote
    assert all(decide(costs, 64).is_remote for _ in range(5_000)), "nor to measure"


def test_first_tokens_of_no_worth_delay_nobody_in_the_first_tries() -> None:
    costs = FillCosts(None, PAGE, 0.0)
    fill(costs, 64, 0.0)
    costs.local_load = lambda: LocalLoad(num_running=1, step_tokens=64)
    assert all(decide(costs, 64).is_remote for _ in range(3 * MAX_TRIES))
    costs.local_load = LocalLoad
    assert not decide(costs, 64).is_remote, "nobody runs now"


def test_local_first_tokens_correct_the_forecast() -> None:
    costs = known(rest_s=0.5)
    for _ in range(100):
        forecast_s = decide(costs, 128).local_s
        costs.observe_first_token(first_token(first_s=0.128 + 0.06, local_cost_s=forecast_s))
    assert decide(costs, 128).local_s == pytest.approx(0.128 + 0.06, rel=0.02)
    # One that was late by chance does not.
    before = decide(costs, 128).local_s or 0.0
    costs.observe_first_token(first_token(first_s=60.0, local_cost_s=before))
    assert (decide(costs, 128).local_s or 0.0) < 1.3 * before


def first_token(
    *,
    first_s: float,
    fill_s: float = 0.0,
    failure: str = "",
    local_cost_s: float | None = None,
    num_preemptions: int = 0,
) -> Timeline:
    """A request's timeline when it has its first token; it was admitted at once."""
    timeline = Timeline(submitted_at=0.0, admitted_s=0.0, first_token_s=first_s)
    timeline.local_cost_s, timeline.num_preemptions = local_cost_s, num_preemptions
    if fill_s:
        record = FillRecord(
            source="prefill",
            worker_id="prefill-0",
            transport="nixl",
            start_token=0,
            end_token=PAGE,
            start_s=0.0,
            end_s=fill_s,
            failure=failure,
        )
        timeline.fills.append(record)
    return timeline


@pytest.mark.parametrize("factor", [1.2, 2.0, 4.0, 8.0])
def test_what_loses_is_tried_now_and_then_for_a_small_share(factor: float) -> None:
    for is_remote_better in (True, False):
        local_s, remote_s = (factor, 1.0) if is_remote_better else (1.0, factor)
        costs = known(rest_s=remote_s - 0.064 - 4 * PAGE_BYTES / BYTES_PER_S)
        costs.observe_first_token(first_token(first_s=1e3, local_cost_s=1e3))
        costs._local_rest_s = local_s - 0.064
        decided = [decide(costs, 64).is_remote for _ in range(1_000)]
        num_tried = decided.count(not is_remote_better)
        assert num_tried >= 1
        assert num_tried * (factor - 1.0) <= TRIED_SHARE * 1_001


def test_what_would_be_wasted_is_not_tried() -> None:
    """Next to nothing is lacking here, and everything there."""
    costs = known(rest_s=0.01)
    request: Any = SimpleNamespace(
        num_tokens=1_025, num_computed=960, held=HeldPages(), sources=PageSources([candidate()])
    )
    assert not any(costs.decide(request, 960, 1_024, PAGE_BYTES).is_remote for _ in range(1_000))


def test_long_prompts_are_not_tried_beside_running_requests() -> None:
    costs = known(rest_s=0.0)
    costs.observe_beside(512, 512 / RATE)
    costs.local_load = lambda: LocalLoad(queued_tokens=200, num_running=1, step_tokens=512)
    assert all(decide(costs, 1_024).is_remote for _ in range(200))
    costs.local_load = lambda: LocalLoad(queued_tokens=200)
    assert not all(decide(costs, 1_024).is_remote for _ in range(200))


@pytest.mark.parametrize("is_hopeless", [False, True])
def test_what_steps_take_beside_running_requests_is_measured(is_hopeless: bool) -> None:
    """The rate of short steps behind long histories would keep long prompts away for ever."""
    factor = 2 * MAX_TRIED_FACTOR if is_hopeless else MAX_TRIED_FACTOR // 2
    costs = known(rest_s=0.01)
    for _ in range(100):
        costs.observe_local(500, factor * 500 / RATE)
    costs.local_load = lambda: LocalLoad(num_running=24, step_tokens=512)
    decided = [decide(costs, 1_024).is_remote for _ in range(3 * TRY_AGAIN)]
    assert decided.count(False) == (0 if is_hopeless else 3)
    costs.observe_beside(512, 512 / RATE)
    assert all(decide(costs, 1_024).is_remote for _ in range(3 * TRY_AGAIN)), "it is known now"
    assert not decide(costs, 1_024, queued=6_000).is_remote


@dataclass
class World:
    """Two workers in virtual time: what a prompt takes here and there, with some chance."""

    rng: random.Random
    local_rate: float
    filler_rate: float
    bytes_per_s: float
    messages_s: float
    """Of a hand-over, both ways."""
    tail_s: float
    step_wait_s: float
    """Time until a local prompt's first step begins."""
    step_tokens: int
    gap_s: float
    """Mean time between two prompts."""

    def mean_first_s(self, costs: FillCosts, lengths: list[int]) -> float:
        """Mean time to the first token of these prompts, as `costs` decides; the first ones, by
        which it learns, are not counted.
        """
        now, local_free, filler_free, waited_s = 0.0, 0.0, 0.0, 0.0
        for number, num_tokens in enumerate(lengths):
            now += self.rng.expovariate(1 / self.gap_s) if self.gap_s else 1e4
            queued = max(0.0, local_free - now)
            there = max(0.0, filler_free - now)
            costs.local_load = partial(LocalLoad, round(queued * self.local_rate))
            # A filler states what it has measured, and what waits as of its last report.
            stated = replace(
                candidate(queued=round(there * self.filler_rate)),
                tokens_per_second=self.filler_rate * self.noise(),
            )
            request: Any = SimpleNamespace(
                num_tokens=num_tokens + 1,
                num_computed=0,
                held=HeldPages(),
                sources=PageSources([stated]),
            )
            decision = costs.decide(request, 0, num_tokens, PAGE_BYTES)
            if decision.is_remote:
                computed_s = there + num_tokens / self.filler_rate * self.noise()
                filler_free = now + computed_s
                num_bytes = num_tokens // PAGE * PAGE_BYTES
                last = min(num_tokens, self.step_tokens) // PAGE * PAGE_BYTES
                written_s = computed_s + last / self.bytes_per_s
                filled_s = written_s + self.messages_s * self.noise()
                first_s = filled_s + self.tail_s * self.noise()
                record = FillRecord(
                    source="prefill",
                    worker_id="prefill-0",
                    transport="nixl",
                    start_token=0,
                    end_token=num_tokens,
                    start_s=0.0,
                    end_s=filled_s,
                    computed_tokens=num_tokens,
                    bytes=num_bytes,
                    first_write_posted_s=min(
                        computed_s, there + self.step_tokens / self.filler_rate
                    ),
                    last_chunk_computed_s=computed_s,
                    last_write_complete_s=written_s,
                )
                costs.observe(record, filled_s)
                timeline = Timeline(submitted_at=now, admitted_s=0.0, first_token_s=first_s)
                timeline.fills.append(record)
            else:
                computed_s = num_tokens / self.local_rate * self.noise()
                first_s = queued + self.step_wait_s * self.noise() + computed_s
                local_free = now + first_s
                costs.observe_local(num_tokens, computed_s)
                timeline = Timeline(submitted_at=now, admitted_s=0.0, first_token_s=first_s)
                timeline.local_cost_s = decision.local_s
            costs.observe_first_token(timeline)
            waited_s += first_s * (number >= NUM_LEARNING)
        return waited_s / (len(lengths) - NUM_LEARNING)

    def noise(self) -> float:
        return self.rng.uniform(0.9, 1.1)


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_choice_is_never_much_slower_than_the_better_side(is_busy: bool) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(25):
        rate = rng.uniform(5_000, 50_000)
        mean_s = 2_000 / rate
        world = World(
            rng,
            local_rate=rate,
            filler_rate=rate * rng.choice([0.5, 0.9, 1.0, 1.1, 2.0]),
            bytes_per_s=10 ** rng.uniform(8.5, 11),
            messages_s=mean_s * rng.uniform(0.01, 0.3),
            tail_s=mean_s * rng.uniform(0.01, 0.5),
            step_wait_s=mean_s * rng.uniform(0.0, 0.3),
            step_tokens=1_024,
            gap_s=1.5 * mean_s if is_busy else 0.0,
        )
        lengths = [PAGE * rng.randrange(8, 250) for _ in range(1_500)]
        chosen, remote, local = (
            world.mean_first_s(FillCosts(most, PAGE), lengths) for most in (None, 0, 10**9)
        )
        assert chosen <= 1.05 * min(remote, local), (seed, world)


def test_with_a_bound_nothing_is_measured() -> None:
    costs = FillCosts(100, PAGE)
    decisions = [decide(costs, num_tokens, queued=9_999) for num_tokens in (99, 100, 101)]
    assert [decision.is_remote for decision in decisions] == [0, 0, 1]
    assert not any(decision.is_overflow for decision in decisions)
