"""Workers whose role changes while they serve."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import on
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), on("both")]
NUM_NEW, NUM_CLIENTS = 24, 4
BOTH = worker_pb2.WORKER_ROLE_BOTH
WORKERS = ("worker-0", "worker-1", "worker-2")


def prompt(length: int = 70) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


async def set_role(mesh: TinyMesh, *arguments: str) -> tuple[int, str]:
    """Exit status and output of `weft role`."""
    command = [*WEFT, "role", *arguments, "--state-dir", str(mesh.state)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=90
    )
    return done.returncode, done.stdout + done.stderr


class Load:
    """Clients that ask one request after the other, and what they were answered."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.answers: list[tuple[list[int], Answer]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        over = asyncio.Event()

        async def client() -> None:
            while not over.is_set():
                asked = prompt()
                answer = await self._caller.grpc(Ask(asked, NUM_NEW, ignore_eos=True))
                self.answers.append((asked, answer))

        clients = [asyncio.create_task(client()) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)

    async def more(self, count: int) -> list[Answer]:
        """Answers to the next requests that begin after this call."""
        seen = len(self.answers) + NUM_CLIENTS
        async with asyncio.timeout(120):
            while len(self.answers) < seen + count:
                await asyncio.sleep(0.02)
        return [answer for _, answer in self.answers[seen : seen + count]]


def owners(answers: list[Answer]) -> set[str]:
    return {answer.timeline.worker_id for answer in answers}


def fillers(answers: list[Answer]) -> set[str]:
    return {
        fill.worker_id for answer in answers for fill in answer.timeline.fills if not fill.failure
    }


async def test_roles_change_under_load_and_nothing_is_lost(mesh: TinyMesh) -> None:
    epochs = {name: mesh.load(name).epoch for name in WORKERS}
    greedy = Greedy(mesh.model_dir)
    async with Caller(mesh) as caller:
        load = Load(caller)
        async with load.running():
            first = await load.more(12)
            # A worker does not fill its own pages.
            for answer in first:
                assert answer.timeline.worker_id not in fillers([answer])
            assert owners(first) | fillers(first) <= set(WORKERS)
            for name, role in zip(WORKERS, ("prefill", "decode", "decode"), strict=True):
                status, told = await set_role(mesh, name, role, "--prove", "60")
                assert (status, told) == (*(0, f"{name}: {role} (was both); shown by its work\n"),)
            apart = await load.more(12)
            assert owners(apart) == {"worker-1", "worker-2"}
            assert fillers(apart) == {"worker-0"}
            # Two of the three change places.
            assert (await set_role(mesh, "worker-0", "decode"))[0] == 0
            assert (await set_role(mesh, "worker-1", "prefill", "--prove", "60"))[0] == 0
            swapped = await load.more(12)
            assert owners(swapped) == {"worker-0", "worker-2"}
            assert fillers(swapped) == {"worker-1"}
        for asked, answer in load.answers:
            assert answer.timeline.lost_attempts == []
            assert answer.token_ids is not None
            greedy.check(asked, answer.token_ids, NUM_NEW)
    assert {name: mesh.load(name).epoch for name in WORKERS} == epochs


async def test_pages_stay_over_a_change(mesh: TinyMesh) -> None:
    for name, role in zip(WORKERS, ("prefill", "decode", "prefill"), strict=True):
        assert (await set_role(mesh, name, role))[0] == 0
    async with Caller(mesh) as caller:
        ask = Ask(prompt(160), 2, new_salt(), ignore_eos=True)
        assert (await caller.grpc(ask)).timeline.worker_id == "worker-1"
        for role in ("prefill", "decode"):
            assert (await set_role(mesh, "worker-1", role, "--force"))[0] == 0
        again = await caller.grpc(ask)
    assert again.timeline.worker_id == "worker-1"
    assert again.cached_tokens >= 144


async def test_a_role_ends_with_its_lease(mesh: TinyMesh) -> None:
    assert (await set_role(mesh, "worker-2", "both"))[0] == 0
    status, told = await set_role(mesh, "worker-2", "prefill", "--lease", "1")
    assert status == 0
    assert told.startswith("worker-2: prefill (was both), for ")
    async with asyncio.timeout(30):
        while mesh.load_now("worker-2").role.role != worker_pb2.WORKER_ROLE_BOTH:
            await asyncio.sleep(0.05)


async def test_the_last_decode_worker_stays(mesh: TinyMesh) -> None:
    for name, role in zip(WORKERS, ("decode", "prefill", "prefill"), strict=True):
        assert (await set_role(mesh, name, role))[0] == 0
    status, told = await set_role(mesh, "worker-0", "prefill")
    assert status == 1
    assert f"worker-0 is the last worker that decodes for {MODEL}" in told
    assert (await set_role(mesh, "kvstore-9", "prefill"))[0] == 1


async def test_a_planner_gives_workers_roles_and_its_end_takes_them_back(
    mesh: TinyMesh, tmp_path: Path
) -> None:
    for name in WORKERS:
        assert (await set_role(mesh, name, "both"))[0] == 0
    command = [
        *(*WEFT, "serve", "planner", "--gateway", mesh.service("gateway")["admin_address"]),
        *("--admin-token-file", str(mesh.state / "admin-token"), "--planner-id", "planner-0"),
        *("--act", "roles", "--first-token-s", "5", "--inter-token-s", "2", "--interval-s", "1"),
        *("--calm-s", "10"),
    ]
    log = tmp_path / "planner.log"
    with log.open("wb") as out:
        planner = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
    try:
        async with Caller(mesh) as caller:
            load = Load(caller)
            async with load.running(), asyncio.timeout(120):
                roles: set[int] = set()
                # Of three workers one is enough for prompts, and the others decode.
                while roles != {worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE}:
                    roles = {mesh.load(name).role.role for name in WORKERS}
                    await asyncio.sleep(0.2)
            for _, answer in load.answers:
                assert answer.timeline.lost_attempts == []
        planner.terminate()
        assert await planner.wait() == 0, log.read_text()
        async with asyncio.timeout(60):
            while {mesh.load_now(one).role.role for one in WORKERS} != {BOTH}:
                await asyncio.sleep(0.2)
    finally:
        if planner.returncode is None:
            planner.kill()
