"""What the gateway knows of who holds what, and the policies that use it, against naive models."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.contract.keys import PageKeys, namespace_digest, short_key
from weft.gateway.routing import FleetPageIndex, PolicyOptions, PoolView
from weft.gateway.routing.cache_aware import CacheAware
from weft.gateway.routing.cache_aware_approximate import CacheAwareApproximate
from weft.testing.services.routing_pool import LAYOUT, MODEL, PAGE, ask, names, pool, worker

MANY = 1 << 20


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share prefixes of every kind, some of them longer than a look-up block."""
    made: list[list[int]] = [[]]
    for _ in range(count):
        parent = rng.choice(made)
        keep = rng.randint(0, len(parent))
        length = rng.choice([2, 4, 40]) * PAGE
        made.append(parent[:keep] + [rng.randrange(3) for _ in range(rng.randint(1, length))])
    return made[1:]


def shared_tokens(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_index_equals_whole_prefixes(seed: int, num_workers: int) -> None:
    """Workers hold prefixes, lose their ends, restart and leave; sizes of pages differ."""
    rng = random.Random(seed)
    index = FleetPageIndex(MANY)
    workers = [worker(f"w{i}", page_size=rng.choice([PAGE, 2 * PAGE])) for i in range(num_workers)]
    held: dict[str, set[tuple[int, ...]]] = {one.worker_id: set() for one in workers}
    made = prompts(rng, 12)
    view = PoolView(workers)
    for _ in range(60):
        at = rng.randrange(num_workers)
        one, ids = workers[at], rng.choice(made)
        pages = held[one.worker_id]
        size = one.page_size
        keys = [*ask(ids).page_keys(one).upto(len(ids) // size)]
        act = rng.random()
        if act < 0.6:
            count = rng.randint(0, len(keys))
            index.add(one.worker_id, one.epoch, keys[:count])
            pages |= {tuple(ids[: (n + 1) * size]) for n in range(count)}
        elif act < 0.8:  # the ends go first: nothing that others continue
            lost = {p for p in pages if not any(len(q) > len(p) == shared(p, q) for q in pages)}
            lost_keys = [ask(p).page_keys(one).upto(len(p) // size)[-1] for p in lost]
            index.remove(one.worker_id, one.epoch, lost_keys)
            pages -= lost
        elif act < 0.9:
            workers[at] = worker(one.worker_id, epoch=one.epoch + 1, page_size=size)
            view = PoolView(workers)
            pages.clear()
        else:
            index.replace(one.worker_id, one.epoch, keys)
            pages.clear()
            pages |= {tuple(ids[: (n + 1) * size]) for n in range(len(keys))}
        request = ask(rng.choice(made))
        expected = []
        for other in workers:
            most = max(0, len(request.prompt_ids) - 1) // other.page_size
            count = 0
            while (
                count < most
                and tuple(request.prompt_ids[: (count + 1) * other.page_size])
                in held[other.worker_id]
            ):
                count += 1
            expected.append(count * other.page_size)
        assert index.matches(view, request).tolist() == expected
    live = {one.worker_id for one in workers if index.number(one) is not None}
    assert index.num_pages >= sum(len(held[name]) for name in live)
    assert index.sizes(view).sum() <= index.num_pages
    for one in workers:
        index.forget(one.worker_id)
    assert index.num_pages == index.num_keys == 0


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return shared_tokens(list(a), list(b))


def test_the_bound_keeps_pages_out_and_counts_them() -> None:
    index = FleetPageIndex(10)
    index.add("a", 1, range(8))
    index.add("b", 1, range(8))
    assert (index.num_pages, index.num_dropped) == (10, 6)
    index.remove("a", 1, range(8))
    index.add("b", 1, range(8))
    assert (index.num_pages, index.num_keys) == (8, 8)


def test_keys_are_those_of_the_workers() -> None:
    ids = [7] * (6 * PAGE)
    for salt in ("", "tenant"):
        namespace = namespace_digest(MODEL, LAYOUT, cache_salt=salt)
        whole = [short_key(key) for key in PageKeys(namespace, PAGE).upto(ids, 6)]
        request = ask(ids, salt)
        assert request.page_keys(worker("a")).upto(2)[:2] == whole[:2]
        assert request.page_keys(worker("b")).upto(6) == whole
    ours, others = (ask(ids, salt).page_keys(worker("a")).upto(6) for salt in ("", "tenant"))
    assert not set(ours) & set(others)


def learn(policy: CacheAware, name: str, ids: list[int], salt: str = "") -> None:
    one = worker(name)
    num_pages = len(ids) // PAGE
    policy.index.add(name, one.epoch, ask(ids, salt).page_keys(one).upto(num_pages))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5))
def test_cache_aware_takes_the_least_cost(seed: int, num_workers: int, count: int) -> None:
    rng = random.Random(seed)
    weight = rng.choice([1.0, 2.5])
    policy = CacheAware(PolicyOptions(request_tokens=3, compute_weight=weight, spread_tokens=0))
    held: dict[str, list[list[int]]] = {str(i): [] for i in range(num_workers)}
    for ids in prompts(rng, 20):
        requests = [rng.randrange(5) for _ in held]
        queued = [rng.randrange(30) for _ in held]
        view = pool([*held], requests, queued)
        chosen = policy.choose(view, ask(ids), count)
        matches, costs = [], []
        for position, old_ones in enumerate(held.values()):
            most = (len(ids) - 1) // PAGE * PAGE
            pages = [min(shared_tokens(ids, old) // PAGE * PAGE, most) for old in old_ones]
            matches.append(max(pages, default=0))
            to_compute = math.ceil(weight * (len(ids) - matches[-1]))
            costs.append(queued[position] + to_compute + 3 * requests[position])
        assert [costs[at] for at, _ in chosen] == sorted(costs)[:count]
        assert len({at for at, _ in chosen}) == len(chosen) == min(count, num_workers)
        assert all(match == matches[at] for at, match in chosen)
        name = rng.choice([*held])
        learn(policy, name, ids)
        held[name].append(ids)


def test_equal_ones_take_turns() -> None:
    policy = CacheAware()
    view = pool("abcd")
    firsts = Counter(names(view, policy.choose(view, ask([1, 2, 3]), 1))[0] for _ in range(12))
    assert firsts == dict.fromkeys("abcd", 3)


def test_a_queue_that_outweighs_the_match_sends_it_elsewhere() -> None:
    policy = CacheAware(PolicyOptions(compute_weight=2.0, spread_tokens=0))
    ids = list(range(101))
    learn(policy, "a", ids)
    for queued, expected in ((0, "a"), (199, "a"), (201, "b")):
        view = pool("ab", queued=[queued])
        assert names(view, policy.choose(view, ask(ids), 1)) == [expected]


def test_inflow_is_the_share_of_a_cache_that_is_new() -> None:
    index = FleetPageIndex(100_000)
    workers = [worker("a", total_pages=900), worker("b", total_pages=900)]
    view = PoolView(workers)
    assert index.inflow(view).tolist() == [0, 0]
    index.replace("a", 1, range(500))  # a snapshot: they are not new
    index.add("b", 1, range(1000, 1090))
    assert index.inflow(view).tolist() == pytest.approx([0, 0.1 * math.exp(-90 / 600)])
    keys = iter(range(10_000, 10**6))
    for _ in range(400):
        for name, count in (("a", 3), ("b", 9)):
            new = [next(keys) for _ in range(count)]
            index.add(name, 1, new)
            index.add(name, 1, new)  # told twice
            index.remove(name, 1, new)
        inflow = index.inflow(view)
    # In the long run a third of all caches, split as what came.
    assert inflow.tolist() == pytest.approx([600 * 0.25 / 900, 600 * 0.75 / 900], rel=0.02)
    index.forget("b")
    assert index.inflow(view)[1] == 0


def test_new_conversations_go_where_caches_have_rest() -> None:
    """All begin with one system prompt; turns go on where the conversation is."""
    spread, packed = (
        CacheAware(PolicyOptions(compute_weight=2.0, spread_tokens=tokens)) for tokens in (5000, 0)
    )
    system = [1] * (20 * PAGE)
    for policy, most in ((spread, 20), (packed, 60)):
        rng = random.Random(3)
        where: Counter[str] = Counter()
        view = PoolView([worker(name, total_pages=300) for name in "abcd"])
        for _ in range(60):
            ids = [*system, *(rng.randrange(2, 100) for _ in range(5 * PAGE))]
            first = names(view, policy.choose(view, ask(ids), 1))[0]
            learn(policy, first, ids)
            where[first] += 1
            for _ in range(2):
                ids += [rng.randrange(2, 100) for _ in range(5 * PAGE)]
                turn = names(view, policy.choose(view, ask(ids), 1))[0]
                assert turn == first
                learn(policy, turn, ids)
        assert max(where.values()) <= most
        assert (len(where) == 4) == (policy is spread)
    assert where.most_common(1)[0][1] >= 59, "without it, where the first one is"


def test_salts_do_not_share_and_incarnations_neither() -> None:
    policy = CacheAware()
    ids = list(range(20))
    learn(policy, "a", ids, "one")
    view = pool("a")
    assert policy.choose(view, ask(ids, "one"), 1)[0].match_tokens == 16
    assert policy.choose(view, ask(ids, "two"), 1)[0].match_tokens == 0
    reborn = pool([worker("a", epoch=2)])
    assert policy.choose(reborn, ask(ids, "one"), 1)[0].match_tokens == 0


def test_approximate_goes_where_a_prompt_went_while_loads_are_balanced() -> None:
    policy = CacheAwareApproximate(PolicyOptions(balance_abs_threshold=4))
    view = pool("abc")
    ids = list(range(41))
    home = names(view, policy.choose(view, ask(ids), 1))[0]
    at = "abc".index(home)
    again = policy.choose(view, ask(ids), 2)
    assert again[0] == (at, 40)
    assert again[1].match_tokens == 0
    # A burst stays while the difference is at most the threshold ...
    view.num_requests[at] = 4
    assert policy.choose(view, ask(ids), 1)[0].position == at
    # ... and goes to the least loaded when it is over.
    view.num_requests[at] = 5
    assert policy.choose(view, ask(ids), 1)[0].position != at


def test_approximate_needs_a_match_of_its_share_and_spreads_others() -> None:
    policy = CacheAwareApproximate(PolicyOptions(cache_threshold=0.5))
    view = pool("ab")
    ids = list(range(40))
    first = policy.choose(view, ask([*ids, 1]), 1)[0].position
    # 36 of 81 tokens are less than half: the one that was sent less.
    long = ids[:36] + list(range(500, 545))
    assert policy.choose(view, ask(long), 1)[0].position != first
    assert policy.choose(view, ask(ids + list(range(900, 938))), 1)[0] == (first, 40)


def test_approximate_forgets_the_longest_unused_beyond_its_bound() -> None:
    now = 0.0
    options = PolicyOptions(max_tree_pages=10, eviction_interval_s=5.0, clock=lambda: now)
    policy = CacheAwareApproximate(options)
    view = pool("a")
    made = [[number] * (4 * PAGE + 1) for number in range(5)]
    for ids in made[:3]:
        policy.choose(view, ask(ids), 1)
    assert policy.num_pages == 12
    now = 6.0
    policy.choose(view, ask(made[3]), 1)
    assert policy.num_pages == 10
    matches = [policy._sent.index.matches(view, ask(ids))[0] for ids in made]
    assert matches == [0, 8, 16, 16, 0], "ends of the oldest go first"
    assert policy.flush() == 10


def test_approximate_forgets_another_incarnation() -> None:
    policy = CacheAwareApproximate()
    ids = list(range(41))
    policy.choose(pool("a"), ask(ids), 1)
    assert policy.choose(pool("a"), ask(ids), 1)[0].match_tokens == 40
    assert policy.choose(pool([worker("a", epoch=2)]), ask(ids), 1)[0].match_tokens == 0


@pytest.mark.parametrize("request_tokens", [512, 0])
def test_what_everybody_asks_about_is_not_left_to_one_worker(request_tokens: int) -> None:
    """In a decode pool, whose requests share steps; a prefill worker's queue says it itself."""
    policy = CacheAware(PolicyOptions(request_tokens=request_tokens, spread_tokens=0))
    document = [random.randrange(1000) for _ in range(4000)]
    learn(policy, "a", document)
    for more, expected in ((0, "a"), (32, "a"), (33, "b"), (200, "b")):
        view = pool("abc", [5 + more, 5, 6 + more], [0, 0, 0], [0, 0, 0])
        chosen = names(view, policy.choose(view, ask([*document, 7]), 3))
        assert chosen[0] == (expected if request_tokens else "a")
