"""How a worker follows the registry: its orders to the engine, and what it tells of the answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.common.adapters.manifest import Entry, Manifest
from weft.common.adapters.registry import MANIFEST, Registry, Stamp
from weft.common.worker import adapters as module
from weft.common.worker import change_log
from weft.common.worker.adapters import AdapterFollower
from weft.contract.adapters import AdapterOrder, AdapterReply, AdapterState
from weft.contract.messages import Inbox, Outbox
from weft.contract.submits import Failure
from weft.v1 import worker_pb2

ONE, TWO = b"\1" * 32, b"\2" * 32
POLL_S = 0.01


class Engine:
    """Notes orders; the test answers them."""

    def __init__(self, root: Path) -> None:
        self.orders: list[AdapterOrder] = []
        self._states: dict[bytes, AdapterState] = {}
        self.follower = AdapterFollower(Registry(root), "tiny", self._send, POLL_S)

    def _send(self, inbox: Inbox) -> None:
        self.orders += inbox.adapter_orders

    def answer(self, order: AdapterOrder, problem: str = "") -> None:
        failure = Failure(reason="ADAPTER_INVALID", message=problem) if problem else None
        reply = AdapterReply(query=order.query, failure=failure)
        self.follower.on_outbox(Outbox(adapter_replies=[reply]))

    def report(self, *states: AdapterState) -> None:
        """It has these adapters and no others."""
        now = {state.digest: state for state in states}
        gone = [digest for digest in self._states if digest not in now]
        changed = [state for state in states if self._states.get(state.digest) != state]
        self._states = now
        load: Any = SimpleNamespace(adapters=changed, gone_adapters=gone)
        self.follower.on_outbox(Outbox(load=load))

    def statuses(self) -> dict[bytes, tuple[str, str]]:
        """State and error of each content."""
        return {
            one.adapter.digest: (
                worker_pb2.AdapterState.Name(one.state).removeprefix("ADAPTER_STATE_").lower(),
                one.error,
            )
            for one in self.follower.statuses()
        }

    async def until(self, count: int) -> None:
        """Returns once there were so many orders."""
        async with asyncio.timeout(30):
            while len(self.orders) < count:
                await asyncio.sleep(0.002)

    async def followed(self, generation: int) -> None:
        async with asyncio.timeout(30):
            while self.follower.generation < generation:
                await asyncio.sleep(0.002)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(tmp_path)
    task = asyncio.create_task(engine.follower.run())
    yield engine
    assert not task.done()
    task.cancel()


def write(root: Path, *entries: tuple[str, bytes, dict[str, Any]]) -> int:
    """Makes these the registry's entries; its generation."""

    def change(old: Manifest) -> Manifest:
        made = [
            Entry(
                name=name,
                digest=digest.hex(),
                path="x",
                created=0.0,
                **{"model": "tiny", "state": "serving", "generation": 1, **more},
            )
            for name, digest, more in entries
        ]
        return old._with(made)

    return Registry(root).change(change).generation


async def test_states_can_be_walked_while_they_change(engine: Engine) -> None:
    """Metrics are collected in a thread."""
    first, second = (AdapterState(digest=one, name="a", state="device") for one in (ONE, TWO))
    engine.report(first)
    walk = iter(engine.follower.states)
    engine.report(second)
    assert [*walk] == [first]
    assert [*engine.follower.states] == [second]


async def test_it_loads_what_is_registered_for_its_model(engine: Engine, tmp_path: Path) -> None:
    generation = write(
        tmp_path,
        ("a", ONE, {"is_pinned": True}),
        ("b", TWO, {"state": "loading"}),
        ("c", b"\3" * 32, {"model": "another"}),
    )
    await engine.followed(generation)
    told = {order.digest: (order.action, order.name, order.is_pinned) for order in engine.orders}
    assert told == {ONE: ("load", "a", True), TWO: ("load", "b", False)}
    assert engine.orders[0].directory == str(tmp_path / ".weft" / ONE.hex())
    assert engine.statuses() == {ONE: ("loading", ""), TWO: ("loading", "")}
    engine.answer(engine.orders[0])
    assert engine.statuses()[ONE] == ("host", "")
    engine.report(AdapterState(digest=ONE, name="a", state="device", rank=4, num_requests=3))
    (status,) = [s for s in engine.follower.statuses() if s.adapter.digest == ONE]
    assert (status.state, status.rank, status.num_requests) == (
        worker_pb2.ADAPTER_STATE_DEVICE,
        4,
        3,
    )


async def test_what_is_dropped_is_unloaded_and_told_until_it_is_gone(
    engine: Engine, tmp_path: Path
) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    engine.report(AdapterState(digest=ONE, name="a", state="device", num_requests=2))
    write(tmp_path, ("b", TWO, {}))
    await engine.until(3)
    assert [(order.action, order.digest) for order in engine.orders[1:]] == [
        ("unload", ONE),
        ("load", TWO),
    ]
    leaving = {s.adapter.digest: s for s in engine.follower.statuses()}[ONE]
    assert leaving.unloading
    assert leaving.num_requests == 2
    engine.report()
    assert engine.statuses().keys() == {TWO}


async def test_an_old_report_does_not_make_a_new_load_look_held(
    engine: Engine, tmp_path: Path
) -> None:
    """The engine has dropped it in between; its report is from before."""
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    engine.report(AdapterState(digest=ONE, name="a", state="device"))
    write(tmp_path)
    await engine.until(2)
    write(tmp_path, ("a", ONE, {"generation": 3}))
    await engine.until(3)
    assert engine.statuses() == {ONE: ("loading", "")}


async def test_a_failed_load_is_told_and_tried_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.05)
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0], f"adapter a ({engine.orders[0].directory}): no room")
    assert engine.statuses() == {ONE: ("failed", "adapter a: no room")}
    await engine.until(2)
    assert engine.statuses() == {ONE: ("loading", "")}
    engine.answer(engine.orders[1])
    assert engine.statuses() == {ONE: ("host", "")}


async def test_of_a_copy_it_says_what_is_wrong_and_not_where(
    engine: Engine, tmp_path: Path
) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0], f"adapter {engine.orders[0].directory}: a tensor is missing")
    assert engine.statuses() == {ONE: ("failed", "its copy: a tensor is missing")}


async def test_content_that_is_registered_anew_is_tried_at_once(
    engine: Engine, tmp_path: Path
) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0], "no room")
    generation = write(tmp_path, ("a", ONE, {"generation": 5}))
    await engine.followed(generation)
    await engine.until(2)
    assert engine.statuses() == {ONE: ("loading", "")}


async def test_a_second_name_does_not_disturb_the_first(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    write(tmp_path, ("a", ONE, {}), ("b", ONE, {"generation": 2, "is_pinned": True}))
    await engine.until(2)
    assert engine.statuses() == {ONE: ("host", "")}, "served meanwhile"
    engine.answer(engine.orders[1], "there is no room for a pinned one more")
    assert engine.statuses() == {ONE: ("host", "there is no room for a pinned one more")}
    write(tmp_path, ("a", ONE, {}))
    await engine.until(3)
    engine.answer(engine.orders[2])
    assert engine.statuses() == {ONE: ("host", "")}
    assert {order.action for order in engine.orders} == {"load"}


async def test_what_failed_before_says_nothing_of_a_new_try(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.report(AdapterState(digest=ONE, name="a", state="failed", error="no room"))
    engine.answer(engine.orders[0], "no room")
    write(tmp_path, ("a", ONE, {"generation": 2}))
    await engine.until(2)
    engine.answer(engine.orders[1])
    assert engine.statuses() == {ONE: ("host", "")}
    # And where it stays as it was, until the answer comes.
    write(tmp_path, ("a", ONE, {"generation": 3, "is_pinned": True}))
    await engine.until(3)
    engine.answer(engine.orders[2], "no room for a pinned one")
    write(tmp_path, ("a", ONE, {"generation": 4, "is_pinned": True}))
    await engine.until(4)
    assert engine.statuses() == {ONE: ("host", "")}
    engine.answer(engine.orders[3])
    engine.report(AdapterState(digest=ONE, name="a", state="device", is_pinned=True))
    (status,) = engine.follower.statuses()
    assert status.pinned


async def test_what_is_retired_is_pinned_no_more(engine: Engine, tmp_path: Path) -> None:
    """Its place is for what is loaded next."""
    write(tmp_path, ("a", ONE, {"is_pinned": True}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    write(
        tmp_path,
        ("a", ONE, {"is_pinned": True, "state": "retired"}),
        ("b", TWO, {"generation": 2, "is_pinned": True, "state": "loading"}),
    )
    await engine.until(3)
    told = [(order.digest, order.action, order.is_pinned) for order in engine.orders]
    assert told == [(ONE, "load", True), (ONE, "load", False), (TWO, "load", True)]


async def test_what_the_engine_loses_later_has_failed(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    engine.report(AdapterState(digest=ONE, name="a", state="failed", error="device error"))
    assert engine.statuses() == {ONE: ("failed", "device error")}


async def test_a_broken_registry_leaves_things_as_they_are(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path, ("a", ONE, {}))
    await engine.until(1)
    engine.answer(engine.orders[0])
    good = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_text("{")
    await asyncio.sleep(5 * POLL_S)
    assert engine.statuses() == {ONE: ("host", "")}
    (tmp_path / MANIFEST).write_bytes(good)
    generation = write(tmp_path, ("b", TWO, {}))
    await engine.followed(generation)
    await engine.until(3)


async def test_a_registry_that_goes_away_leaves_things_as_they_are(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its volume is not mounted any more."""
    await engine.followed(write(tmp_path, ("a", ONE, {})))
    engine.answer(engine.orders[0])
    num_looks, stamp = 0, Registry.stamp

    def counted(registry: Registry) -> Stamp:
        nonlocal num_looks
        num_looks += 1
        return stamp(registry)

    monkeypatch.setattr(Registry, "stamp", counted)
    (tmp_path / MANIFEST).rename(tmp_path / "away")
    async with asyncio.timeout(30):
        while num_looks < 3:  # The first ones may have begun before.
            await asyncio.sleep(POLL_S)
    assert engine.statuses() == {ONE: ("host", "")}
    (tmp_path / "away").rename(tmp_path / MANIFEST)
    await engine.followed(write(tmp_path, ("a", ONE, {}), ("b", TWO, {})))
    assert [order.action for order in engine.orders] == ["load", "load"]


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "MAX_GONE", 5)


async def test_news_are_what_has_changed(short_log: None, engine: Engine, tmp_path: Path) -> None:
    """Whoever adds them to what was told before has what the follower tells in full."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    known: dict[bytes, worker_pb2.AdapterStatus] = {}
    told: int | None = None
    states: dict[bytes, AdapterState] = {}
    num_whole = 0
    for turn in range(400):
        digest = rng.randbytes(32)
        if states and rng.random() < 0.45:
            states.pop(rng.choice(list(states)))
        else:
            if states and rng.random() < 0.3:
                digest = rng.choice(list(states))
            count = rng.randrange(3)
            states[digest] = AdapterState(digest=digest, name="a", state="host", num_requests=count)
        engine.report(*states.values())
        if turn % 40 == 0:
            chosen = [(f"n{byte}", bytes([byte]) * 32, {}) for byte in rng.sample(range(200), 4)]
            await engine.followed(write(tmp_path, *chosen))
        if rng.random() < 0.5 or 200 < turn < 300:  # Once it does not listen for long.
            continue
        news = engine.follower.news(told)
        told = news.sequence
        num_whole += news.is_all
        if news.is_all:
            known = {}
        assert not {one.adapter.digest for one in news.statuses} & set(news.gone)
        known |= {one.adapter.digest: one for one in news.statuses}
        for gone in news.gone:
            known.pop(gone, None)
        assert known == {one.adapter.digest: one for one in engine.follower.statuses()}
        assert not engine.follower.news(told).statuses
    assert 1 < num_whole < 50, "most is told as changes, what is too long ago as a whole"
