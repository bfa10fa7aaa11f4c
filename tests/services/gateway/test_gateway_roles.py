"""Workers of both roles, listed in either."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from weft.contract.errors import RoleFixed
from weft.gateway.api.worker_calls import WorkerCalls
from weft.gateway.console.members import describe_worker
from weft.gateway.fleet.discovery import Endpoint, StaticDiscovery
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, mesh_pb2, worker_pb2

BOTH = worker_pb2.WORKER_ROLE_BOTH
PREFILL = worker_pb2.WORKER_ROLE_PREFILL
DECODE = worker_pb2.WORKER_ROLE_DECODE
NUM_WORKERS = 3


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 3])


class Listing:
    """Names workers with both roles, once it knows them."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self._known = asyncio.Event()

    def tell(self, workers: list[FakeWorker]) -> None:
        for worker in workers:
            worker.role = BOTH
        self.workers = workers
        self._known.set()

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        await self._known.wait()
        addresses = [worker.address for worker in self.workers]
        async for endpoints in StaticDiscovery(addresses, addresses).watch():
            yield endpoints


def set_role(worker: FakeWorker, role: worker_pb2.WorkerRole.ValueType) -> None:
    changes = 1 if worker.role_now is None else worker.role_now.changes + 1
    worker.role_now = worker_pb2.RoleState(role=role, changes=changes)


async def ask(mesh: Harness) -> None:
    ids = [5 + secrets.randbelow(200) for _ in range(100)]
    request = gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=ids))
    request.stop.max_tokens = 3
    last = [message async for message in mesh.typed.Complete(request)][-1]
    assert last.choices[0].finish_reason


def may(mesh: Harness, role: str) -> set[str]:
    """Ids of the workers that may get work of a role."""
    now = asyncio.get_running_loop().time()
    workers = mesh.app.fleet.workers(role)  # type: ignore[arg-type]
    return {one.info.worker_id for one in workers if one.info and not one.problem(now)}


async def test_the_role_decides_what_a_worker_gets(tmp_path: Path) -> None:
    listing = Listing()
    async with gateway(
        tmp_path, script, num_decode=NUM_WORKERS, discovery=listing, wait=False
    ) as mesh:
        listing.tell(mesh.workers)
        names = {worker.worker_id for worker in mesh.workers}
        await mesh.wait(lambda: may(mesh, "decode") == may(mesh, "prefill") == names)
        for _ in range(12):
            await ask(mesh)
        for worker in mesh.workers:
            for submit in worker.submits:
                candidates = {one.worker_id for one in submit.prefill_candidates}
                assert candidates, "others may fill"
                assert worker.worker_id not in candidates

        first, second, third = mesh.workers
        set_role(first, PREFILL)
        set_role(second, DECODE)
        set_role(third, DECODE)
        await mesh.wait(lambda: may(mesh, "prefill") == {first.worker_id})
        await mesh.wait(lambda: may(mesh, "decode") == names - {first.worker_id})
        for worker in mesh.workers:
            worker.submits.clear()
        for _ in range(12):
            await ask(mesh)
        assert first.submits == []
        told = [one for worker in (second, third) for one in worker.submits]
        assert len(told) == 12
        assert {one.prefill_candidates[0].worker_id for one in told} == {first.worker_id}

        # Each is one member, sound whatever its role is.
        now = asyncio.get_running_loop().time()
        members = [describe_worker(one, now) for one in mesh.app.fleet.workers()]
        assert {one.member_id: one.role for one in members} == {
            first.worker_id: mesh_pb2.MEMBER_ROLE_PREFILL,
            second.worker_id: mesh_pb2.MEMBER_ROLE_DECODE,
            third.worker_id: mesh_pb2.MEMBER_ROLE_DECODE,
        }
        assert all(one.healthy and one.role_state.changes == 1 for one in members)


async def test_one_worker_must_decode(tmp_path: Path) -> None:
    listing = Listing()
    async with gateway(tmp_path, script, num_decode=2, discovery=listing, wait=False) as mesh:
        listing.tell(mesh.workers)
        await mesh.wait(lambda: len(may(mesh, "decode")) == 2)
        calls = WorkerCalls(mesh.app.fleet, False)
        first, second = mesh.workers
        calls.check_decodes_without(first.worker_id)
        set_role(second, PREFILL)
        await mesh.wait(lambda: may(mesh, "decode") == {first.worker_id})
        with pytest.raises(RoleFixed, match="last worker that decodes"):
            calls.check_decodes_without(first.worker_id)
        set_role(first, PREFILL)
        await mesh.wait(lambda: not may(mesh, "decode"))
        served = mesh.app.catalogue.base(first.model)
        assert "decode" in served.problem()


async def test_the_next_order_knows_a_role_that_was_just_set(tmp_path: Path) -> None:
    """Reports, which come later, would have told it."""
    listing = Listing()
    async with gateway(tmp_path, script, num_decode=2, discovery=listing, wait=False) as mesh:
        first, second = mesh.workers
        set_role(first, PREFILL)
        set_role(second, DECODE)
        listing.tell(mesh.workers)
        await mesh.wait(
            lambda: sum(bool(one.report) for one in mesh.app.fleet.workers("decode")) == 2
        )
        assert may(mesh, "decode") == {second.worker_id}
        calls = WorkerCalls(mesh.app.fleet, False)
        with pytest.raises(RoleFixed):
            calls.check_decodes_without(second.worker_id)
        set_role(first, DECODE)
        assert first.role_now is not None
        calls.take_role(first.worker_id, first.role_now)
        calls.check_decodes_without(second.worker_id)
        for worker in mesh.app.fleet.workers("decode"):
            if worker.info is not None and worker.info.worker_id == first.worker_id:
                assert worker.report is not None
                late = worker_pb2.WatchLoadResponse()
                late.CopyFrom(worker.report)
                late.role.CopyFrom(worker_pb2.RoleState(role=PREFILL, changes=1))
                worker._take(late)
        calls.check_decodes_without(second.worker_id)


async def test_a_worker_of_one_role_is_refused_in_the_other(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, discovery=(listing := Listing()), wait=False) as mesh:
        listing.tell(mesh.workers)
        mesh.workers[0].role = DECODE
        await mesh.wait(lambda: may(mesh, "decode") == {"decode-0"})
        endpoint = Endpoint("prefill", mesh.workers[0].address)
        (twin,) = (one for one in mesh.app.fleet.workers("prefill") if one.endpoint == endpoint)
        now = asyncio.get_running_loop().time()
        await mesh.wait(lambda: "not a prefill worker" in twin.problem(now))
