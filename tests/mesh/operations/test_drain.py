"""Workers that an operator takes out of service and puts back, by the command line."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess

import grpc
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import WorkerNotFound
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import on
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh
from weft.v1 import gateway_pb2

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(300), on("pairs")]
DECODE = ("decode-0", "decode-1")
SLOW = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=0.1)
NUM_SLOW, NUM_HANDED = 1000, 300


def short() -> Ask:
    return Ask([random.randrange(3, VOCAB) for _ in range(40)], 2, new_salt(), ignore_eos=True)


async def weft(mesh: TinyMesh, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    command = [*WEFT, *arguments, "--address", mesh.grpc_address]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


async def until_ill(caller: Caller, names: set[str]) -> None:
    """Returns once the gateway takes these workers, and no others, for unhealthy."""
    async with asyncio.timeout(30):
        while True:
            fleet = await caller.stub.GetFleet(gateway_pb2.GetFleetRequest())
            if {worker.worker_id for worker in fleet.workers if not worker.healthy} == names:
                return
            await asyncio.sleep(0.05)


async def test_a_drained_worker_ends_its_streams_and_waits_to_be_put_back(mesh: TinyMesh) -> None:
    for name in DECODE:
        mesh.arm(name, SLOW)
    try:
        async with Caller(mesh) as caller:
            ask = Ask(short().prompt, NUM_SLOW, new_salt(), ignore_eos=True)
            stream = asyncio.create_task(caller.grpc(ask))
            running = lambda name: mesh.load(name).running_requests  # noqa: E731
            await asyncio.to_thread(wait_until, lambda: any(map(running, DECODE)), 60)
            drained = next(name for name in DECODE if running(name))
            other = DECODE[1 - DECODE.index(drained)]
            mesh.disarm(other, SLOW.point)

            waiting = asyncio.create_task(weft(mesh, "drain", drained))
            await asyncio.to_thread(wait_until, lambda: mesh.load(drained).draining, 60)
            told = "takes requests again"
            assert await weft(mesh, "undrain", drained) == (0, f"{drained}: {told}\n")
            assert await waiting == (1, f"{drained}: {told}; it was put back meanwhile\n")

            assert await weft(mesh, "drain", drained, "--timeout", "0") == (
                *(1, f"{drained}: takes no new requests; still there: 1 request\n"),
            )
            await until_ill(caller, {drained})
            _, shown = await weft(mesh, "status", "--json")
            seen = {worker["worker_id"]: worker for worker in json.loads(shown)["workers"]}
            assert (seen[drained]["healthy"], seen[drained]["problem"]) == (False, "draining")
            assert seen[other]["healthy"]
            answers = [await caller.grpc(short()) for _ in range(4)]
            assert {answer.timeline.worker_id for answer in answers} == {other}
            assert not stream.done()

            mesh.disarm(drained, SLOW.point)
            assert await weft(mesh, "drain", drained) == (0, f"{drained}: drained\n")
            answer = await stream
            assert (answer.completion_tokens, answer.timeline.lost_attempts) == (NUM_SLOW, [])
            assert answer.timeline.worker_id == drained

            assert await weft(mesh, "undrain", drained) == (0, f"{drained}: {told}\n")
            await asyncio.to_thread(mesh.wait_healthy)
            answers = [await caller.grpc(short()) for _ in range(4)]
            assert {answer.timeline.worker_id for answer in answers} == set(DECODE)
            assert await weft(mesh, "undrain", drained) == (0, f"{drained}: was not draining\n")
    finally:
        mesh.disarm_all()


async def test_a_drained_prefill_worker_fills_nothing(mesh: TinyMesh) -> None:
    try:
        assert await weft(mesh, "drain", "prefill-0") == (0, "prefill-0: drained\n")
        async with Caller(mesh) as caller:
            # The gateway learns of it, and that the other one is well, by load reports.
            await until_ill(caller, {"prefill-0"})
            fills = (await caller.grpc(short())).timeline.fills
            assert [(fill.worker_id, fill.failure) for fill in fills] == [("prefill-1", "")]
        last = f"weft drain: no other prefill worker serves {MODEL}\n"
        assert await weft(mesh, "drain", "prefill-1") == (0, f"prefill-1: drained\n{last}")
    finally:
        for name in ("prefill-0", "prefill-1"):
            assert (await weft(mesh, "undrain", name))[0] == 0
        await asyncio.to_thread(mesh.wait_healthy)


async def test_drained_requests_can_go_on_elsewhere(mesh: TinyMesh) -> None:
    for name in DECODE:
        mesh.arm(name, SLOW)
    try:
        async with Caller(mesh) as caller:
            stream = asyncio.create_task(
                caller.grpc(Ask(short().prompt, NUM_HANDED, ignore_eos=True))
            )
            running = lambda name: mesh.load(name).running_requests  # noqa: E731
            await asyncio.to_thread(wait_until, lambda: any(map(running, DECODE)), 60)
            drained = next(name for name in DECODE if running(name))
            flags = ("--timeout", "0", "--hand-back")
            assert await weft(mesh, "drain", drained, *flags) == (0, f"{drained}: drained\n")
            mesh.disarm_all()
            answer = await stream
            (lost,) = answer.timeline.lost_attempts
            assert (lost.worker_id, lost.code) == (drained, "DRAINING")
            assert answer.completion_tokens == NUM_HANDED
    finally:
        mesh.disarm_all()
        await weft(mesh, "undrain", drained)


async def test_a_worker_that_is_not_there_is_told(mesh: TinyMesh) -> None:
    for command in ("drain", "undrain"):
        status, told = await weft(mesh, command, "decode-9")
        known = "decode-0, decode-1, prefill-0, prefill-1"
        assert (status, told) == (1, f"weft {command}: no worker 'decode-9'; there are: {known}\n")
    async with Caller(mesh) as caller:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caller.stub.DrainWorker(gateway_pb2.DrainWorkerRequest(worker_id="kvstore-0"))
    error = from_rpc_error(caught.value)
    assert isinstance(error, WorkerNotFound)
    assert (error.grpc_code, error.param) == ("NOT_FOUND", "worker_id")
