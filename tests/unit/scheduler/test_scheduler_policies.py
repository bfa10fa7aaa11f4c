"""Who is admitted next, who is pre-empted, and who waits for whose pages."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from weft.engine.base.config import PolicyName
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.scheduler.estimate import DECAY, MAX_EXPECTED_TOKENS
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.policies.fair import MAX_IDLE_TENANTS, FairQueue
from weft.engine.scheduler.policies.longest_prefix import MAX_LOOK_UPS, WINDOW
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.scheduling.scheduler_bench import PAGE, Bench

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
ONE_AT_A_TIME = SchedulerLimits(PAGE, 64, 64, 1)


def order(bench: Bench) -> list[Request]:
    """Candidates for admission now."""
    return list(bench.scheduler.waiting.candidates(bench.now))


def test_fcfs_serves_in_the_order_of_submission() -> None:
    bench = Bench(random.Random(1), 100, ONE_AT_A_TIME)
    requests = [bench.add(5, 2, priority=-number, tenant=str(number)) for number in range(5)]
    bench.run(*requests)
    assert bench.finished == requests


def test_priority_serves_the_most_urgent_first_and_equal_ones_in_order() -> None:
    bench = Bench(random.Random(1), 100, ONE_AT_A_TIME, "priority", ageing_s=1e6)
    a, b, c, d = (bench.add(5, 2, priority=priority) for priority in (3, 0, 3, -2))
    bench.run(a, b, c, d)
    assert bench.finished == [d, b, a, c]


def test_a_level_of_priority_is_worth_its_seconds_of_waiting() -> None:
    bench = Bench(random.Random(1), 100, ONE_AT_A_TIME, "priority", ageing_s=10.0)
    old = bench.add(5, 2, priority=2)
    bench.now += 19.0
    urgent = bench.add(5, 2, priority=0)
    assert order(bench) == [urgent, old]
    bench.now += 2.0
    late = bench.add(5, 2, priority=0)
    assert order(bench) == [urgent, old, late]


def test_shortest_remaining_counts_what_is_to_be_computed() -> None:
    bench = Bench(random.Random(1), 200, ONE_AT_A_TIME, "shortest_remaining", ageing_s=1e6)
    known = bench.add(40, 2)
    bench.run(known)
    long, short = bench.add(40, 2), bench.add(8, 2)
    cached = bench.add(42, 2, prefix=known.tokens[:40])
    assert order(bench) == [cached, short, long]
    bench.run(long, short, cached)
    assert bench.finished[1:] == [cached, short, long]


def test_waiting_makes_up_for_the_length_of_a_prompt() -> None:
    """64 tokens are a full step: a prompt of 48 more is overtaken for 7.5 s at 10 s each."""
    bench = Bench(random.Random(1), 200, ONE_AT_A_TIME, "shortest_remaining", ageing_s=10.0)
    long = bench.add(56, 2)
    bench.now += 7.0
    early = bench.add(8, 2)
    bench.now += 1.0
    late = bench.add(8, 2)
    assert order(bench) == [early, long, late]


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    limits = SchedulerLimits(PAGE, 16, 8, 4)
    bench = Bench(random.Random(1), 200, limits, "shortest_remaining", ageing_s=1e6)
    long = bench.add(120, 1)
    bench.step()
    short = bench.add(24, 1)
    bench.run(short)
    assert long.state is State.PREFILLING
    bench.run(long)


@pytest.mark.parametrize(
    "limits",
    [SchedulerLimits(PAGE, 16, 16, 4), SchedulerLimits(PAGE, 32, 16, 4, shared_step_tokens=8)],
)
@pytest.mark.parametrize("policy", ["fcfs", "shortest_remaining", "priority"])
def test_a_long_prompt_that_fills_every_step_is_overtaken_by_what_goes_before_it(
    limits: SchedulerLimits, policy: PolicyName
) -> None:
    bench = Bench(random.Random(1), 400, limits, policy, ageing_s=1e6)
    long = bench.add(160, 1, priority=1)
    bench.step()
    later = bench.add(200, 1, priority=2)
    short, other = bench.add(24, 1), bench.add(24, 1)
    bench.run(long, later, short, other)
    wanted = [short, other, long, later]
    if policy == "fcfs":
        wanted = [long, later, short, other]
    assert bench.finished == wanted


@pytest.mark.parametrize("policy", ["shortest_remaining", "priority"])
def test_prompts_admitted_ahead_of_a_long_one_leave_slots_for_an_urgent_one(
    policy: PolicyName,
) -> None:
    """A step takes only 8 tokens of prompts, so prompts that were admitted hold slots for long."""
    step_tokens, num_slots, num_short = 64, 24, 32
    limits = SchedulerLimits(PAGE, step_tokens, step_tokens, num_slots)
    rng = random.Random()
    bench = Bench(rng, 20_000, limits, policy, ageing_s=1e6, prompt_budget=lambda *_, **__: 8)
    running = bench.add(4, 400)
    while running.state is not State.RUNNING:
        bench.step()
    long = bench.add(800, 1, priority=10)
    bench.step()
    for _ in range(60):
        bench.add(num_short, 300, priority=5)
    for _ in range(rng.randint(1, 30)):
        bench.step()
        ahead = [r.num_pending for r in bench.scheduler.prefilling if r is not long]
        # One is admitted while the others have less than a step to compute, so it may exceed that.
        assert 0 < sum(ahead) < step_tokens + num_short
    assert long.state is State.PREFILLING
    urgent = bench.add(8, 1, priority=0)
    bench.run(urgent, max_steps=3)


@pytest.mark.parametrize("policy", ["shortest_remaining", "priority"])
def test_a_long_prompt_under_way_is_not_overtaken_for_ever(policy: PolicyName) -> None:
    """Whatever comes more than its length, or its level, later in seconds goes behind it."""
    limits = SchedulerLimits(PAGE, 16, 16, 4)
    bench = Bench(random.Random(1), 400, limits, policy, ageing_s=1.0)
    long = bench.add(160, 1, priority=10)
    bench.step()
    for _ in range(60):
        if long.state is State.FINISHED:
            break
        bench.add(16, 1)
        bench.now += 1.0
        bench.step()
    assert long.state is State.FINISHED


def test_fair_serves_the_tenant_that_had_least() -> None:
    """A flood of one tenant costs another one no more than the request under way."""
    bench = Bench(random.Random(1), 400, ONE_AT_A_TIME, "fair")
    flood = [bench.add(40, 10, tenant="flood") for _ in range(20)]
    bench.step()
    quiet = [bench.add(40, 10, tenant="quiet") for _ in range(4)]
    bench.run(*quiet)
    served = [request for request in flood if request.state is State.FINISHED]
    assert len(served) <= len(quiet) + 1
    bench.run(*flood)


def test_fair_counts_generated_tokens_and_saves_up_nothing_for_who_was_away() -> None:
    bench = Bench(random.Random(1), 400, ONE_AT_A_TIME, "fair")
    # Short prompts, long answers, against long prompts and short answers: 2 x 30 = 8 + 52.
    writer = [bench.add(4, 30, tenant="writer") for _ in range(12)]
    reader = [bench.add(60, 2, tenant="reader") for _ in range(12)]
    while len(bench.finished) < 12:
        bench.step()
    counts = [sum(r in bench.finished for r in group) for group in (writer, reader)]
    assert abs(counts[0] - counts[1]) <= 1, counts
    late = [bench.add(60, 2, tenant="late") for _ in range(4)]
    bench.run(*late)
    others = len(bench.finished) - 12 - len(late)
    assert others >= 2 * (len(late) - 2), "who was away does not get ahead of the others"
    bench.run(*writer, *reader)


def test_fair_forgets_tenants_that_never_come_back_and_not_who_had_much() -> None:
    queue = FairQueue()

    def request_of(tenant: str, num_tokens: int) -> Request:
        key, tokens = RequestKey(0, tenant, 1), [0] * num_tokens
        return bare_request(
            tokens, PAGE, bytes(32), key=key, num_prompt_tokens=num_tokens, tenant=tenant
        )

    def serve(tenant: str, num_tokens: int) -> None:
        request = request_of(tenant, num_tokens)
        queue.add(request)
        queue.remove(request)
        queue.on_admitted(request)
        queue.on_ended(request)

    serve("much", 200)
    for number in range(3 * MAX_IDLE_TENANTS):
        serve(f"once {number}", 20)
    assert len(queue._tenants) <= MAX_IDLE_TENANTS
    waiting = [request_of(name, 20) for name in ("much", "new")]
    for request in waiting:
        queue.add(request)
    assert list(queue) == [waiting[1], waiting[0]]


def test_longest_prefix_serves_what_is_cached_first() -> None:
    bench = Bench(random.Random(1), 100, ONE_AT_A_TIME, "longest_prefix", ageing_s=50.0)
    prefix = list(range(200, 220))
    bench.run(bench.add(20, 2, prefix=prefix))
    unknown = bench.add(20, 2)
    some = bench.add(20, 2, prefix=prefix[:9])
    most = bench.add(24, 2, prefix=prefix)
    bench.step()
    assert [most, some, unknown] == [most, *order(bench)]
    bench.run(unknown, some, most)
    assert bench.finished[1:] == [most, some, unknown]


def test_longest_prefix_looks_few_prompts_up_and_lets_nobody_starve() -> None:
    bench = Bench(random.Random(1), 100, ONE_AT_A_TIME, "longest_prefix", ageing_s=30.0)
    prefix = list(range(200, 220))
    bench.run(bench.add(20, 2, prefix=prefix))
    asked: list[Request] = []
    find = bench.scheduler.pages.num_cached_tokens
    bench.scheduler.waiting._num_cached_tokens = lambda r: asked.append(r) or find(r)  # type: ignore
    unlucky = bench.add(20, 2)
    for _ in range(WINDOW + 10):
        bench.add(24, 2, prefix=prefix)
    list(bench.scheduler.waiting.candidates(bench.now))
    assert len(asked) == MAX_LOOK_UPS
    began = bench.now
    bench.run(unlucky)
    assert bench.now - began <= 40.0


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_behind_a_stream_of_better_ones(policy: PolicyName) -> None:
    """One request, and ever more that are more urgent, of another tenant, or cached already."""
    is_urgent = policy == "priority"
    limits = SchedulerLimits(
        PAGE, 64, 64, 1, by_priority=is_urgent, preemption_threshold=3 if is_urgent else None
    )
    bench = Bench(random.Random(1), 200, limits, policy, ageing_s=20.0)
    prefix = list(range(200, 220))
    bench.run(bench.add(20, 2, prefix=prefix))
    patient = bench.add(30, 2, tenant="a", priority=2)
    for _ in range(300):
        bench.add(22, 2, tenant="b", priority=0, prefix=prefix)
        bench.step()
        if patient.state is State.FINISHED:
            return
    raise AssertionError("it starved")


def urgent_limits(max_running: int, threshold: int | None) -> SchedulerLimits:
    return SchedulerLimits(
        PAGE, 64, 64, max_running, by_priority=True, preemption_threshold=threshold
    )


@pytest.mark.parametrize("threshold", [None, 6, 5])
def test_a_running_request_makes_room_from_the_threshold_on(threshold: int | None) -> None:
    bench = Bench(random.Random(1), 100, urgent_limits(1, threshold), "priority", 1e6)
    running = bench.add(8, 50, priority=5)
    for _ in range(3):
        bench.step()
    urgent = bench.add(8, 3, priority=0)
    bench.run(urgent)
    assert running.timeline.num_preemptions == (threshold == 5)
    assert bench.scheduler.num_urgent_preemptions == (threshold == 5)
    bench.run(running)
    assert running.num_generated == 50


def test_who_would_come_back_at_once_makes_no_room() -> None:
    """Waiting has made the running one as urgent as the other."""
    bench = Bench(random.Random(1), 100, urgent_limits(1, 5), "priority", ageing_s=10.0)
    running = bench.add(8, 50, priority=8)
    bench.now += 81.0
    for _ in range(3):
        bench.step()
    urgent = bench.add(8, 3, priority=0)
    bench.run(running)
    assert running.timeline.num_preemptions == 0
    bench.run(urgent)


def test_the_least_urgent_make_room_and_no_more_of_them_than_needed() -> None:
    bench = Bench(random.Random(1), 31, urgent_limits(4, 2), "priority", 1e6)
    low, lower, same = (bench.add(20, 8, priority=priority) for priority in (3, 4, 1))
    while not (low.state is lower.state is same.state is State.RUNNING):
        bench.step()
    urgent = bench.add(60, 2, priority=0)
    while urgent.num_generated == 0:
        bench.step()
    assert lower.timeline.num_preemptions == 1
    assert low.timeline.num_preemptions <= 1
    assert same.timeline.num_preemptions == 0
    bench.run(low, lower, same, urgent)


def test_nobody_is_preempted_for_what_would_not_fit_all_the_same() -> None:
    bench = Bench(random.Random(1), 31, urgent_limits(4, 2), "priority", 1e6)
    same = bench.add(60, 20, priority=1)
    low = bench.add(4, 20, priority=5)
    bench.step()
    bench.step()
    bench.add(80, 2, priority=0)
    for _ in range(5):
        bench.step()
    assert low.timeline.num_preemptions == same.timeline.num_preemptions == 0


def test_pages_that_others_share_are_no_lost_work() -> None:
    """When pages end, the one with the fewest tokens of its own is pre-empted."""
    bench = Bench(random.Random(2), 27, SchedulerLimits(PAGE, 128, 128, 4))
    prefix = list(range(200, 240))
    first = bench.add(41, 30, prefix=prefix)
    bench.step()
    sharing = bench.add(42, 30, prefix=prefix)  # more tokens than `alone`, few of its own
    bench.step()
    alone = bench.add(30, 30)
    while not bench.scheduler.preempted:
        bench.step()
    assert bench.scheduler.preempted[0] in (first, sharing)
    assert alone.state is State.RUNNING
    bench.run(first, sharing, alone)


def test_the_second_of_two_prompts_waits_for_the_pages_of_the_first() -> None:
    bench = Bench(random.Random(3), 200, SchedulerLimits(PAGE, 64, 16, 8))
    prefix = list(range(200, 280))
    group = [bench.add(90, 3, prefix=prefix) for _ in range(6)]
    other = bench.add(30, 3)
    items = bench.step()
    assert [item.request for item in items] == [group[0], other], "who shares nothing goes on"
    bench.run(*group, other)
    own = 90 - 80
    assert bench.num_computed <= 90 + 5 * own + 30 + 7 * 3
    assert bench.scheduler.sharing.num_waits == 5
    assert [request.timeline.matched_tokens for request in group[1:]] == [80] * 5


def test_followers_go_on_when_their_leader_ends_early() -> None:
    bench = Bench(random.Random(3), 200, SchedulerLimits(PAGE, 64, 16, 8))
    prefix = list(range(200, 280))
    leader, follower, last = (bench.add(90, 3, prefix=prefix) for _ in range(3))
    bench.step()
    assert follower.sharing.leader is leader
    bench.scheduler.finish(leader)
    bench.step()
    assert follower.state is State.PREFILLING
    assert last.sharing.leader is follower
    bench.run(follower, last)
    assert follower.timeline.matched_tokens == 16


def test_short_common_beginnings_make_nobody_wait() -> None:
    bench = Bench(random.Random(3), 200, SchedulerLimits(PAGE, 64, 16, 8))
    requests = [bench.add(12, 3, prefix=[7] * (PAGE - 1)) for _ in range(3)]
    items = bench.step()
    assert [item.request for item in items] == requests


def test_the_estimate_of_new_tokens_grows_on_preemption_and_decays() -> None:
    bench = Bench(random.Random(4), 60, SchedulerLimits(PAGE, 256, 64, 16))
    estimate = bench.scheduler.estimate
    requests = [bench.add(12, 60) for _ in range(16)]
    bench.step()
    assert estimate.ratio == 0.0
    assert len(bench.scheduler.running) == 15  # 3 pages each, and one more for who is there
    before = 0.0
    while not bench.scheduler.num_preemptions:
        before = sum(r.num_generated for r in bench.scheduler.running) / (15 * 60)
        bench.step()
    assert before <= estimate.ratio <= 1.0
    bench.run(*requests)
    first_wave = bench.scheduler.num_preemptions
    estimate.ratio = 1.0
    more = [bench.add(12, 60) for _ in range(16)]
    bench.run(*more)
    assert bench.scheduler.num_preemptions == first_wave, "with the whole estimate none is needed"
    assert estimate.ratio == pytest.approx(DECAY**16)


def test_what_is_expected_of_one_request_is_bounded_and_a_lone_one_may_have_all() -> None:
    bench = Bench(random.Random(4), 20, SchedulerLimits(PAGE, 64, 64, 4))
    estimate = bench.scheduler.estimate
    estimate.ratio = 0.5
    greedy = bench.add(10, 10**6)
    assert estimate.expected_tokens([greedy]) == MAX_EXPECTED_TOKENS // 2
    bench.step()
    assert greedy.num_generated == 1
    small = bench.add(10, 2)
    bench.step()
    assert small.state is State.WAITING
    bench.scheduler.finish(greedy)
    bench.run(small)
