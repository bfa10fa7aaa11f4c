"""The scheduler under random loads: nothing starves, nothing leaks, budgets hold."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.contract.errors import DeadlineExceeded
from weft.contract.spans import MediaSpan
from weft.contract.timeline import FillCandidate, FillRecord
from weft.engine.base.config import PolicyName
from weft.engine.features.speculative.fixed_gate import FixedGate
from weft.engine.requests.request import LEGAL_EDGES, FillTask, Request, State
from weft.engine.scheduler.limits import SchedulerLimits, fitting_budget
from weft.engine.scheduler.running import Drafting
from weft.testing.scheduling.scheduler_bench import PAGE, Bench

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(16, 60),
    st.integers(1, 6),
    st.sampled_from(POLICIES),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_every_request_ends_whatever_the_load(
    seed: int,
    num_pages: int,
    max_running: int,
    policy: PolicyName,
    threshold: int | None,
    is_overlapped: bool,
) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(
        PAGE,
        max_running + rng.choice([1, 16]),
        rng.choice([4, 8, 16]),
        max_running,
        by_priority=policy == "priority",
        preemption_threshold=threshold if policy == "priority" else None,
        decodes_beside=rng.randrange(4),
    )
    bench = Bench(
        rng,
        num_pages,
        limits,
        policy,
        ageing_s=rng.choice([1.0, 100.0]),
        is_overlapped=is_overlapped,
        stop_chance=rng.choice([0.0, 0.1]),
    )
    requests = []
    for _ in range(rng.randint(1, 14)):
        requests.append(add_any(bench))
        for _ in range(rng.randint(0, 5)):
            bench.step()
        if rng.random() < 0.2:
            bench.scheduler.finish(rng.choice(requests))  # a cancel, perhaps of a finished one
    bench.run(*requests)
    assert len(bench.finished) == len(requests), "each ends exactly once"
    check_empty(bench)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(30, 60), st.integers(1, 4), st.booleans())
def test_no_chunk_ends_in_a_span_that_must_be_whole(
    seed: int, num_pages: int, max_running: int, is_overlapped: bool
) -> None:
    """Whatever the budgets, behind cached pages and fills that end within it. All requests end."""
    rng = random.Random(seed)
    most = rng.choice([8, 20])
    limits = SchedulerLimits(PAGE, most, rng.choice([4, 8]), max_running)
    bench = Bench(rng, num_pages, limits, is_overlapped=is_overlapped)
    requests = []
    for _ in range(rng.randint(1, 10)):
        spans, position = list[MediaSpan](), rng.randrange(9)
        for _ in range(rng.randrange(4)):
            span = MediaSpan(position=position, length=rng.randint(1, most), digest=bytes(32))
            spans.append(span)
            position = span.end + rng.choice([0, 1, 5, 20])
        stem = random.Random(STEM_SEED)
        prefix = [stem.randrange(100) for _ in range(rng.choice([0, 10, 20]))]
        length = position + rng.randint(0 if spans else 1, 6)
        remote = rng.random() < 0.5
        if length + 5 > bench.memory.num_usable_pages * PAGE:
            continue  # Engines refuse it.
        requests.append(
            bench.add(max(1, length), 5, remote=remote, prefix=prefix, uncut_spans=spans)
        )
        for _ in range(rng.randint(0, 4)):
            bench.step()
    bench.run(*requests)
    check_empty(bench)


STEM_SEED = 11


def add_any(bench: Bench) -> Request:
    """A random request that fits the pool; every other one shares a prefix with others."""
    rng = bench.rng
    capacity = bench.memory.num_usable_pages * PAGE
    num_prompt = rng.randint(1, capacity // 2)
    stem = random.Random(STEM_SEED)
    prefix = [stem.randrange(100) for _ in range(20)][: rng.randint(0, 20)]
    return bench.add(
        num_prompt,
        rng.randint(1, min(30, capacity - num_prompt)),
        remote=rng.random() < 0.5,
        prefix=prefix if rng.random() < 0.5 else [],
        priority=rng.randint(-3, 3),
        tenant=rng.choice(["", "a", "b"]),
    )


def check_empty(bench: Bench) -> None:
    counts = bench.memory.counts()
    assert counts.used == counts.quarantined == 0
    assert counts.free + counts.cached == counts.total
    assert bench.memory.num_available_pages == counts.total, "a promise was kept back"
    assert not any(bench.scheduler.sizes().values())


@pytest.mark.each_of("policy", "is_overlapped")
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_random_operations_leave_every_page_free_or_cached(
    policy: PolicyName, is_overlapped: bool
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    is_urgent = policy == "priority"
    limits = SchedulerLimits(
        PAGE, 24, 8, 6, by_priority=is_urgent, preemption_threshold=2 if is_urgent else None
    )
    bench = Bench(
        rng, 40, limits, policy, ageing_s=50.0, is_overlapped=is_overlapped, stop_chance=0.03
    )
    requests: list[Request] = []
    for _ in range(10_000):
        chance = rng.random()
        if chance < 0.2 and len(requests) < 20:
            requests.append(add_any(bench))
        elif chance < 0.24 and requests:
            bench.scheduler.finish(rng.choice(requests))
        elif chance < 0.25:
            bench.memory.flush_cache()
        else:
            bench.step()
        requests = [request for request in requests if request.state is not State.FINISHED]
    bench.run(*requests)
    check_empty(bench)
    assert bench.scheduler.num_preemptions
    assert bench.scheduler.sharing.num_waits
    assert bench.scheduler.pages.num_partial_hits
    assert bench.memory.num_evictions
    assert bool(bench.num_surplus) == is_overlapped


def test_a_step_feeds_running_requests_before_prompts() -> None:
    rng = random.Random(1)
    bench = Bench(rng, 100, SchedulerLimits(PAGE, 12, 8, 4))
    running = bench.add(3, 20)
    bench.step()
    bench.add(40, 1)
    for _ in range(4):
        before = running.num_generated
        bench.step()
        assert running.num_generated == before + 1


def test_who_loses_least_is_preempted_and_comes_back_first() -> None:
    bench = Bench(random.Random(2), 8, SchedulerLimits(PAGE, 64, 64, 4))
    old = bench.add(8, 19)
    young = bench.add(8, 19)
    while young.state is not State.PREEMPTED:
        bench.step()
    assert old.state is State.RUNNING
    late = bench.add(4, 1)
    assert next(bench.scheduler.waiting.candidates(0.0)) is young
    while not (old.state is young.state is late.state is State.FINISHED):
        bench.step()
    assert young.timeline.num_preemptions >= 1
    assert young.num_generated == 19


def test_prompts_beside_decodes_keep_to_their_share_of_a_step() -> None:
    limits = SchedulerLimits(PAGE, 64, 64, 4)
    bench = Bench(random.Random(5), 200, limits, prompt_budget=lambda *_, **__: 2 * PAGE)
    decoding = bench.add(4, 1000)
    bench.step()
    long = bench.add(10 * PAGE, 5)
    num_steps = 0
    while long.num_generated == 0:
        before = decoding.num_generated, long.num_computed
        bench.step()
        num_steps += 1
        assert decoding.num_generated == before[0] + 1
        assert long.num_computed - before[1] <= 2 * PAGE
    assert num_steps == 5
    bench.scheduler.finish(decoding)
    alone = bench.add(10 * PAGE, 5)
    bench.scheduler.finish(long)
    bench.step()
    assert alone.num_generated == 1


@pytest.mark.parametrize(
    ("kind", "is_overflow", "takes_less"),
    [
        ("prefill", None, True),
        ("prefill", True, True),
        ("prefill", False, False),
        ("kvstore", None, False),
        (None, None, False),
    ],
)
def test_prompts_that_overflow_take_less_of_a_step(
    kind: str | None, is_overflow: bool | None, takes_less: bool
) -> None:
    limits = SchedulerLimits(PAGE, 64, 64, 4)

    def tokens(num_running: int, num_waiting: int, *, is_overflow: bool = False) -> int:
        return PAGE if is_overflow else 5 * PAGE

    bench = Bench(random.Random(5), 200, limits, prompt_budget=tokens)
    bench.fills.next_state = lambda request: State.PREFILLING  # type: ignore[method-assign]
    decoding = bench.add(4, 1000)
    bench.step()
    prompt = bench.add(10 * PAGE, 5)
    if kind is not None:
        candidate = FillCandidate(worker_id="p", address="", epoch=1, kind=kind)
        prompt.sources.candidates.append(candidate)
    prompt.sources.is_overflow = is_overflow
    bench.step()
    assert decoding.num_generated == 2
    assert prompt.num_computed == (PAGE if takes_less else 5 * PAGE)


def test_what_is_left_behind_a_fill_does_not_wait_for_other_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = SchedulerLimits(PAGE, 512, 512, 4)
    bench = Bench(random.Random(5), 200, limits, prompt_budget=lambda *_, **__: 2 * PAGE)
    decoding = bench.add(4, 1000)
    bench.step()
    long, filled = bench.add(90 * PAGE, 5), bench.add(6 * PAGE, 5, remote=True)
    # The fill begins at once, and ends in the next turn.
    bench.fills.idle_chance = 0.0
    monkeypatch.setattr(bench.fills.rng, "random", lambda: 0.5)
    monkeypatch.setattr(bench.fills.rng, "randint", lambda least, most: most)
    bench.scheduler.admit(bench.now)
    while filled.state is not State.PREFILLING:
        bench.step()
    filled.timeline.fills.append(
        FillRecord(
            source="prefill", worker_id="p", transport="data", start_token=0, end_token=5 * PAGE,
            start_s=0.0,
        )
    )  # fmt: skip
    assert 0 < filled.num_pending <= PAGE < long.num_pending
    bench.step()
    assert filled.num_generated == 1
    assert decoding.num_generated > 1


def test_states_change_along_legal_edges_only() -> None:
    bench = Bench(random.Random(3), 20, SchedulerLimits(PAGE, 64, 64, 4))
    request = bench.add(4, 2)
    bench.scheduler.finish(request)
    with pytest.raises(AssertionError):
        bench.scheduler._transition(request, State.RUNNING)
    assert State.FILLING not in LEGAL_EDGES[State.RUNNING]
    assert all(
        State.PREEMPTED not in edges for s, edges in LEGAL_EDGES.items() if s != State.RUNNING
    )


def test_deadlines_end_requests_wherever_they_are() -> None:
    bench = Bench(random.Random(4), 40, SchedulerLimits(PAGE, 8, 4, 1))
    first = bench.add(4, 1000, deadline=10.0)
    second = bench.add(4, 5, first_token_deadline=5.0)
    bench.step()
    bench.scheduler.expire(4.9)
    assert bench.finished == []
    bench.scheduler.expire(5.0)
    assert bench.finished == [second]
    bench.scheduler.expire(10.0)
    assert bench.finished == [second, first]
    assert isinstance(first.error, DeadlineExceeded)
    assert bench.memory.counts().used == 0


def test_each_deadline_counts_when_it_passes() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bench = Bench(rng, 60, SchedulerLimits(PAGE, 8, 4, 3))
    requests: list[Request] = []
    num_late = 0
    for _ in range(60):
        for _ in range(rng.randint(0, 2)):
            deadline, first = (bench.now + rng.uniform(1, 30) for _ in range(2))
            made = bench.add(rng.randint(1, 12), 40, deadline=deadline, first_token_deadline=first)
            requests.append(made)
        bench.step()
        for request in bench.scheduler.running:
            if rng.random() < 0.7:
                request.timeline.first_token_s = 0.0
        late = [
            request
            for request in requests
            if request.state is not State.FINISHED
            and (
                bench.now >= request.deadline
                or (request.awaits_first_token and bench.now >= request.first_token_deadline)
            )
        ]
        finished = {id(request) for request in bench.finished}
        bench.scheduler.expire(bench.now)
        ended = [request for request in bench.finished if id(request) not in finished]
        assert sorted(map(id, ended)) == sorted(map(id, late))
        assert all(isinstance(request.error, DeadlineExceeded) for request in late)
        num_late += len(late)
    assert num_late > 3


def test_what_is_cached_of_a_waiting_prompt_is_not_queued() -> None:
    bench = Bench(random.Random(1), 64, SchedulerLimits(PAGE, 40, 40, 1))
    prefix = [7] * (5 * PAGE)
    first = bench.add(30, 40, prefix=prefix)
    assert bench.scheduler.num_queued_tokens == 30
    bench.step()
    assert bench.scheduler.num_queued_tokens == 0
    bench.add(50, 1, prefix=prefix)  # waits: there is one slot
    assert bench.scheduler.num_queued_tokens == 50 - 5 * PAGE
    bench.add(9, 1)
    assert bench.scheduler.num_queued_tokens == 50 - 5 * PAGE + 9
    bench.scheduler.finish(first)
    bench.step()
    assert bench.scheduler.num_queued_tokens == 9


def test_what_a_leader_computes_is_no_longer_queued_for_those_that_follow() -> None:
    """Found only when the second prompt is looked at again, after it was queued."""
    bench = Bench(random.Random(1), 64, SchedulerLimits(PAGE, 2 * PAGE, 2 * PAGE, 4))
    prefix = [7] * (4 * PAGE)
    bench.add(4 * PAGE + 1, 9, prefix=prefix)
    bench.add(4 * PAGE + 2, 9, prefix=prefix)
    assert bench.scheduler.num_queued_tokens == 8 * PAGE + 3
    bench.step()
    bench.step()
    bench.step()
    assert bench.scheduler.num_queued_tokens <= 2


def test_prompts_beside_decodes_fill_what_a_step_is_padded_to() -> None:
    sizes = [16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 5120]
    # Nearer above, nearer below, no room below for a few prompt tokens, nothing large enough.
    assert fitting_budget(2, 3900, sizes) == 4094
    assert fitting_budget(2, 4400, sizes) == 4094
    assert fitting_budget(2, 4700, sizes) == 5118
    assert fitting_budget(100, 32, sizes) == 156
    assert fitting_budget(2, 5600, sizes) == 5118
    assert fitting_budget(2, 9000, sizes) == 9000
    assert fitting_budget(7, 333, []) == 333
    rng = random.Random(8)
    for _ in range(1000):
        others, budget = rng.randrange(300), rng.randrange(32, 6000)
        fitting = fitting_budget(others, budget, sizes)
        assert fitting >= 7 * budget // 8
        assert fitting == budget or others + fitting in sizes


def test_a_step_with_decodes_is_filled_to_its_size() -> None:
    sizes = [4 * PAGE, 20 * PAGE, 30 * PAGE]
    limits = SchedulerLimits(PAGE, 40 * PAGE, 40 * PAGE, 8, step_sizes=sizes)
    bench = Bench(random.Random(5), 400, limits, prompt_budget=lambda *_, **__: 17 * PAGE)
    decoding = [bench.add(4, 1000) for _ in range(3)]
    bench.step()
    prompts = [bench.add(33 * PAGE, 5), bench.add(33 * PAGE, 5)]
    bench.step()
    assert all(request.num_generated == 2 for request in decoding)
    assert sum(request.num_computed for request in prompts) == 19 * PAGE


def test_decodes_leave_a_step_its_room_for_prompts() -> None:
    limits = SchedulerLimits(PAGE, 64 * PAGE, 32 * PAGE, 6, decodes_beside=3)
    bench = Bench(random.Random(6), 800, limits)
    decoding = [bench.add(4, 1000) for _ in range(3)]
    bench.step()
    prompts = [bench.add(32 * PAGE, 5), bench.add(32 * PAGE, 5)]
    bench.step()
    assert all(request.num_generated == 2 for request in decoding)
    assert all(request.num_generated == 1 for request in prompts)
    # One more than there is room for.
    late = bench.add(64 * PAGE, 5)
    bench.step()
    assert late.num_computed == 32 * PAGE
    bench.add(4, 5)
    bench.step()
    assert late.num_generated == 1


def test_prompts_go_on_beside_decodes_where_a_step_has_no_room_for_a_page() -> None:
    bench = Bench(random.Random(7), 400, SchedulerLimits(PAGE, PAGE, PAGE, 4))
    decoding = [bench.add(1, 1000) for _ in range(2)]
    bench.step()
    prompts = [bench.add(5 * PAGE + 1, 3), bench.add(2 * PAGE, 3)]
    bench.run(*prompts, max_steps=60)
    assert all(request.state is State.RUNNING for request in decoding)


def test_drafts_leave_prompts_a_page() -> None:
    limits = SchedulerLimits(PAGE, 5 * PAGE, 2 * PAGE, 5)
    drafting = Drafting(FixedGate(50), is_on_device=False, max_chain=50, max_context_tokens=2000)
    bench = Bench(random.Random(8), 400, limits, drafting=drafting)
    decoding = [bench.add(1, 1000) for _ in range(4)]
    bench.step()
    for request in decoding:
        request.drafts.wanted = True
    assert bench.scheduler.plan(bench.now).num_tokens == 5 * PAGE
    prompt = bench.add(3 * PAGE, 3)
    plan = bench.scheduler.plan(bench.now)
    assert [item.num_tokens for item in plan.chunks if item.request is prompt] == [PAGE]
    assert plan.num_tokens == 5 * PAGE
    assert min(plan.most_accepted) == 3


def test_the_last_step_of_a_long_fill_is_small_while_nobody_waits() -> None:
    limits = SchedulerLimits(PAGE, 64 * PAGE, 32 * PAGE, 8, last_piece_tokens=4 * PAGE)
    bench = Bench(random.Random(4), 400, limits)
    scheduler = bench.scheduler

    def step() -> dict[Request, int]:
        """Prompt tokens of one step, by request."""
        plan = scheduler.plan(0.0)
        scheduler.commit(scheduler.launch(plan), plan)
        return {item.request: item.num_tokens for item in plan.chunks}

    def steps_of(request: Request) -> list[int]:
        """Tokens of this request in each step, until all of it is computed."""
        taken: list[int] = []
        while sum(taken) < request.num_tokens:
            taken.append(step()[request])
        scheduler.finish(request)
        return taken

    def fill(num_pages: int) -> Request:
        request = bench.add(num_pages * PAGE, 1)
        request.fill = FillTask(b"")
        return request

    assert steps_of(fill(60)) == [32 * PAGE, 24 * PAGE, 4 * PAGE]
    assert steps_of(fill(40)) == [32 * PAGE, 8 * PAGE], "the rest is too short to be cut"
    assert steps_of(fill(15)) == [15 * PAGE]
    first, second = fill(30), fill(30)
    assert step()[first] == 30 * PAGE, "another prompt waits"
    scheduler.finish(first)
    scheduler.finish(second)
    own = bench.add(30 * PAGE, 1)
    assert steps_of(own) == [30 * PAGE], "its first token needs all of it"


def test_fills_are_admitted_while_tokens_in_flight_leave_room() -> None:
    """Computed tokens are in flight until their pages have left; the queue keeps its order."""
    limits = SchedulerLimits(PAGE, 64 * PAGE, 64 * PAGE, 8, max_tokens_in_flight=10 * PAGE)
    num_leaving = 0
    bench = Bench(random.Random(), 400, limits, num_leaving_tokens=lambda: num_leaving)
    scheduler = bench.scheduler

    def step() -> list[Request]:
        """The prompts of one step; their pages begin to leave."""
        nonlocal num_leaving
        plan = scheduler.plan(0.0)
        number = scheduler.launch(plan)
        assert not len(scheduler.plan(0.0)), "prompts under way are in flight"
        scheduler.commit(number, plan)
        for item in plan.chunks:
            num_leaving += item.num_tokens
            scheduler.finish(item.request)
        return [item.request for item in plan.chunks]

    fills = [bench.add(num_pages * PAGE, 1) for num_pages in (4, 5, 2, 1, 30, 1)]
    for request in fills:
        request.fill = FillTask(b"")
    assert step() == fills[:2]
    num_leaving = 8 * PAGE
    assert step() == fills[2:3], "the next one would be one page too many"
    assert step() == []
    num_leaving = 1
    assert step() == fills[3:4]
    assert step() == [], "one that is longer than the limit waits until nothing is in flight"
    num_leaving = 0
    assert step() == fills[4:5]
    num_leaving = 9 * PAGE
    assert step() == fills[5:]


def test_a_prompt_shares_its_step_only_up_to_a_number_of_tokens() -> None:
    """One that fills this number is computed alone, short ones together, and nothing is left."""
    limits = SchedulerLimits(PAGE, 256, 128, 8, shared_step_tokens=4 * PAGE)
    bench = Bench(random.Random(3), 400, limits)
    long, *short = (bench.add(length, 1) for length in (100, 20, 8, 4, 3, 2))
    assert [item.request for item in bench.step()] == [long]
    planned = bench.step()
    assert [item.request for item in planned] == short[:1]
    assert sum(item.num_tokens for item in planned) <= 20
    bench.run(long, *short)
