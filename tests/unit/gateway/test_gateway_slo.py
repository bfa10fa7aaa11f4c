"""Latency targets: forecasts against a naive form, and what the gate makes of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from weft.common.capacity import StepModel
from weft.contract.errors import Overloaded, TargetUnattainable
from weft.gateway.admission.slo import (
    NO_TARGETS,
    LatencyForecaster,
    LatencyGate,
    SloTicket,
    Targets,
)
from weft.gateway.admission.slo.forecast import IndexedPool
from weft.gateway.admission.slo.gate import SHORT_PROMPT_TOKENS
from weft.gateway.routing import LoadEstimate, PolicyOptions, PoolView, Throughput, make_policy
from weft.gateway.routing.page_index import FleetPageIndex
from weft.testing.services.routing_pool import PAGE, pool
from weft.testing.services.routing_pool import ask as route

RATE = 1000.0
"""Prompt tokens a second of each worker."""


# Steps


def test_a_line_is_found_in_noisy_steps() -> None:
    rng = random.Random(1)
    model = StepModel()
    assert model.step_s(10) == 0
    for _ in range(400):
        requests = rng.randrange(1, 60)
        model.observe(requests, (0.010 + 0.0004 * requests) * rng.uniform(0.97, 1.03))
    assert model.base_s == pytest.approx(0.010, rel=0.1)
    assert model.request_s == pytest.approx(0.0004, rel=0.1)


def test_steps_with_the_same_requests_say_nothing_of_others() -> None:
    model = StepModel()
    for noise in (0.99, 1.0, 1.01):
        model.observe(8, 0.02 * noise)
    assert model.request_s == 0
    assert model.step_s(100) == pytest.approx(0.02, rel=0.02)


def test_neither_part_of_a_step_is_negative() -> None:
    falling, steep = StepModel(lambda: 0.0), StepModel(lambda: 0.0)
    for requests in range(1, 30):
        falling.observe(requests, 0.1 / requests)
        steep.observe(requests, 0.001 * requests * requests)
    assert falling.request_s == 0
    assert falling.base_s > 0
    assert steep.base_s == 0
    assert steep.request_s > 0


def test_a_worker_that_became_slower_is_noticed() -> None:
    model = StepModel()
    for slowness in (1.0, 3.0):
        for number in range(400):
            requests = 1 + number % 40
            model.observe(requests, slowness * (0.01 + 0.001 * requests))
    assert model.step_s(20) == pytest.approx(0.09, rel=0.05)


def test_steps_of_a_slow_time_are_forgotten() -> None:
    """Where requests are refused for slow steps, none would show that they are fast again."""
    now = 0.0
    model = StepModel(lambda: now)
    for number in range(60):
        now += 1.0
        model.observe(1 + number % 3, 0.6 + 1e-5 * number)
    assert model.step_s(1) == pytest.approx(0.6, rel=0.01)
    last = (1 + 59 % 3, 0.6 + 1e-5 * 59)
    now += 8.0
    model.observe(*last)  # An idle worker repeats its last report.
    assert model.is_recent
    now += 8.0
    model.observe(*last)
    assert not model.is_recent
    assert model.step_s(1) > 0.5  # For who asks how many fit.
    now += 20.0
    for number in range(10):
        now += 1.0
        model.observe(1, 0.02 + 1e-5 * number)
    assert model.is_recent
    assert model.step_s(1) < 0.15


# Forecasts


class Fleet:
    """A prefill and a decode pool that tests set."""

    def __init__(self, num_prefill: int = 2, num_decode: int = 2, num_replicas: int = 1) -> None:
        self.prefill = pool([f"p{i}" for i in range(0)])
        self.prefill = pool("abcdef"[:num_prefill])
        self.decode = pool("uvwxyz"[:num_decode])
        self.pages = FleetPageIndex(1000)
        self.loads = [LoadEstimate() for _ in range(num_prefill)]
        for at, load in enumerate(self.loads):
            load.show_in(self.prefill, at)
            load.take_speed(Throughput(RATE))
        self.owners = [LoadEstimate() for _ in range(num_decode)]
        for at, load in enumerate(self.owners):
            load.show_in(self.decode, at)
            for requests in range(1, 20):
                load.take_speed(Throughput(0.0, 0.010 + 0.001 * requests, requests))
        self.forecaster = LatencyForecaster(
            lambda: IndexedPool(self.prefill, self.pages),
            lambda: IndexedPool(self.decode, None),
            num_replicas,
        )

    def queue(self, *tokens: int) -> None:
        for load, queued in zip(self.loads, tokens, strict=True):
            load.report(1, queued, queued)

    def busy(self, *requests: int) -> None:
        for load, count in zip(self.owners, requests, strict=True):
            load.report(count, 0, 0)


def test_a_prompt_that_is_computed_anew_is_computed_by_its_owner() -> None:
    """Whoever holds it, and however idle the prefill workers are."""
    plain = route([random.randrange(9) for _ in range(2000)])
    scored = replace(plain, is_computed_anew=True)
    fleet = Fleet()
    for load in fleet.owners:
        load.take_speed(Throughput(1000.0))
        load.report(1, 10_000, 10_000)
    member = fleet.prefill.workers[0]
    fleet.pages.add(member.worker_id, member.epoch, plain.page_keys(member).upto(400)[:400])
    assert fleet.forecaster.forecast(scored) == (pytest.approx(12.0), 2000)
    assert fleet.forecaster.forecast(plain).to_compute == 2000 - 400 * PAGE
    assert fleet.forecaster.spare_tokens(1.0) > 0
    assert fleet.forecaster.spare_tokens(1.0, is_by_owner=True) < 0

    policy, view = make_policy("cache_aware", PolicyOptions(spread_tokens=0)), pool("uvw")
    holder = view.workers[0]
    keys = plain.page_keys(holder).upto(400)[:400]
    policy.index.add(holder.worker_id, holder.epoch, keys)
    view.queued_tokens[:3] = (100, 0, 50)
    assert policy.choose(view, plain, 1) == [(0, 400 * PAGE)]
    assert policy.choose(view, scored, 1) == [(1, 0)]


def test_the_forecast_is_that_of_the_best_worker() -> None:
    rng = random.Random(5)
    for _ in range(100):
        fleet = Fleet(num_prefill=4)
        prompt = [rng.randrange(9) for _ in range(rng.randrange(2, 60))]
        request = route(prompt)
        times = []
        for at, load in enumerate(fleet.loads):
            queued, rate = rng.randrange(100), rng.choice([0.0, 500.0, 2000.0])
            load.report(0, queued, queued)
            load.take_speed(Throughput(rate))
            num_pages = rng.randrange((len(prompt) - 1) // PAGE + 1)
            member = fleet.prefill.workers[at]
            keys = request.page_keys(member).upto(num_pages)[:num_pages]
            fleet.pages.add(member.worker_id, member.epoch, keys)
            if rate:
                left = len(prompt) - num_pages * PAGE
                times.append(((queued + left) / rate, left))
        forecast = fleet.forecaster.forecast(request)
        if times:
            assert forecast.first_token_s == pytest.approx(min(times)[0])
            assert forecast.to_compute in {left for time, left in times if time == min(times)[0]}
        else:
            assert forecast == (None, len(prompt))


def test_decode_workers_compute_where_there_is_no_prefill_worker() -> None:
    fleet = Fleet(num_prefill=0)
    assert fleet.forecaster.forecast(route([1] * 50)).first_token_s is None
    for load in fleet.owners:
        load.take_speed(Throughput(100.0))
        load.report(1, 150, 150)
    assert fleet.forecaster.forecast(route([1] * 50)).first_token_s == pytest.approx(2.0)
    assert fleet.forecaster.backlog_s() == pytest.approx(1.5)


def test_spare_requests_are_those_that_keep_the_pace() -> None:
    fleet = Fleet()
    fleet.busy(3, 7)
    # A step with n requests takes 10 + n ms.
    assert fleet.forecaster.spare_requests(0.0205) == 7 + 3
    assert fleet.forecaster.spare_requests(0.0155) == 2 - 2
    assert fleet.forecaster.least_step_s() == pytest.approx(0.011, rel=0.01)


def test_replicas_share_what_is_spare() -> None:
    alone, shared = Fleet(), Fleet(num_replicas=4)
    for fleet in (alone, shared):
        fleet.queue(300, 100)
        fleet.busy(2, 2)
    assert alone.forecaster.spare_tokens(1.0) == pytest.approx(1600)
    assert shared.forecaster.spare_tokens(1.0) == pytest.approx(400)
    assert alone.forecaster.spare_requests(0.0205) == 16
    assert shared.forecaster.spare_requests(0.0205) == 4
    shared.loads[0].begin(150, 150)
    shared.owners[0].begin(150, 0)
    assert shared.forecaster.spare_tokens(1.0) == pytest.approx(250)
    assert shared.forecaster.spare_requests(0.0205) == 3


# The gate


def make(tokens: int, *, tenant: str = "", at: float = 0.0, **given: float) -> SloTicket:
    targets = Targets(given.get("first"), given.get("between"))
    return SloTicket(
        prompts=[route([1] * tokens)],
        arrival=at,
        targets=targets,
        tenant=tenant,
        weight=given.get("weight", 1.0),
        max_tokens=10,
    )


def begin(fleet: Fleet, gate: LatencyGate, ticket: SloTicket, worker: int = 0) -> None:
    fleet.loads[worker].begin(len(ticket.prompts[0].prompt_ids), ticket.to_compute)
    gate.began(ticket)


def test_without_targets_nothing_is_refused_or_held() -> None:
    fleet = Fleet()
    fleet.queue(10**7, 10**7)
    gate = LatencyGate(fleet.forecaster, 0.5, lambda: False)
    for _ in range(100):
        ticket = make(1000)
        assert gate.offer(ticket, 0.0)
        begin(fleet, gate, ticket)
    assert gate.num_held == 0


def test_a_target_that_would_be_missed_is_refused_at_once() -> None:
    fleet = Fleet()
    fleet.queue(5000, 3000)
    gate = LatencyGate(fleet.forecaster, 0.5, lambda: False)
    with pytest.raises(TargetUnattainable) as refused:
        gate.offer(make(1000, first=1.0), 0.0)
    # The better worker would have it after 4 s.
    assert refused.value.retry_after_s == pytest.approx(3.0)
    assert refused.value.http_status == 429
    assert isinstance(refused.value, Overloaded)
    assert refused.value.retryable
    assert gate.offer(make(1000, first=4.1), 0.0)


@pytest.mark.parametrize("granted", [None, 0.05])
def test_nobody_waits_for_a_pace_that_is_not_granted(granted: float | None) -> None:
    """A client may ask for any; it gets it if there is room, and holds nobody up."""
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 10.0)
    tight, other = make(10, between=0.012), make(10, tenant="other", between=0.05)
    tight.targets = tight.targets.over(Targets(between_tokens_s=granted))
    assert gate.offer(tight, 0.0), "idle workers manage that"
    begin(fleet, gate, tight)
    for _ in range(8):
        assert gate.offer(make(10, tenant="free"), 0.0), "others are not kept to that pace"
    fleet.busy(12, 12)
    again = make(10, between=0.012)
    again.targets = again.targets.over(Targets(between_tokens_s=granted))
    with pytest.raises(TargetUnattainable) as refused:
        gate.offer(again, 0.0)
    assert refused.value.retry_after_s
    assert gate.num_held == 0
    assert gate.offer(other, 0.0)


def test_unknown_rates_refuse_nobody() -> None:
    fleet = Fleet()
    for load in fleet.loads:
        load.take_speed(Throughput())
    gate = LatencyGate(fleet.forecaster, 0.5)
    assert gate.offer(make(10**5, first=0.01), 0.0)


def test_time_spent_before_the_gate_counts() -> None:
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.5)
    assert gate.offer(make(500, first=1.0, at=0.0), 0.4)
    with pytest.raises(TargetUnattainable):
        gate.offer(make(500, first=1.0, at=0.0), 0.6)


def test_what_is_behind_the_window_is_held_and_leaves_in_fair_turn() -> None:
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.5)
    sent = []
    for _ in range(30):
        ticket = make(400, tenant="flood")
        if gate.offer(ticket, 0.0):
            begin(fleet, gate, ticket, len(sent) % 2)
            sent.append(ticket)
    # Two workers, half a second of both: 1,000 tokens are let in, and what crosses the border.
    assert len(sent) == 3
    assert gate.num_held == 27
    quick = make(100, tenant="chat", first=2.0)
    assert not gate.offer(quick, 0.1)
    assert gate.release(0.2) == []
    now = 0.2
    left: list[SloTicket] = []
    while quick not in left:
        now += 0.4
        for at, ticket in enumerate(sent):  # all that was let in is computed
            fleet.loads[at % 2].computed(ticket.to_compute)
        sent = []
        for ticket, error in gate.release(now):
            assert error is None
            begin(fleet, gate, ticket, len(sent) % 2)
            sent.append(ticket)
        assert len(sent) in (3, 4)
        left += sent
    assert len(left) <= 4, "one or two of the flood's are before it, not all of them"


def test_a_wait_that_is_too_long_is_foreseen() -> None:
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.5)
    for _ in range(50):
        ticket = make(1000, tenant="a", first=100.0)
        if gate.offer(ticket, 0.0):
            begin(fleet, gate, ticket, 0)
    assert gate.num_held > 40
    with pytest.raises(TargetUnattainable) as refused:
        gate.offer(make(100, tenant="a", first=5.0), 0.0)
    assert refused.value.retry_after_s is not None
    assert 10 < refused.value.retry_after_s < 30
    assert not gate.offer(make(100, tenant="b", first=5.0), 0.0), "another tenant is not behind it"


def test_held_requests_are_refused_once_they_cannot_make_it() -> None:
    fleet = Fleet()
    fleet.queue(600, 600)
    gate = LatencyGate(fleet.forecaster, 0.5)
    ticket = make(100, first=2.0)
    assert not gate.offer(ticket, 0.0)
    fleet.queue(2500, 2500)
    assert gate.release(1.0) == []
    ((late, error),) = gate.release(1.5)
    assert late is ticket
    assert isinstance(error, TargetUnattainable)
    assert gate.num_held == 0


def test_nobody_is_held_for_ever_when_targets_go() -> None:
    fleet = Fleet()
    fleet.queue(10_000, 10_000)
    is_holding = True
    gate = LatencyGate(fleet.forecaster, 0.5, lambda: is_holding)
    tickets = [make(100) for _ in range(5)]
    assert not any(gate.offer(ticket, 0.0) for ticket in tickets)
    gate.withdraw(tickets.pop(2))
    is_holding = False
    assert [ticket for ticket, _ in gate.release(1.0)] == tickets
    assert gate.num_held == 0


def test_running_requests_keep_their_pace() -> None:
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.5)
    paced = make(10, between=0.0205, tenant="chat")
    assert gate.offer(paced, 0.0)
    gate.began(paced)
    fleet.busy(9, 9)  # 19 ms, and 19.5 ms are planned for
    other = make(10, tenant="flood")
    assert not gate.offer(other, 0.0)
    fleet.busy(8, 9)
    assert [ticket for ticket, _ in gate.release(0.1)] == [other]
    gate.began(other)
    fleet.busy(9, 9)
    last = make(10, tenant="flood")
    assert not gate.offer(last, 0.2)
    gate.ended(paced, 0.1, 10)
    assert [ticket for ticket, _ in gate.release(0.3)] == [last]


def test_a_pace_that_no_worker_has_is_refused() -> None:
    gate = LatencyGate(Fleet().forecaster, 0.5)
    with pytest.raises(TargetUnattainable, match="at best"):
        gate.offer(make(10, between=0.005), 0.0)


def test_forecasts_that_were_wrong_are_learned_from() -> None:
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.5)
    for number in range(100):
        ticket = make(100, at=float(number))
        assert gate.offer(ticket, float(number))
        gate.ended(ticket, number + 0.1 + 0.3, 5)  # 0.3 s later than forecast
    assert gate.bias_s == pytest.approx(0.3, rel=0.05)
    with pytest.raises(TargetUnattainable):
        gate.offer(make(100, first=0.35, at=200.0), 200.0)
    assert gate.offer(make(100, first=0.45, at=200.0), 200.0)


def test_one_stall_does_not_refuse_everybody_for_ever() -> None:
    """All requests have a target: refused ones cannot show that workers are well again."""
    gate = LatencyGate(Fleet().forecaster, 0.5)
    for _ in range(40):
        ticket = make(100)
        assert gate.offer(ticket, 0.0)
        gate.ended(ticket, 60.0, 5)
    with pytest.raises(TargetUnattainable):
        gate.offer(make(100, first=1.0, at=61.0), 61.0)
    taken = 0
    for second in range(62, 62 + 300):
        now = float(second)
        ticket = make(100, first=1.0, at=now)
        try:
            assert gate.offer(ticket, now)
        except TargetUnattainable:
            continue
        gate.ended(ticket, now + 0.1, 5)
        taken += 1
    assert taken > 150


def test_without_a_decode_worker_nobody_is_held_for_their_pace() -> None:
    gate = LatencyGate(Fleet(num_decode=0).forecaster, 0.5)
    assert gate.offer(make(10, between=0.05), 0.0), "routing says that there is nobody"
    assert gate.offer(make(10), 0.0)


def test_a_refusal_of_a_held_request_tells_a_time_over_its_target() -> None:
    fleet = Fleet()
    fleet.queue(600, 600)
    gate = LatencyGate(fleet.forecaster, 0.5)
    assert not gate.offer(make(100, first=2.0), 0.0)
    fleet.queue(2500, 2500)
    ((_, error),) = gate.release(1.5)
    assert error is not None
    # 1.5 s held, and 0.7 s for what was queued then and its own prompt.
    assert "after about 2.20 s" in error.message


@pytest.mark.parametrize("seed", range(5))
def test_every_request_leaves_once_and_no_promise_is_left(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet()
    gate = LatencyGate(fleet.forecaster, 0.3)
    inside: list[SloTicket] = []
    held: set[SloTicket] = set()
    now, gone = 0.0, 0
    for offered in range(1, 401):
        now += rng.uniform(0, 0.05)
        fleet.queue(rng.randrange(900), rng.randrange(900))
        fleet.busy(rng.randrange(12), rng.randrange(12))
        given = {
            name: rng.choice(choices)
            for name, choices in (("first", [0.5, 3.0]), ("between", [0.015, 0.03]))
            if rng.random() < 0.4
        }
        ticket = make(rng.randrange(1, 500), tenant=rng.choice("abc"), at=now, **given)
        try:
            if gate.offer(ticket, now):
                inside.append(ticket)
            else:
                held.add(ticket)
        except TargetUnattainable:
            gone += 1
        for left, error in gate.release(now):
            held.remove(left)
            if error is None:
                inside.append(left)
            else:
                gone += 1
        if held and rng.random() < 0.1:
            ticket = rng.choice(sorted(held, key=lambda one: one.arrival))
            held.remove(ticket)
            gate.withdraw(ticket)
            gone += 1
        while inside and rng.random() < 0.6:
            ticket = inside.pop(rng.randrange(len(inside)))
            if rng.random() < 0.8:
                gate.began(ticket)
            gate.ended(ticket, now, rng.randrange(20))
            gone += 1
        assert gate.num_held == len(held)
        assert offered == gone + len(inside) + len(held)
    for ticket in inside:
        gate.ended(ticket, None, 0)
    assert (gate._num_sending, gate._tokens_sending) == (0, 0)
    assert not gate._paces


# Targets


@pytest.mark.parametrize(
    ("targets", "first_s", "between_s", "outcome"),
    [
        (Targets(1.0, 0.02), 0.9, 0.019, "met"),
        (Targets(1.0, 0.02), 1.1, 0.019, "late_first_token"),
        (Targets(1.0, 0.02), None, None, "late_first_token"),
        (Targets(1.0, 0.02), 0.9, 0.021, "slow_tokens"),
        (Targets(1.0, 0.02), 0.9, None, "met"),
        (Targets(None, 0.02), 99.0, 0.01, "met"),
        (Targets(1.0), 0.9, 9.0, "met"),
    ],
)
def test_outcomes(
    targets: Targets, first_s: float | None, between_s: float | None, outcome: str
) -> None:
    assert targets.outcome(first_s, between_s) == outcome


def test_a_requests_own_targets_come_before_its_tenants() -> None:
    assert Targets(1.0).over(Targets(2.0, 3.0)) == Targets(1.0, 3.0)
    assert not NO_TARGETS
    assert Targets(None, 1.0)


# Routing


def test_cache_aware_passes_over_who_would_be_late() -> None:
    """The worker that holds the prompt is busy; another one computes it and is in time."""
    policy = make_policy("cache_aware", PolicyOptions(spread_tokens=0))
    view: PoolView = pool("ab", queued=[900, 0])
    view.tokens_per_s[:] = RATE
    prompt = [3] * (50 * PAGE + 1)
    held = route(prompt).page_keys(view.workers[0]).upto(50)
    assert policy.index is not None
    policy.index.add("a", 1, held)

    def chosen(target_s: float | None) -> Sequence[int]:
        request = route(prompt)
        object.__setattr__(request, "first_token_s", target_s)
        return [choice.position for choice in policy.choose(view, request, 2)]

    assert chosen(None) == [0, 1]
    assert chosen(2.0) == [0, 1]
    assert chosen(0.5) == [1, 0]
    assert chosen(0.01) == [0, 1], "neither is in time"
    view.tokens_per_s[:] = 0
    assert chosen(0.5) == [0, 1]
    assert math.isfinite(view.queued_tokens.sum())


# What operators are shown


@pytest.mark.parametrize("is_holding", [False, True])
def test_status_shows_what_admission_forecasts(is_holding: bool) -> None:
    """The same figure, to the digit, with which `offer` refuses a short prompt."""
    rng = random.Random()
    for _ in range(50):
        fleet = Fleet(num_prefill=rng.choice([0, 3]))
        for load in fleet.loads or fleet.owners:
            load.take_speed(Throughput(rng.uniform(50.0, 2000.0)))
            load.report(1, queued := rng.randrange(4000), queued)
        gate = LatencyGate(fleet.forecaster, rng.uniform(0.1, 2.0), lambda: is_holding)
        gate.bias_s = rng.uniform(-0.5, 2.0)
        now = rng.uniform(0.0, 100.0)
        for number in range(rng.randrange(4)):
            ticket = SloTicket(
                prompts=(route([3] * rng.randrange(1, 900)),), arrival=now, tenant=f"t{number}"
            )
            gate.offer(ticket, now)
        later = now + rng.uniform(0.0, 30.0)
        shown = gate.first_token_s(later)
        assert shown is not None
        assert shown == gate.first_token_s(later)
        short = route([rng.randrange(9) for _ in range(SHORT_PROMPT_TOKENS)])
        refused = SloTicket(
            prompts=(short,), arrival=later, targets=Targets(shown - 1e-6, None), tenant="new"
        )
        with pytest.raises(TargetUnattainable, match=f"after about {shown:.2f} s"):
            gate.offer(refused, later)
        taken = replace(refused, targets=Targets(shown + 1e-6, None))
        gate.offer(taken, later)


def test_prompts_that_wait_are_in_the_forecast_that_status_shows() -> None:
    """Eight prompts before a busy worker: the next one waits for them, and for itself."""
    fleet = Fleet(num_prefill=0, num_decode=1)
    fleet.owners[0].take_speed(Throughput(200.0))
    fleet.owners[0].report(8, 0, 0)
    gate = LatencyGate(fleet.forecaster, 1.0, lambda: False)
    assert gate.first_token_s(0.0) == pytest.approx(SHORT_PROMPT_TOKENS / 200.0)
    fleet.owners[0].report(8, 300, 300)
    assert gate.first_token_s(0.0) == pytest.approx((300 + SHORT_PROMPT_TOKENS) / 200.0)
