"""Workers of `weft up` that come and go by order: slots, drains, and who may order what."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from weft.cli.up.elastic import ElasticWorkers, Ordered
from weft.cli.up.orders import serving
from weft.cli.up.plan import ModelWorkers, PlannedWorker, Slot
from weft.cli.up.process import ServiceSpec
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ConfigError, InvalidRequest, ModelNotFound, Starting
from weft.planner.actuators.processes import ProcessActuator
from weft.planner.forecast import Counts
from weft.v1 import mesh_pb2, supervisor_pb2, supervisor_pb2_grpc

MODEL, TOKEN = "m", "an operators' token of some length"


class FakeSupervisor:
    """Services that are ready when a test says so."""

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.ready: set[str] = set()
        self.specs: dict[str, ServiceSpec] = {}
        self.is_watching = True

    def process(self, name: str) -> Any:
        return SimpleNamespace(ready=1, is_gone=False) if name in self.ready else None

    def add(self, spec: ServiceSpec) -> None:
        self.specs[spec.name] = spec

    async def remove(self, name: str, grace_s: float) -> None:
        self.ready.discard(name)
        self.specs.pop(name, None)


class Up:
    """Elastic workers over it; drains end when a test lets them."""

    def __init__(self, folder: Path, started: dict[str, str], spare: int) -> None:
        self.file = folder / "workers.json"
        self.supervisor = FakeSupervisor()
        self.supervisor.ready = set(started)
        self.drained: list[str] = []
        self.may_end = asyncio.Event()
        slots = [Slot(f"127.0.0.1:{at}", ("--device", f"cuda:{at}")) for at in range(1, 9)]
        planned = {name: PlannedWorker(role, slots.pop(0)) for name, role in started.items()}
        plan = ModelWorkers(
            model=MODEL,
            started=planned,
            spare=slots[:spare],
            make_spec=lambda role, name, slot: ServiceSpec(
                name=name,
                command=(role, *slot.place),
                ready_file=folder / "r",
                log_file=folder / "l",
            ),
            dial=lambda name, address: address,
        )
        self.addresses = {name: worker.slot.address for name, worker in planned.items()}
        self.workers = ElasticWorkers([plan], self.file, self.addresses, self._drain, 1.0)
        self.workers.begin(self.supervisor)  # type: ignore[arg-type]

    async def _drain(self, name: str, address: str) -> None:
        self.drained.append(name)
        await self.may_end.wait()

    def order(self, *counts: int, end_first: tuple[str, ...] = ()) -> Ordered:
        return self.workers.order(MODEL, Ordered(*counts), "test", end_first)

    def states(self) -> dict[str, str]:
        (model,) = self.workers.show()
        return {worker.worker_id: worker.state for worker in model.workers}

    def listed(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads(self.file.read_text())
        return found

    async def until_settled(self) -> None:
        async with asyncio.timeout(30):
            while "draining" in self.states().values():
                await asyncio.sleep(0.01)


async def test_workers_start_on_slots_that_are_free(tmp_path: Path) -> None:
    up = Up(tmp_path, {"decode-0": "decode"}, spare=2)
    assert up.order(1, 2, 0) == (0, 1, 0)
    assert up.states() == {"decode-0": "serving", "prefill-0": "starting", "decode-1": "starting"}
    assert up.supervisor.specs["prefill-0"].command == ("prefill", "--device", "cuda:2")
    assert set(up.addresses) == set(up.states())
    # Gateways find them at once, and see that they start.
    assert up.listed() == {
        "decode": ["127.0.0.1:1", "127.0.0.1:3"],
        "prefill": ["127.0.0.1:2"],
    }


async def test_one_that_is_too_many_drains_before_its_slot_is_used_again(tmp_path: Path) -> None:
    up = Up(tmp_path, {"decode-0": "decode", "decode-1": "decode"}, spare=0)
    up.order(1, 1, 0, end_first=("decode-0",))
    assert up.states() == {"decode-0": "draining", "decode-1": "serving"}
    await asyncio.sleep(0)
    assert up.drained == ["decode-0"]
    # It hands over what runs on it, so gateways reach it until then.
    assert len(up.listed()["decode"]) == 2
    up.may_end.set()
    await up.until_settled()
    assert up.states() == {"decode-1": "serving", "prefill-0": "starting"}
    assert up.listed() == {"decode": ["127.0.0.1:2"], "prefill": ["127.0.0.1:1"]}


async def test_those_that_have_not_started_end_first_and_without_a_drain(tmp_path: Path) -> None:
    up = Up(tmp_path, {"worker-0": "both"}, spare=2)
    up.order(0, 0, 3)
    up.supervisor.ready.add("worker-2")
    up.order(0, 0, 2, end_first=("worker-0",))
    await up.until_settled()
    assert up.drained == []
    assert set(up.states()) == {"worker-0", "worker-2"}
    assert up.listed()["decode"] == up.listed()["prefill"]


@pytest.mark.parametrize(("before", "now"), itertools.product((1, 2, 3, 4), repeat=2))
async def test_only_so_many_end_as_are_too_many(tmp_path: Path, before: int, now: int) -> None:
    up = Up(tmp_path, {f"worker-{at}": "both" for at in range(before)}, spare=4 - before)
    up.order(0, 0, now)
    states = list(up.states().values())
    assert states.count("draining") == max(0, before - now)
    assert states.count("serving") == min(before, now)
    assert states.count("starting") == max(0, now - before)


async def test_orders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    up = Up(tmp_path, {"decode-0": "decode"}, spare=1)
    with pytest.raises(InvalidRequest, match="no worker would own requests"):
        up.order(1, 0, 0)
    with pytest.raises(InvalidRequest, match="room for 2"):
        up.order(1, 2, 0)
    with pytest.raises(ModelNotFound):
        up.workers.order("other", Ordered(0, 1, 0), "test", ())
    up.supervisor.is_watching = False
    with pytest.raises(Starting):
        up.order(0, 2, 0)
    assert up.states() == {"decode-0": "serving"}


@asynccontextmanager
async def ordering(up: Up, folder: Path) -> AsyncIterator[ProcessActuator]:
    async with serving(up.workers, TOKEN, None) as address:
        file = folder / "supervisor.json"
        file.write_text(json.dumps({"address": address}))
        yield ProcessActuator(file, TOKEN, None, "planner-0")


def member(name: str, role: mesh_pb2.MemberRole.ValueType, running: int) -> mesh_pb2.MeshMember:
    return mesh_pb2.MeshMember(member_id=name, role=role, running_requests=running)


async def test_a_planner_orders_processes(tmp_path: Path) -> None:
    up = Up(tmp_path, {"prefill-0": "prefill", "decode-0": "decode"}, spare=2)
    up.may_end.set()
    async with ordering(up, tmp_path) as actuator:
        assert await actuator.ordered(MODEL, {}) == (1, 1)
        assert await actuator.ordered("other", {}) is None
        assert await actuator.order(MODEL, Counts(1, 3), {}) == (
            "ordered 1 prefill, 3 decode (before 1 prefill, 1 decode)"
        )
        assert await actuator.order(MODEL, Counts(1, 3), {}) == ""
        assert await actuator.ordered(MODEL, {}) == (1, 3)
        # A death is told, and changes no order.
        up.supervisor.deaths["decode-1"] += 1
        assert await actuator.order(MODEL, Counts(1, 3), {}) == (
            "decode-1 died, and is started again"
        )
        # Of the role that has too many the idlest ends.
        up.supervisor.ready |= {"decode-1", "decode-2"}
        decode, prefill = mesh_pb2.MEMBER_ROLE_DECODE, mesh_pb2.MEMBER_ROLE_PREFILL
        known = [member(f"decode-{at}", decode, 5 - 2 * (at == 1)) for at in range(3)]
        known.append(member("prefill-0", prefill, 0))
        await actuator.order(MODEL, Counts(1, 2), {one.member_id: one for one in known})
        await up.until_settled()
        assert set(up.states()) == {"prefill-0", "decode-0", "decode-2"}
        # A person's order is seen as such.
        up.order(0, 1, 0)
        assert await actuator.ordered(MODEL, {}) == (0, 1)
        # What there is no room for alarms; as much as there is room for is ordered.
        await up.until_settled()
        with pytest.raises(ConfigError, match="room for 4 workers"):
            await actuator.order(MODEL, Counts(2, 6), {})
        assert await actuator.ordered(MODEL, {}) == (2, 6)
        (shown,) = up.workers.show()
        assert (shown.ordered.prefill, shown.ordered.decode) == (1, 3)
        assert shown.ordered_by == "planner-0"


async def test_workers_of_both_roles_are_ordered_by_their_number(tmp_path: Path) -> None:
    up = Up(tmp_path, {"worker-0": "both"}, spare=2)
    async with ordering(up, tmp_path) as actuator:
        workers = {"worker-0": member("worker-0", mesh_pb2.MEMBER_ROLE_BOTH, 0)}
        assert await actuator.ordered(MODEL, workers) == (0, 1)
        await actuator.order(MODEL, Counts(1, 2), workers)
        assert set(up.states()) == {"worker-0", "worker-1", "worker-2"}
        assert await actuator.ordered(MODEL, workers) == (1, 2)


async def test_orders_need_the_operators_token(tmp_path: Path) -> None:
    up = Up(tmp_path, {"decode-0": "decode"}, spare=1)
    async with (
        serving(up.workers, TOKEN, None) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = supervisor_pb2_grpc.SupervisorServiceStub(channel)
        order = supervisor_pb2.SetWorkersRequest(caller="x")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetWorkers(order, metadata=(("authorization", "Bearer wrong"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        token = (("authorization", f"Bearer {TOKEN}"),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetWorkers(order, metadata=token)
        assert from_rpc_error(caught.value).reason == "INVALID_REQUEST"
        nobody = supervisor_pb2.SetWorkersRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetWorkers(nobody, metadata=token)
        assert "caller" in (caught.value.details() or "")
