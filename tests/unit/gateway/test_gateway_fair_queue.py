"""The queue of many tenants: against a list, and against what fairness promises."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.gateway.admission.fair_queue import TenantFairQueue


def test_one_tenant_is_first_come_first_served() -> None:
    queue: TenantFairQueue[int] = TenantFairQueue()
    for number in range(50):
        queue.push(number, cost=1 + number % 7)
    assert [queue.pop() for _ in range(50)] == list(range(50))
    assert queue.head() is None
    with pytest.raises(IndexError):
        queue.pop()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_lost_and_each_tenant_keeps_its_order(seed: int) -> None:
    rng = random.Random(seed)
    queue: TenantFairQueue[tuple[str, int]] = TenantFairQueue()
    waiting: dict[str, list[tuple[tuple[str, int], float]]] = {}
    number = 0
    for _ in range(120):
        kind = rng.choice(["push", "push", "pop", "remove", "drop"])
        tenants = [name for name, items in waiting.items() if items]
        if kind == "push":
            name, cost = rng.choice("abcd"), rng.choice([1.0, 5.0, 100.0])
            item, number = (name, number), number + 1
            queue.push(item, name, cost, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5}[name])
            waiting.setdefault(name, []).append((item, cost))
        elif kind == "pop" and tenants:
            head = queue.head()
            item = queue.pop()
            assert item == head
            assert waiting[item[0]].pop(0)[0] == item
        elif kind == "remove" and tenants:
            name = rng.choice(tenants)
            at = rng.randrange(len(waiting[name]))
            item, _ = waiting[name].pop(at)
            assert queue.remove(item, name)
            assert not queue.remove(item, name)
        elif kind == "drop" and tenants:
            item = queue.most_owed("z", 0.0, 1.0, 0.5)[0]
            assert item == waiting[item[0]].pop()[0], "the newest one"
            assert queue.remove(item, item[0])
        assert len(queue) == sum(len(items) for items in waiting.values())
        for name, items in waiting.items():
            assert queue.cost_of(name) == pytest.approx(sum(cost for _, cost in items), abs=1e-6)
    left = [queue.pop() for _ in range(len(queue))]
    for name, items in waiting.items():
        assert [item for item in left if item[0] == name] == [item for item, _ in items]


def test_a_flood_is_passed_by_who_has_little() -> None:
    queue: TenantFairQueue[str] = TenantFairQueue()
    for number in range(1000):
        queue.push(f"flood {number}", "flood", 10)
    for _ in range(300):
        queue.pop()
    queue.push("one", "other", 10)
    assert "one" in {queue.pop() for _ in range(2)}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
def test_service_is_shared_by_weight_whatever_items_cost(weights: tuple[float, float]) -> None:
    rng = random.Random(4)
    queue: TenantFairQueue[tuple[str, float]] = TenantFairQueue()
    served: Counter[str] = Counter()

    def push(name: str, weight: float) -> None:
        cost = rng.choice([1.0, 2.0]) if name == "a" else rng.choice([20.0, 50.0])
        queue.push((name, cost), name, cost, weight)

    for _ in range(30):
        push("a", weights[0])
        push("b", weights[1])
    for _ in range(20_000):
        name, cost = queue.pop()
        served[name] += round(cost)
        push(name, weights["ab".index(name)])
    assert served["b"] / served["a"] == pytest.approx(weights[1] / weights[0], rel=0.02)


def test_who_was_away_has_saved_up_nothing() -> None:
    queue: TenantFairQueue[str] = TenantFairQueue()
    for _ in range(100):
        queue.push("a", "a")
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.push("b", "b")
    counts = Counter(queue.pop() for _ in range(20))
    assert counts == {"a": 10, "b": 10}


def test_the_wait_of_a_new_item_is_foreseen() -> None:
    rng = random.Random(8)
    for _ in range(50):
        queue: TenantFairQueue[int] = TenantFairQueue()
        costs: dict[int, float] = {}
        for number in range(rng.randrange(300)):
            costs[number] = rng.uniform(1, 20)
            queue.push(number, rng.choice("aaaabbc"), costs[number])
        tenant, own = rng.choice("abcd"), rng.uniform(1, 20)
        foreseen = queue.cost_before(tenant, own)
        queue.push(-1, tenant, own)
        before = 0.0
        while (item := queue.pop()) != -1:
            before += costs[item]
        # Items are served whole, one of each of the four tenants may be ahead or behind.
        assert before == pytest.approx(foreseen, abs=4 * 20 + 1)


def test_room_is_made_by_who_has_most_for_its_weight() -> None:
    queue: TenantFairQueue[int] = TenantFairQueue()
    assert queue.most_owed("d", 1, 1, 1) == []
    queue.push(1, "a", 30, 10)
    queue.push(2, "b", 1)
    queue.push(3, "b", 4)
    queue.push(4, "c", 1)
    assert queue.most_owed("d", 1, 1, 1) == [3]
    assert queue.most_owed("d", 1, 1, 5) == [3, 1]
    assert queue.most_owed("d", 4, 1, 5) == [], "it would have more than they"
    assert queue.most_owed("d", 4, 4, 5) == [3, 1], "for its weight it has not"
    assert queue.most_owed("b", 1, 1, 1) == [], "it has most itself"
    assert len(queue) == 4


def test_those_that_gave_up_are_forgotten_though_the_head_waits() -> None:
    queue: TenantFairQueue[object] = TenantFairQueue()
    waiting = [object() for _ in range(20)]
    for item in waiting:
        queue.push(item, tenant="a")
    for _ in range(3_000):
        item = object()
        queue.push(item, tenant="b", cost=random.choice([1.0, 3.0]))
        assert queue.remove(item, tenant="b")
        assert len(queue._heap) < 200
    left = [queue.pop() for _ in waiting]
    assert left == waiting
