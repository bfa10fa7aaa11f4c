"""Adapters under random loads: nobody starves, no step reads another's rows, nothing leaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.checkpoint.adapters.limits import LoraLimits
from weft.checkpoint.adapters.rows import DevicePlace
from weft.contract.adapters import AdapterOrder
from weft.contract.errors import AdapterError, PeerUnavailable, WeftError
from weft.engine.base.config import PolicyName
from weft.engine.features.lora import manager as manager_module
from weft.engine.features.lora.manager import AdapterManager
from weft.engine.model.adapters.weights import HostWeights
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.limits import SchedulerLimits
from weft.testing.scheduling.adapter_bench import ROW_BYTES, AdapterBench, FakeWeights
from weft.testing.scheduling.scheduler_bench import PAGE, Bench

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
NUM_ROWS = 16
SCHEDULER = SchedulerLimits(PAGE, 24, 8, 6)


def limits(max_loras: int = 3, host_adapters: int = 100) -> LoraLimits:
    return LoraLimits(
        max_loras=max_loras,
        memory_bytes=2 * NUM_ROWS * ROW_BYTES,
        num_rows={"q": NUM_ROWS, "up": NUM_ROWS},
        row_bytes={"q": ROW_BYTES, "up": ROW_BYTES},
        host_bytes=host_adapters * ROW_BYTES * 8,
    )


def fake(name: str, rows: int = 4, **needs: int) -> FakeWeights:
    return FakeWeights(name.encode(), 8, needs or {"q": rows, "up": rows})


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def make(
    patch: pytest.MonkeyPatch, names: str, seed: int = 0, *, max_loras: int = 3, rows: int = 4
) -> tuple[Bench, AdapterBench]:
    """A bench whose adapters, one a letter, are all loaded."""
    rng = random.Random(seed)
    adapters = AdapterBench(patch, rng, limits(max_loras), {n: fake(n, rows) for n in names})
    bench = Bench(rng, 100, SCHEDULER, adapters=adapters)
    for name in names:
        assert adapters.load(name) is None
    return bench, adapters


def check_empty(bench: Bench, adapters: AdapterBench) -> None:
    """All adapters are unloaded, and nothing of them is left."""
    counts = bench.memory.counts()
    assert counts.used == counts.quarantined == 0
    assert bench.memory.num_available_pages == counts.total
    assert not any(bench.scheduler.sizes().values())
    for state in adapters.manager.states():
        adapters.answer(adapters.order(state.name, unload=True))
    assert adapters.manager.states() == []
    assert not any(adapters.manager.sizes().values())
    residency = adapters.manager.residency
    residency.check_integrity()
    rows = residency._rows
    assert rows.num_free_slots == adapters.limits.max_loras
    assert all(rows.num_free_rows(kind) == NUM_ROWS for kind in ("q", "up"))
    assert len(adapters.manager._host) == 0


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.sampled_from([2, 5, 100]),
)
def test_every_request_ends_whatever_is_loaded_and_unloaded(
    seed: int, max_loras: int, policy: PolicyName, is_overlapped: bool, host_adapters: int
) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        names = [f"a{index}" for index in range(rng.randint(1, 12))]
        weights = {n: fake(n, q=rng.randint(1, 8), up=rng.randint(1, 8)) for n in names}
        adapters = AdapterBench(patch, rng, limits(max_loras, host_adapters), weights)
        is_urgent = policy == "priority"
        scheduler = SchedulerLimits(
            PAGE, 24, 8, 6, by_priority=is_urgent, preemption_threshold=2 if is_urgent else None
        )
        bench = Bench(
            rng,
            rng.randint(16, 60),
            scheduler,
            policy,
            ageing_s=rng.choice([1.0, 100.0]),
            is_overlapped=is_overlapped,
            stop_chance=0.05,
            adapters=adapters,
        )
        orders, requests = [], []
        for _ in range(rng.randint(10, 150)):
            chance = rng.random()
            if chance < 0.15:
                name = rng.choice(names)
                unload, is_pinned = rng.random() < 0.3, rng.random() < 0.1
                orders.append(adapters.order(name, unload=unload, is_pinned=is_pinned))
            elif chance < 0.4:
                served = [name for name in names if adapters.manager.serves(name.encode())]
                adapter = rng.choice(["", *served]).encode()
                requests.append(add_any(bench, adapter))
            elif chance < 0.45 and requests:
                bench.scheduler.finish(rng.choice(requests))
            bench.step()
        bench.run(*requests)
        assert len(bench.finished) == len(requests), "each ends exactly once"
        for order in orders:
            adapters.answer(order)
        check_empty(bench, adapters)


def add_any(bench: Bench, adapter: bytes) -> Request:
    """A random request that fits the pool; every other one shares a prefix with others."""
    rng = bench.rng
    capacity = bench.memory.num_usable_pages * PAGE
    num_prompt = rng.randint(1, capacity // 2)
    return bench.add(
        num_prompt,
        rng.randint(1, min(30, capacity - num_prompt)),
        remote=rng.random() < 0.3,
        prefix=[7] * 20 if rng.random() < 0.5 else [],
        priority=rng.randint(-3, 3),
        tenant=rng.choice(["", "a", "b"]),
        adapter=adapter,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_an_adapter_gets_its_turn_while_others_are_asked_for_without_end(
    policy: PolicyName, patch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    adapters = AdapterBench(patch, rng, limits(2), {name: fake(name, 8) for name in "abc"})
    bench = Bench(rng, 100, SCHEDULER, policy, ageing_s=20.0, adapters=adapters)
    for name in "abc":
        assert adapters.load(name) is None

    def flood() -> None:
        for name in b"ab":
            using = [r for r in bench.scheduler.running if r.adapter == bytes([name])]
            if len(using) < 2:
                bench.add(3, 20, adapter=bytes([name]))

    for _ in range(20):
        flood()
        bench.step()
    waiting = bench.add(3, 4, adapter=b"c")
    for _ in range(400):
        flood()
        bench.step()
        if waiting.state is State.FINISHED:
            break
    assert waiting.state is State.FINISHED, "a request starved"


def test_a_request_that_waits_for_its_adapter_delays_nobody(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "abc", max_loras=2, rows=8)
    users = [bench.add(3, 200, adapter=name) for name in (b"a", b"b")]
    while not all(user.state is State.RUNNING for user in users):
        bench.step()
    waiting = [bench.add(3, 2, adapter=b"c") for _ in range(40)]
    passing = bench.add(3, 2)
    for _ in range(4):
        bench.step()
    assert passing.state is State.FINISHED
    assert all(request.state is State.WAITING for request in waiting)
    scheduler = bench.scheduler
    assert scheduler.num_tokens_before(b"c") == scheduler.num_queued_tokens >= 40 * 3
    assert scheduler.num_tokens_before(b"") == scheduler.num_queued_tokens - 40 * 3
    bench.run(*users, *waiting)
    check_empty(bench, adapters)


def test_rows_are_kept_for_the_step_that_still_names_them(patch: pytest.MonkeyPatch) -> None:
    """A request ends by its last token while a step that was begun behind still runs for it."""
    rng = random.Random(3)
    adapters = AdapterBench(patch, rng, limits(1), {name: fake(name, 8) for name in "ab"})
    bench = Bench(rng, 100, SCHEDULER, is_overlapped=True, adapters=adapters)
    for name in "ab":
        assert adapters.load(name) is None
    user = bench.add(3, 50, adapter=b"a")
    while user.num_generated < 3:
        bench.step()
    next_one = bench.add(3, 1, adapter=b"b")
    bench.scheduler.finish(user)
    assert bench._flying is not None, "a step is under way for it"
    for _ in range(20):
        adapters.turn()
        assert adapters.content["q"][:8] == [b"a"] * 8
    bench.run(next_one)
    assert adapters.content["q"][:8] == [b"b"] * 8
    check_empty(bench, adapters)


def test_the_least_recently_used_goes_and_pinned_ones_stay(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "abc", max_loras=3)
    assert adapters.load("a", is_pinned=True) is None
    for name in (b"a", b"b", b"c", b"b"):
        bench.run(bench.add(3, 2, adapter=name))
    adapters.weights["d"] = fake("d")
    assert adapters.load("d") is None
    assert adapters.state("d") == "host", "a load takes nobody's place"
    bench.run(bench.add(3, 2, adapter=b"d"))
    assert [adapters.state(name) for name in "abcd"] == ["device", "device", "host", "device"]
    check_empty(bench, adapters)


def test_an_unload_waits_for_requests_and_takes_no_new_ones(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "a")
    request = bench.add(3, 20, adapter=b"a")
    bench.step()
    order = adapters.order("a", unload=True)
    assert not adapters.manager.serves(b"a")
    assert adapters.manager.holds(b"a"), "what was begun elsewhere may end here"
    while request.state is not State.FINISHED:
        assert order not in adapters.replies
        bench.step()
    assert adapters.answer(order) is None
    assert adapters.state("a") == ""
    check_empty(bench, adapters)


def test_a_load_ends_an_unload(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "a")
    request = bench.add(3, 5, adapter=b"a")
    unload, load = adapters.order("a", unload=True), adapters.order("a")
    assert adapters.replies[unload] is adapters.replies[load] is None
    bench.run(request)
    assert adapters.manager.serves(b"a")
    check_empty(bench, adapters)


def test_what_cannot_be_read_fails_its_load_alone(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "a")
    adapters.weights |= {"broken": None, "other": fake("something else")}
    for name in ("broken", "other"):
        error = adapters.load(name)
        assert isinstance(error, AdapterError)
        assert name in error.message
        assert adapters.state(name) == "failed"
        assert not adapters.manager.serves(name.encode())
    adapters.weights["broken"] = fake("broken")
    assert adapters.load("broken") is None, "it may be tried again"
    bench.run(bench.add(3, 5, adapter=b"a"), bench.add(3, 5, adapter=b"broken"))
    check_empty(bench, adapters)


def test_an_adapter_that_is_lost_fails_those_that_wait_for_it(patch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    adapters = AdapterBench(patch, rng, limits(1, host_adapters=1), {n: fake(n, 4) for n in "ab"})
    bench = Bench(rng, 100, SCHEDULER, adapters=adapters)
    for name in "ab":
        assert adapters.load(name) is None
    bench.run(bench.add(3, 2, adapter=b"b"))
    assert adapters.state("a") == "disk"
    adapters.weights["a"] = None
    lost, other = bench.add(3, 2, adapter=b"a"), bench.add(3, 2, adapter=b"b")
    bench.run(lost, other)
    assert isinstance(lost.error, PeerUnavailable)
    assert other.error is None
    assert adapters.state("a") == "failed"
    check_empty(bench, adapters)


@pytest.mark.parametrize(
    ("needs", "pinned", "words"),
    [
        ({"q": 17, "up": 1}, "", ["17 rows of 100 bytes for q", "of 16 it could have 16", "3,400"]),
        ({"q": 10, "up": 1}, "p", ["10 rows", "of 16 it could have 8", "1 pinned"]),
        ({"q": 1}, "pr", ["2 pinned adapters and one place for the others make 3"]),
        ({"q": 16, "up": 16}, "", ["3,200 bytes", "lora_host_bytes = 1,600"]),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    needs: dict[str, int], pinned: str, words: list[str], patch: pytest.MonkeyPatch
) -> None:
    host_adapters = 2 if words[-1].startswith("lora_host") else 100
    weights = {"x": fake("x", **needs), "p": fake("p", 8), "r": fake("r", 1)}
    adapters = AdapterBench(patch, random.Random(0), limits(2, host_adapters), weights)
    bench = Bench(random.Random(0), 20, SCHEDULER, adapters=adapters)
    for name in pinned:
        assert adapters.load(name, is_pinned=True) is None
    error = adapters.load("x")
    assert isinstance(error, AdapterError)
    for part in ["adapter x", *words]:
        assert part in error.message, error.message
    assert len(pinned) < 2 or adapters.load("x") is not None
    check_empty(bench, adapters)


def test_a_pin_that_leaves_no_room_changes_nothing(patch: pytest.MonkeyPatch) -> None:
    bench, adapters = make(patch, "ab", max_loras=2, rows=9)
    error = adapters.load("a", is_pinned=True)
    assert isinstance(error, AdapterError)
    assert error.message.startswith("beside adapter a"), error.message
    assert "adapter b does not fit: 9 rows" in error.message
    assert not any(state.is_pinned for state in adapters.manager.states())
    bench.run(*(bench.add(3, 5, adapter=name) for name in (b"a", b"b")))
    check_empty(bench, adapters)


class _SilentDisk:
    """Reads of one adapter do not end; what is written goes nowhere. It owns a manager, too."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.is_over = threading.Event()
        self.replies: dict[int, WeftError | None] = {}

    def read(self, directory: str, *, is_lenient: bool) -> HostWeights:
        if directory.startswith("silent"):
            self.answers.wait()
        elif directory == "dead":
            self.is_over.wait()
        return fake(directory)

    def write(self, place: DevicePlace, weights: HostWeights) -> None:
        pass

    def reply(self, query: int, error: WeftError | None) -> None:
        self.replies[query] = error


def test_a_disk_that_does_not_answer_delays_nobody_else(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager_module, "READ_STALL_S", 2.0)
    disk = _SilentDisk()
    manager = AdapterManager(limits(), disk, lambda: None)
    scheduler = Bench(random.Random(), 100, SCHEDULER).scheduler
    manager.attach(scheduler.waitlist, disk.reply, scheduler.finish)

    def order(query: int, name: str) -> None:
        manager.order(
            AdapterOrder(
                query=query, action="load", digest=name.encode(), name=name, directory=name
            )
        )

    def wait_for(*queries: int) -> None:
        deadline = time.monotonic() + 30
        while not disk.replies.keys() >= set(queries):
            manager.turn()
            assert time.monotonic() < deadline, disk.replies
            time.sleep(0.005)

    try:
        order(1, "silent")
        order(2, "good")
        wait_for(1, 2)
        assert isinstance(disk.replies[1], PeerUnavailable)
        assert "does not answer" in disk.replies[1].message
        assert disk.replies[2] is None
        states = {state.name: state.state for state in manager.states()}
        assert states["silent"] == "failed"
        assert states["good"] in ("host", "device")
        assert manager.sizes()["adapter_stalls"] == 1
        # No more threads than there may be, and nobody waits for one.
        patch.setattr(manager_module, "READ_STALL_S", 0.05)
        numbers = range(10, 10 + 2 * manager_module.MAX_STALLED)
        for number in numbers:
            # The last one that has a thread stays when all others go on.
            is_last = number == numbers[manager_module.MAX_STALLED - 1]
            order(number, "dead" if is_last else f"silent {number}")
        wait_for(*numbers)
        assert {type(disk.replies[number]) for number in numbers} == {PeerUnavailable}
        assert manager.sizes()["adapter_stalls"] == manager_module.MAX_STALLED
        disk.answers.set()
        order(3, "silent")
        wait_for(3)
        while disk.replies[3] is not None:  # The reader may be at what was given up.
            order(3, "silent")
            manager.turn()
            time.sleep(0.005)
        deadline = time.monotonic() + 30
        while manager.sizes()["adapter_stalls"] > 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        disk.answers.set()
        disk.is_over.set()
        manager.close()
