"""Each complaint about autoscalers as a case, in virtual time where nothing else is said.

dynamo#10528, #8861            test_refused_requests_are_demand
dynamo#11624                   test_the_rate_decides_and_no_single_request
dynamo#9294                    test_fewer_only_if_fewer_would_do
dynamo#4420, #13238            test_an_order_of_somebody_else_..., test_somebody_elses_change_...;
                               tests/k8s/test_scaling.py, at a real kube-apiserver
llm-d#2310                     test_a_change_without_effect_is_told, test_no_news_change_...;
                               a role is declared once: tests/k8s/test_components.py,
                               test_keda_asks_the_planner_for_each_role
llm-d-router#2547              test_observe.py, test_a_worker_without_news_is_missing_and_no_more;
                               tests/services/gateway/test_gateway_faults.py,
                               test_a_silent_worker_is_dead_within_its_bound
llm-d-autoscaling#1249         test_the_fullest_worker_counts
agentgateway#3473              tests/k8s/test_envoy.py, test_a_proxy_that_fails_open_..., and
                               test_edges_and_pickers_go_and_come_back where it fails closed;
                               tests/services/planner, test_keda_asks_a_planner: no plan, no number
vllm#56133                     tests/unit/workers/test_worker_role.py, test_only_new_work_...;
                               tests/mesh/operations/test_roles.py: a role is proved by its work
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from weft.planner.forecast import Counts, Speed, Targets
from weft.planner.policy import ModelPlanner, Observation, Plan, Rules
from weft.planner.recent import Lengths
from weft.planner.replay.fleet import Fleet
from weft.planner.replay.replay import INTERVAL_S, replay
from weft.planner.replay.traces import Arrival, made_day

SPEED = Speed(prefill_tokens_per_s=2500.0, step_base_s=0.015, step_request_s=0.0012)
TARGETS = Targets(first_token_s=3.0, inter_token_s=0.05, is_enforced=True)
SIZES = ((1000.0, 0.8), (3000.0, 0.2))


class Told:
    """A mesh that tells a planner of steady arrivals."""

    def __init__(self, prefill: int = 2, decode: int = 1, rules: Rules | None = None) -> None:
        self.planner = ModelPlanner(TARGETS, rules or Rules())
        self.now_s = 0.0
        self.seen = Observation(
            time_s=0.0,
            requests=0,
            lengths=(Lengths(sizes=SIZES, output_tokens=150.0),),
            queued_tokens=0.0,
            prefill=prefill,
            decode=decode,
            ready=prefill + decode,
            speed=SPEED,
        )
        self.plan: Plan

    def run(
        self, span_s: float, requests_per_s: float, *, obeys: bool = True, **now: float
    ) -> Plan:
        for _ in range(int(span_s / INTERVAL_S)):
            self.now_s += INTERVAL_S
            arrived = self.seen.requests + round(requests_per_s * INTERVAL_S)
            self.seen = replace(self.seen, time_s=self.now_s, requests=arrived, **now)  # type: ignore[arg-type]
            self.plan = self.planner.decide(self.now_s, self.seen)
            if obeys:
                self.seen = replace(self.seen, prefill=self.plan.prefill, decode=self.plan.decode)
        return self.plan

    def lengths(self, sizes: tuple[tuple[float, float], ...], output_tokens: float) -> None:
        """Requests have these lengths from now on."""
        lengths = Lengths(sizes=sizes, output_tokens=output_tokens)
        self.seen = replace(self.seen, lengths=(lengths,))

    def alarms(self) -> set[str]:
        return {alarm.name for alarm in self.plan.alarms}


def test_refused_requests_are_demand() -> None:
    """dynamo#10528, #8861: what is counted where answers leave shows no overload."""
    day = [Arrival(0.1 * number, 2000, 150) for number in range(3000)]
    outcome = replay(day, SPEED, TARGETS, first=(1, 1), start_s=30.0)
    (first, *_) = outcome.changes
    # One worker serves 1.25 of the 10 requests a second, and refuses the others.
    assert first.time_s <= 30.0
    assert outcome.changes[-1].prefill >= 8
    late = outcome.tally.refused / outcome.tally.requests
    assert late < 0.2


def test_the_rate_decides_and_no_single_request() -> None:
    """dynamo#11624: a floor by one request's first token never falls."""
    told = Told(prefill=6, decode=1)
    with_giant = ((1000.0, 0.999), (1_000_000.0, 0.001))
    told.lengths(with_giant, 150.0)
    assert told.run(600, 1.0).prefill < 6


def test_fewer_only_if_fewer_would_do() -> None:
    """dynamo#9294: 2 <-> 1."""
    for rate in (0.8, 1.6, 2.4):
        told = Told(prefill=1, decode=1)
        told.run(900, rate)
        settled = told.planner.num_changes
        told.run(900, rate)
        assert told.planner.num_changes == settled, rate


def test_steady_load_changes_nothing_in_an_hour() -> None:
    day = made_day("steady", requests_per_s=3.0, hours=1.4)
    outcome = replay(day, SPEED, TARGETS, first=(3, 2))
    late = [change for change in outcome.changes if change.time_s > 0.4 * 3600]
    assert late == []
    assert outcome.tally.goodput > 0.95


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "rate"),
    [(1001, 5.438), (1008, 2.3729), (1014, 2.3426), (1020, 0.7008), (1022, 0.7435)],
)
def test_steady_load_near_a_border_is_accepted(seed: int, rate: float) -> None:
    """Days on which a planner that looks for ever changes numbers in the second hour or later."""
    day = made_day("steady", requests_per_s=rate, hours=2.5, seed=seed)
    outcome = replay(day, SPEED, TARGETS, first=(3, 2))
    assert [change for change in outcome.changes if change.time_s > 0.5 * 3600] == []
    assert outcome.tally.goodput > 0.95


def test_somebody_elses_change_is_told_and_not_fought() -> None:
    """dynamo#4420, #13238."""
    told = Told(prefill=2, decode=1)
    told.run(600, 1.0)
    assert told.alarms() == set()
    told.seen = replace(told.seen, prefill=told.seen.prefill + 3)
    told.run(INTERVAL_S, 1.0)
    assert told.alarms() == {"foreign_edit"}
    before = told.seen.prefill
    told.run(60, 1.0)
    assert told.seen.prefill == before
    # What is not needed goes in time.
    assert told.run(600, 1.0).prefill < before


def test_an_order_of_somebody_else_is_told_although_no_worker_has_moved() -> None:
    """dynamo#4420: somebody edits the replicas."""
    told = Told(prefill=2, decode=1)
    plan = told.run(600, 1.0)
    own = Counts(plan.prefill, plan.decode)
    told.seen = replace(told.seen, ordered=own, own_order=own)
    told.run(INTERVAL_S, 1.0)
    assert told.alarms() == set()
    edited = Counts(plan.prefill + 2, plan.decode)
    told.seen = replace(told.seen, ordered=edited)
    told.run(INTERVAL_S, 1.0)
    assert told.alarms() == {"foreign_edit"}
    # Plans go on from it.
    assert Counts(told.plan.prefill, told.plan.decode) == edited
    told.seen = replace(told.seen, own_order=edited)
    told.run(INTERVAL_S, 1.0)
    assert told.alarms() == set()


def test_a_planner_that_acts_next_goes_on_from_what_is_ordered() -> None:
    told = Told(prefill=1, decode=1)
    told.seen = replace(told.seen, ordered=Counts(1, 1))
    told.run(300, 0.5, obeys=False)
    told.seen = replace(told.seen, ordered=Counts(3, 1))
    told.run(INTERVAL_S, 0.5, obeys=False)
    assert (told.plan.prefill, told.plan.decode) == (3, 1)
    # It has its own mind in time.
    told.run(600, 0.5, obeys=False)
    assert told.plan.prefill == 1


def test_a_worker_that_dies_is_wanted_again() -> None:
    """It is no edit, and nobody should get used to its absence."""
    told = Told(prefill=2, decode=2)
    plan = told.run(600, 4.0)
    assert plan.prefill > 1
    told.seen = replace(told.seen, prefill=plan.prefill - 1)
    told.run(300, 4.0, obeys=False)
    assert told.plan.prefill >= plan.prefill
    assert told.alarms() == set()
    told.run(600, 4.0, obeys=False)
    assert told.alarms() == {"no_effect"}


def test_workers_that_start_late_are_no_edit() -> None:
    told = Told(prefill=1, decode=1)
    told.run(30, 6.0, obeys=False)
    most = told.run(60, 6.0, obeys=False).prefill
    assert most > 1
    # Load goes before they come.
    for _ in range(4):
        told.run(60, 0.2, obeys=False)
    told.seen = replace(told.seen, prefill=most)
    told.run(INTERVAL_S, 0.2, obeys=False)
    assert "foreign_edit" not in told.alarms()


def test_a_change_without_effect_is_told() -> None:
    """llm-d#2310: inert, and all is green."""
    told = Told(prefill=1, decode=1)
    told.run(300, 6.0, obeys=False)
    assert "no_effect" not in told.alarms()
    assert told.plan.prefill > 1
    told.run(900, 6.0, obeys=False)
    assert "no_effect" in told.alarms()
    # Wishes that change do not put it off.
    for rate in (7.0, 8.0, 9.0, 10.0):
        told.run(240, rate, obeys=False)
        assert "no_effect" in told.alarms()


def test_no_news_change_nothing_and_are_told() -> None:
    told = Told(prefill=2, decode=1)
    plan = told.run(600, 1.0)
    told.plan = told.planner.decide(told.now_s + 3600, told.seen)
    assert told.alarms() == {"no_data"}
    assert (told.plan.prefill, told.plan.decode) == (plan.prefill, plan.decode)
    fresh = ModelPlanner(TARGETS)
    assert [alarm.name for alarm in fresh.decide(0.0, None).alarms] == ["no_data"]
    slow = replace(told.seen, speed=replace(SPEED, prefill_tokens_per_s=0.0))
    assert [one.name for one in fresh.decide(told.now_s, slow).alarms] == ["no_data"]


def test_the_fullest_worker_counts() -> None:
    """llm-d-autoscaling#1249: on average 11 % full, one 95 %."""
    told = Told()
    told.run(60, 1.0, worst_share=0.95, mean_share=0.11)
    assert told.alarms() == {"uneven"}


def test_a_budget_is_kept_and_told() -> None:
    told = Told(rules=Rules(budget=4))
    plan = told.run(600, 20.0)
    assert plan.total == 4
    assert plan.decode >= 1
    assert "over_budget" in told.alarms()


def test_roles_change_before_workers_start() -> None:
    """Prompts become short and answers long."""
    told = Told(prefill=1, decode=1)
    told.lengths(((3000.0, 1.0),), 50.0)
    told.run(600, 6.0)
    told.lengths(((300.0, 1.0),), 50.0)
    before = told.run(90, 6.0)
    told.lengths(((300.0, 1.0),), 400.0)
    after = told.run(INTERVAL_S, 6.0)
    assert after.decode > before.decode
    assert after.total == before.total


def of_both_roles(told: Told) -> None:
    """Roles follow the plan, as the roles' actuator sets them."""
    total, plan = told.seen.able, told.plan
    prefill = min(plan.prefill, total - 1) if plan.apart else 0
    both = 0 if plan.apart else total
    told.seen = replace(told.seen, prefill=prefill, decode=total - prefill, both=both)


def test_workers_get_a_role_each_once_that_surely_suffices_and_not_again_after_a_doubt() -> None:
    told = Told(prefill=0, decode=3)
    told.seen = replace(told.seen, able=3, both=3)
    apart: list[bool] = []

    def run(span_s: float, requests_per_s: float) -> Plan:
        for _ in range(int(span_s / INTERVAL_S)):
            told.run(INTERVAL_S, requests_per_s, obeys=False)
            apart.append(told.plan.apart)
            of_both_roles(told)
        return told.plan

    assert not run(60, 0.4).apart, "it is not sure yet"
    assert run(120, 0.4).apart
    assert (told.seen.prefill, told.seen.decode) == (1, 2)
    # More comes than two prefill workers could surely take: at once all do whatever comes.
    assert not run(2 * INTERVAL_S, 2.4).apart
    assert "might not suffice" in told.plan.why
    assert not run(1800, 0.4).apart
    assert run(3600, 0.4).apart
    assert apart.count(True) < len(apart) / 2
    assert not any(alarm.name == "foreign_edit" for alarm in told.plan.alarms)


def test_more_workers_of_both_roles_than_are_wanted_are_no_alarm() -> None:
    told = Told(prefill=0, decode=4)
    told.seen = replace(told.seen, able=4, both=4)
    for _ in range(300):
        told.run(INTERVAL_S, 0.4, obeys=False)
        of_both_roles(told)
        assert not told.plan.alarms
    assert told.plan.total < 4


def test_workers_of_one_role_are_always_apart() -> None:
    assert Told().run(60, 50.0).apart


def test_a_restarted_gateway_counts_anew() -> None:
    told = Told(prefill=3, decode=1)
    plan = told.run(600, 3.0)
    told.seen = replace(told.seen, requests=0)
    again = told.run(60, 3.0)
    assert (again.prefill, again.decode) == (plan.prefill, plan.decode)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3)])
def test_a_fleet_keeps_its_running_requests_when_numbers_change(prefill: int, decode: int) -> None:
    fleet = Fleet(SPEED, TARGETS, 2, 2, switch_s=1.0)
    for number in range(40):
        fleet.offer(Arrival(number * 0.5, 500, 40))
    fleet.change(prefill, decode)
    fleet.run_until(60.0)
    assert (fleet.prefill, fleet.decode) == (prefill, decode)
    assert fleet.tally.good + fleet.tally.slow == 40
