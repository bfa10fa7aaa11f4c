"""Workers of `weft up` that a planner and `weft scale` start and end, under load."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller
from weft.testing.meshes.secure_mesh import SecureMesh
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1 import mesh_pb2, mesh_pb2_grpc

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
NUM_NEW, NUM_CLIENTS = 24, 3


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[TinyMesh]:
    mesh = TinyMesh(tmp_path, "--both", "1", "--max-workers", "3")
    try:
        mesh.wait_ready()
        yield mesh
    finally:
        assert mesh.stop() == 0, mesh.text


async def scale(mesh: TinyMesh, *arguments: str) -> str:
    command = [*WEFT, "scale", *arguments, "--state-dir", str(mesh.state)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def until(mesh: TinyMesh, state: str, count: int, *flags: str) -> None:
    """So many workers are in a state, and no other ones are there."""
    async with asyncio.timeout(240):
        while (told := await scale(mesh, *flags)).count(state) != count or told.count(
            "worker-"
        ) != count:
            await asyncio.sleep(0.5)


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, caller: Caller, greedy: Greedy) -> None:
        self._caller = caller
        self._greedy = greedy
        self.answers: list[tuple[list[int], Answer]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                asked = [random.randrange(3, VOCAB) for _ in range(70)]
                self.answers.append(
                    (asked, await self._caller.grpc(Ask(asked, NUM_NEW, ignore_eos=True)))
                )

        clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)

    def check(self) -> None:
        """Each request was answered, with the model's text."""
        assert self.answers
        for asked, answer in self.answers:
            assert answer.token_ids is not None
            self._greedy.check(asked, answer.token_ids, NUM_NEW)


async def test_workers_come_and_go_under_load(mesh: TinyMesh) -> None:
    async with Caller(mesh) as caller:
        load = Load(caller, Greedy(mesh.model_dir))
        async with load.running():
            await scale(mesh, "--both", "3")
            await until(mesh, "serving", 3)
            seen = len(load.answers)
            async with asyncio.timeout(120):
                while len({a.timeline.worker_id for _, a in load.answers[seen:]}) < 2:
                    await asyncio.sleep(0.1)
            await scale(mesh, "--both", "1")
            await until(mesh, "serving", 1)
        load.check()


async def holder(mesh: TinyMesh) -> str:
    """Id of the planner that may act; empty: none."""
    gateway = mesh.service("gateway")["admin_address"]
    token = (mesh.state / "admin-token").read_text().strip()
    async with grpc.aio.insecure_channel(gateway) as channel:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)
        call = stub.WatchMesh(
            mesh_pb2.WatchMeshRequest(), metadata=(("authorization", f"Bearer {token}"),)
        )
        message = await call.read()
        call.cancel()
    return next((plan.planner_id for plan in message.plans if plan.acts), "")


async def test_another_planner_acts_when_one_is_killed(mesh: TinyMesh, tmp_path: Path) -> None:
    """kill -9 of the one that acts, under load: no request is lost, and orders go on."""
    command = [
        *(*WEFT, "serve", "planner", "--gateway", mesh.service("gateway")["admin_address"]),
        *("--admin-token-file", str(mesh.state / "admin-token"), "--act", "processes,roles"),
        *("--supervisor-file", str(mesh.state / "supervisor.json"), "--interval-s", "1"),
        *("--first-token-s", "5", "--inter-token-s", "2", "--calm-s", "600"),
    ]
    planners: dict[str, asyncio.subprocess.Process] = {}
    async with Caller(mesh) as caller:
        load = Load(caller, Greedy(mesh.model_dir))
        try:
            async with load.running(), asyncio.timeout(400):
                for name in ("planner-a", "planner-b"):
                    with (tmp_path / f"{name}.log").open("wb") as log:
                        planners[name] = await asyncio.create_subprocess_exec(
                            *command, "--planner-id", name, stdout=log, stderr=log
                        )
                while not (first := await holder(mesh)):
                    await asyncio.sleep(0.5)
                # A worker of each role: one more than there is.
                await until(mesh, "serving", 2)
                planners[first].kill()
                other = next(name for name in planners if name != first)
                while await holder(mesh) != other:
                    await asyncio.sleep(0.5)
                # What a person orders is told as such, and the one that acts goes on from it.
                await scale(mesh, "--both", "3")
                await until(mesh, "serving", 3)
            load.check()
        finally:
            for planner in planners.values():
                if planner.returncode is None:
                    planner.terminate()
                await planner.wait()


async def test_over_tls_workers_of_both_roles_are_alive_and_take_orders(
    tmp_path: Path, rest_binary: Path
) -> None:
    """Their certificate names two services, and none is called worker."""
    mesh = SecureMesh(
        tmp_path, workers=("--both", "1", "--max-workers", "2", "--stall-timeout-s", "10")
    )
    flags = ("--tls-dir", str(mesh.tls))
    try:
        await asyncio.to_thread(mesh.wait_ready)
        greedy = Greedy(mesh.model_dir)
        await scale(mesh, "--both", "2", *flags)
        await until(mesh, "serving", 2, *flags)
        for role in ("prefill", "both"):
            command = ["role", "worker-1", role, "--state-dir", str(mesh.state)]
            done = await asyncio.to_thread(mesh.weft, *command)
            assert done.returncode == 0, done.stderr
            prompt = greedy.prompt(70, 8)
            text = await asyncio.to_thread(mesh.complete, prompt, 8)
            assert text == greedy.text(greedy.ids(prompt, 8))
        # Longer than one that does not answer would live.
        await asyncio.sleep(12)
        await scale(mesh, "--both", "1", *flags)
        await until(mesh, "serving", 1, *flags)
    finally:
        assert mesh.stop() == 0, mesh.text
    assert "died" not in mesh.text
