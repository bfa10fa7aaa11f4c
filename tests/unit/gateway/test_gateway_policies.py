"""Routing policies that look at load, length or a key; and the view that they take."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial
from operator import is_
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.gateway.fleet.pool import WorkerPool
from weft.gateway.routing import (
    POLICIES,
    LoadEstimate,
    Policy,
    PolicyOptions,
    PoolView,
    WorkerView,
    make_policy,
)
from weft.gateway.routing.bucket import Bucket
from weft.gateway.routing.manual import Manual
from weft.testing.services.routing_pool import ask, names, pool, worker

loads = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8
)


def make(name: str, **options: object) -> Policy:
    return make_policy(name, PolicyOptions(seed=7, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*POLICIES, "cache_aware approximate"])
def test_every_policy_chooses_different_workers_of_any_pool(name: str) -> None:
    rng = random.Random(5)
    kind, _, approximate = name.partition(" ")
    policy = make(kind, kv_events=not approximate)
    for turn in range(200):
        size = rng.randint(1, 9)
        view = pool(
            [f"w{i}" for i in range(size)],
            [rng.randrange(80) for _ in range(size)],
            [rng.randrange(5000) for _ in range(size)],
            [rng.randrange(9000) for _ in range(size)],
        )
        count = rng.randint(1, 4)
        ids = [rng.randrange(9) for _ in range(rng.randint(1, 300))]
        chosen = policy.choose(view, ask(ids, key=rng.choice(["", "k"]), name=str(turn)), count)
        positions = [choice.position for choice in chosen]
        assert len(set(positions)) == len(positions) == min(count, size)
        assert all(isinstance(at, int) and 0 <= at < size for at in positions)


def test_random_covers_all_and_a_seed_repeats() -> None:
    view = pool("abc")
    drawn = [make("random").choose(view, ask([1]), 2) for _ in range(2)]
    assert drawn[0] == drawn[1]
    policy = make("random")
    counts = Counter(policy.choose(view, ask([1]), 1)[0].position for _ in range(900))
    assert min(counts.values()) > 200


def test_round_robin_takes_turns() -> None:
    policy, view = make("round_robin"), pool("abc")
    first = [names(view, policy.choose(view, ask([1]), 2)) for _ in range(6)]
    assert first == [["a", "b"], ["b", "c"], ["c", "a"]] * 2


@given(loads, st.integers(1, 4))
def test_total_requests_and_total_tokens_are_minima(
    given_loads: list[tuple[int, int, int]], count: int
) -> None:
    requests, queued, tokens = (list(column) for column in zip(*given_loads, strict=True))
    view = pool([str(i) for i in range(len(given_loads))], requests, queued, tokens)
    for name, keys in (
        ("total_requests", list(zip(requests, queued, strict=True))),
        ("total_tokens", list(zip(tokens, requests, strict=True))),
    ):
        chosen = make(name).choose(view, ask([1]), count)
        assert [keys[at] for at, _ in chosen] == sorted(keys)[:count]


def test_equal_ones_take_turns() -> None:
    for name in ("total_requests", "total_tokens", "cache_aware"):
        policy, view = make(name), pool("abc")
        assert Counter(policy.choose(view, ask([1]), 1)[0].position for _ in range(6)) == {
            0: 2,
            1: 2,
            2: 2,
        }


def test_total_tokens_worked_example() -> None:
    """Of the two workers with 8,000 tokens the one with fewer requests; then it counts as sent."""
    view = pool("0123")
    estimates = [LoadEstimate() for _ in range(4)]
    reported = zip([5, 3, 6, 4], [12_000, 8_000, 15_000, 8_000], strict=True)
    for at, (estimate, (requests, tokens)) in enumerate(zip(estimates, reported, strict=True)):
        estimate.report(requests, 0, tokens)
        estimate.show_in(view, at)
    policy = make("total_tokens")
    assert policy.choose(view, ask([1] * 3000), 1)[0].position == 1
    estimates[1].begin(3000, 3000)
    assert view.num_tokens.tolist() == [12_000, 11_000, 15_000, 8_000]
    assert policy.choose(view, ask([1] * 3000), 1)[0].position == 3


def test_power_of_two_never_takes_the_worst() -> None:
    policy = make("power_of_two")
    view = pool("abcd", [4, 1, 2, 3])
    counts = Counter(names(view, policy.choose(view, ask([1]), 1))[0] for _ in range(1200))
    # Of 6 pairs the best is in 3, the second best in 2 more, the third in 1 more.
    assert counts["b"] > counts["c"] > counts["d"] > 100
    assert counts["a"] == 0


def test_bucket_borders_follow_the_lengths() -> None:
    rng = random.Random(2)
    policy = Bucket()
    view = pool("abc")
    sent: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number in range(3000):
        scale = 100 if number < 1500 else 1000
        length = min(20 * scale, int(scale * rng.paretovariate(1.5)))
        at = policy.choose(view, ask([0] * length), 1)[0].position
        if number >= 2500:
            sent[at].append(length)
    short, middle, long = (sum(sent[at]) / len(sent[at]) for at in range(3))
    assert short < middle < long
    assert max(sent[0]) <= 1.2 * min(sent[1])
    totals = [sum(lengths) for lengths in sent.values()]
    assert max(totals) < 1.5 * min(totals), "equal shares of the work"
    assert policy.borders(3) == sorted(policy.borders(3))


def test_bucket_spreads_prompts_of_one_length_and_heals_imbalance() -> None:
    policy = Bucket(PolicyOptions(balance_abs_threshold=4))
    view = pool("abc")
    counts = Counter(policy.choose(view, ask([0] * 50), 1)[0].position for _ in range(90))
    assert min(counts.values()) >= 20
    for length in [10] * 300 + [1000] * 100:
        policy.choose(view, ask([0] * length), 1)
    assert policy.choose(view, ask([0] * 10), 1)[0].position == 0
    view.num_requests[:], view.queued_tokens[:] = [9, 4, 4], [900, 400, 100]
    assert policy.choose(view, ask([0] * 10), 1)[0].position == 2


def test_manual_pins_a_key_while_its_worker_is_there() -> None:
    policy = Manual()
    view = pool("abc", [2, 1, 3])
    assert names(view, policy.choose(view, ask([1], key="x"), 1)) == ["b"]
    view.num_requests[1] = 50
    assert names(view, policy.choose(view, ask([1], key="x"), 2)) == ["b", "a"]
    assert names(view, policy.choose(view, ask([1], key="y"), 1)) == ["a"]
    assert names(view, policy.choose(view, ask([1]), 1)) == ["a"], "no key: the least loaded"
    smaller = pool("ac", [2, 1])
    assert names(smaller, policy.choose(smaller, ask([1], key="x"), 1)) == ["c"]
    whole = pool("abc")
    assert names(whole, policy.choose(whole, ask([1], key="x"), 1)) == ["c"], "it stays there"


def test_manual_forgets_keys_beyond_its_bound_and_idle_ones() -> None:
    now = 0.0
    policy = Manual(PolicyOptions(max_pins=3, pin_idle_s=10.0, clock=lambda: now))
    view = pool("a")
    for key in "wxyz":
        policy.choose(view, ask([1], key=key), 1)
    assert policy.num_pins == 3
    now = 11.0
    for _ in range(3):
        policy.choose(view, ask([1], key="z"), 1)
    assert policy.num_pins == 1


@pytest.mark.parametrize("name", ["consistent_hashing", "prefix_hash"])
def test_hashing_moves_only_what_it_must(name: str) -> None:
    """Keys of a worker that leaves move; others stay. Two gateways agree."""
    whole = pool([f"w{i}" for i in range(8)])
    smaller = pool([f"w{i}" for i in range(7)])
    options = {"load_factor": 16.0}

    def home(view: PoolView, number: int) -> str:
        request = ask([number, number + 1, 3], key=f"key-{number}")
        return names(view, make(name, **options).choose(view, request, 1))[0]

    before = {number: home(whole, number) for number in range(800)}
    assert before == {number: home(whole, number) for number in range(800)}
    after = {number: home(smaller, number) for number in range(800)}
    assert all(after[n] == before[n] for n in before if before[n] != "w7")
    counts = Counter(before.values())
    assert len(counts) == 8
    assert max(counts.values()) < 2 * min(counts.values())
    moved = Counter(after[n] for n in before if before[n] == "w7")
    assert len(moved) > 4, "they spread over those that are left"


def test_consistent_hashing_without_keys_spreads_requests() -> None:
    policy, view = make("consistent_hashing"), pool("abcd")
    counts = Counter(policy.choose(view, ask([1], name=f"r{n}"), 1)[0].position for n in range(400))
    assert min(counts.values()) > 60


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 8), st.sampled_from([1.0, 1.25, 2.0]))
def test_prefix_hash_keeps_its_bound(seed: int, size: int, factor: float) -> None:
    """No worker ever has more than ceil(c * requests / workers); see the paper's definition."""
    rng = random.Random(seed)
    policy = make("prefix_hash", load_factor=factor, prefix_tokens=8)
    view = pool([f"w{i}" for i in range(size)])
    for number in range(1, 60):
        request = ask([rng.randrange(3)] * 8 + [number])  # three prefixes only
        view.num_requests[policy.choose(view, request, 1)[0].position] += 1
        assert view.num_requests.max() <= math.ceil(factor * number / size)


def test_prefix_hash_looks_at_the_prefix_and_the_salt_only() -> None:
    policy = make("prefix_hash", prefix_tokens=8, load_factor=16.0)
    view = pool([f"w{i}" for i in range(16)])
    homes = {policy.choose(view, ask([5] * 8 + [n] * n), 1)[0].position for n in range(20)}
    assert len(homes) == 1
    salted = {policy.choose(view, ask([5] * 8, str(n)), 1)[0].position for n in range(40)}
    assert len(salted) > 8


def test_follow_stays_beside_the_prefill_worker() -> None:
    policy = make("follow")
    hosts = [worker(name, host=host) for name, host in zip("abcd", "xxyy", strict=True)]
    view = pool(hosts, [5, 4, 0, 1])
    for host, expected in (("x", "b"), ("y", "c"), ("z", "c"), ("", "c")):
        chosen = policy.choose(view, ask([1]).beside(host), 1)
        assert names(view, chosen) == [expected]


def test_estimate_counts_what_was_sent_and_done_since_the_report() -> None:
    view = pool("a")
    load = LoadEstimate()
    load.show_in(view, 0)

    def now() -> tuple[int, int, int]:
        shown = (view.num_requests[0], view.queued_tokens[0], view.num_tokens[0])
        assert shown == (load.num_requests, load.queued_tokens, load.num_tokens)
        return load.num_requests, load.queued_tokens, load.num_tokens

    load.begin(100, 60)
    assert now() == (1, 60, 100)
    load.report(3, 160, 900)  # with 100 tokens of others
    assert now() == (3, 160, 900)
    load.begin(50, 50)
    assert now() == (4, 210, 950)
    load.computed(60)
    assert now() == (4, 150, 950)
    load.end(100)
    assert now() == (3, 150, 850)
    load.report(0, 0, 0)  # it has not noticed the second one yet
    assert now() == (1, 50, 50)
    load.computed(50)
    load.end(50)
    load.begin(70, 0)  # others compute it
    load.report(1, 0, 70)
    assert now() == (1, 0, 70)


class Member:
    def __init__(self, name: str) -> None:
        self.member: WorkerView | None = worker(name)
        self.load = LoadEstimate()
        self.trouble = ""

    def problem(self, now: float) -> str:
        return self.trouble


def test_a_pool_never_gives_a_worker_with_a_problem() -> None:
    rng = random.Random(1)
    members: list[Any] = [Member(name) for name in "abcde"]
    members.append(Member("f"))
    members[-1].member = None  # not met yet
    healthy = WorkerPool(lambda: members)
    policy = make("round_robin")
    now = 0.0
    for _ in range(500):
        now += rng.choice([0.001, 0.03])
        changed = rng.choice(members)
        changed.trouble = rng.choice(["", "ill"])
        if rng.random() < 0.2 and members[0].member is not None:
            members[0].member = worker("a", epoch=members[0].member.epoch + 1)
        excluded = rng.choice(members)
        chosen = healthy.choose(policy, ask([1]), 2, now, partial(is_, excluded))
        found = [one for one, _ in chosen]
        assert not any(one.trouble for one in found)
        assert excluded not in found
        well = [one for one in members[:5] if not one.trouble and one is not excluded]
        assert bool(found) == bool(well)
        for one in found:
            one.load.begin(10, 10)
