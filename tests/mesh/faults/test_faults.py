"""Processes of workers killed in the middle of work: typed errors, right text, no page lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import openai
import psutil
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import PeerUnavailable
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_calls import Answer, Ask, Caller, new_salt, num_shipped
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import MeshPrompt
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("pairs")]

ENGINE_EXIT_S = 1.0
STREAM_END_S = 2.0
"""What is promised, and printed beside what it was: a busy machine may take longer."""
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
LONG = [random.randrange(3, VOCAB) for _ in range(1500)]
SHORT = LONG[:20]
SLOW = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=0.2)
"""In force until the kill, which would come too late in a tiny model."""
HELD = FaultSpec(point="engine.step", kind="delay", count=0, skip=4, delay_s=10.0)
"""Of a prefill worker: it stands still with part of a long prompt, until it is killed."""


@pytest.fixture(autouse=True)
def no_fault_outlives_its_test(mesh: TinyMesh) -> Iterator[None]:
    yield
    mesh.disarm_all()


def is_gone(pid: int) -> bool:
    """Ended, if perhaps not waited for by whoever has become its parent."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_back(mesh: TinyMesh, name: str, epoch: int) -> bool:
    """A later incarnation of the worker is ready."""
    ready = mesh.ready_file(name)
    return ready is not None and ready["epoch"] != epoch


@contextmanager
def supervisor_stopped(mesh: TinyMesh) -> Iterator[None]:
    """Nobody restarts workers or tells of their ends."""
    mesh.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        mesh.process.send_signal(signal.SIGCONT)


class Watched:
    """Which workers a request reaches, from their counters."""

    def __init__(self, mesh: TinyMesh) -> None:
        self._mesh = mesh
        self._before = {name: mesh.counters(name) for name in (*PREFILL, *DECODE)}

    def _gained(self, name: str, counter: str) -> int:
        return self._mesh.counters(name)[counter] - self._before[name][counter]

    def filler(self) -> str | None:
        """The prefill worker that a fill has begun on, once its first pages were accepted."""
        if not any(self._gained(name, "accepted_pages") for name in DECODE):
            return None
        return next((name for name in PREFILL if self._gained(name, "leases_accepted")), None)

    def owner(self) -> str:
        """The decode worker that asked."""
        return next(name for name in DECODE if self._gained(name, "fills_started"))


async def begin_fill(mesh: TinyMesh, caller: Caller) -> tuple[asyncio.Task[Answer], str, str]:
    """Starts a long prompt; returns when part of it has arrived, with its filler and owner."""
    watched = Watched(mesh)
    for name in PREFILL:
        mesh.arm(name, HELD)
    ask = Ask(LONG, NUM_TOKENS, new_salt(), ignore_eos=True)
    task = asyncio.create_task(caller.grpc(ask))
    deadline = time.monotonic() + 60
    while (filler := await asyncio.to_thread(watched.filler)) is None:
        assert time.monotonic() < deadline
        assert not task.done(), task.result()
        await asyncio.sleep(0.02)
    return task, filler, watched.owner()


def kill_filler(mesh: TinyMesh, name: str, process: str) -> dict[str, Any]:
    """SIGKILL to a process of a prefill worker; what it was. The other worker is slow no more."""
    before = mesh.service(name)
    os.kill(before[process], signal.SIGKILL)
    mesh.disarm(PREFILL[1 - PREFILL.index(name)], HELD.point)
    return before


def check_refilled(greedy: Greedy, answer: Answer, killed: str) -> None:
    """The text is right; what the killed filler had not written came from the other one."""
    greedy.check(LONG, answer.token_ids or [], NUM_TOKENS)
    first, second = answer.timeline.fills
    other = PREFILL[1 - PREFILL.index(killed)]
    assert (first.worker_id, second.worker_id) == (killed, other)
    assert first.failure
    assert not second.failure
    assert 0 < first.accepted_tokens < num_shipped(answer.prompt_tokens)
    assert second.start_token == first.accepted_tokens
    assert first.accepted_tokens + second.accepted_tokens == num_shipped(answer.prompt_tokens)


async def test_a_killed_prefill_server_takes_its_engine_with_it(
    mesh: TinyMesh, greedy: Greedy, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Caller(mesh) as caller:
        with supervisor_stopped(mesh):
            task, filler, owner = await begin_fill(mesh, caller)
            before = kill_filler(mesh, filler, "pid")
            took_s = wait_until(lambda: is_gone(before["engine_pid"]), 30)
            assert not task.done(), "the kill came too late to show anything"
            answer = await task
            check_refilled(greedy, answer, filler)
            # Nobody has vouched for the killed process yet, however long it has been dead.
            for _ in range(8):
                assert mesh.num_quarantined(owner) > 0
                await asyncio.sleep(0.25)
    with capsys.disabled():
        print(f"\nengine of a killed server was gone after {took_s:.3f} s of {ENGINE_EXIT_S}")
    wait_until(lambda: mesh.num_quarantined(owner) == 0, 30)
    wait_until(lambda: is_back(mesh, filler, before["epoch"]), 120, lambda: mesh.text)


async def test_a_killed_prefill_engine_takes_its_server_with_it(
    mesh: TinyMesh, greedy: Greedy
) -> None:
    async with Caller(mesh) as caller:
        task, filler, owner = await begin_fill(mesh, caller)
        before = kill_filler(mesh, filler, "engine_pid")
        assert not task.done(), "the kill came too late to show anything"
        answer = await task
    check_refilled(greedy, answer, filler)
    wait_until(lambda: is_gone(before["pid"]), 30)
    wait_until(lambda: is_back(mesh, filler, before["epoch"]), 120, lambda: mesh.text)
    wait_until(lambda: mesh.num_quarantined(owner) == 0, 30)


# ---- decode workers ----------------------------------------------------------------------------

STORY = "Tell me a very long story."
MAX_TOKENS = 1500
"""Five minutes' work for a slow worker."""


class Stream:
    """A long answer being read; knows when and how it ended."""

    def __init__(self, face: str, chunks: AsyncIterator[object]) -> None:
        self.face = face
        self._chunks = chunks
        self.num_chunks = 0
        self.ended_at_s = 0.0
        self.error: Exception | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for _ in self._chunks:
                self.num_chunks += 1
        except (grpc.aio.AioRpcError, openai.APIError) as error:
            self.error = error
        self.ended_at_s = time.monotonic()


class Client:
    """Opens long answers over both faces."""

    def __init__(self, mesh: TinyMesh, caller: Caller) -> None:
        self._caller = caller
        self._model = mesh.model
        self.sdk = openai.AsyncOpenAI(
            base_url=f"{mesh.url}/v1", api_key="-", max_retries=0, timeout=120
        )

    async def open(self, face: str) -> Stream:
        """A stream that has begun."""
        stream = Stream(face, self._rest() if face == "rest" else self._grpc())
        async with asyncio.timeout(60):
            while stream.num_chunks < 3:
                assert not stream.task.done(), stream.error
                await asyncio.sleep(0.01)
        return stream

    async def _rest(self) -> AsyncIterator[object]:
        chunks = await self.sdk.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": STORY}],
            max_tokens=MAX_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with chunks:
            async for chunk in chunks:
                yield chunk

    def _grpc(self) -> AsyncIterator[object]:
        prompt = MeshPrompt("story", messages=(("user", STORY),))
        return self._caller.stream(Ask(prompt, MAX_TOKENS, ignore_eos=True, is_streamed=True))


@pytest.mark.parametrize("process", ["pid", "engine_pid"])
async def test_a_killed_decode_worker_ends_its_streams_with_typed_errors(
    mesh: TinyMesh, greedy: Greedy, process: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, other = random.sample(DECODE, 2)
    before = mesh.service(victim)
    for name in DECODE:
        mesh.arm(name, SLOW)
    async with Caller(mesh) as caller:
        client = Client(mesh, caller)
        # The gateway takes the workers in turn: each gets some of both faces.
        streams = [await client.open(face) for face in ("rest", "rest", "grpc", "grpc") * 2]
        num_concerned = mesh.load_now(victim).running_requests
        killed_at_s = time.monotonic()
        os.kill(before[process], signal.SIGKILL)
        async with asyncio.timeout(60):
            while sum(stream.task.done() for stream in streams) < num_concerned:
                await asyncio.sleep(0.01)

        # The others go on, and new requests are served meanwhile.
        ask = Ask(SHORT, NUM_TOKENS, new_salt(), ignore_eos=True)
        answer = await caller.grpc(ask)
        greedy.check(SHORT, answer.token_ids or [], NUM_TOKENS)
        assert answer.timeline.worker_id == other
        ended = [stream for stream in streams if stream.task.done()]
        assert len(ended) == num_concerned
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        await client.sdk.close()
        mesh.disarm(other, SLOW.point)

        assert {stream.face for stream in ended} == {"rest", "grpc"}
        for stream in ended:
            check_typed(stream.error, victim)
        took_s = max(stream.ended_at_s for stream in ended) - killed_at_s
        with capsys.disabled():
            print(f"\nstreams of a killed decode worker ({process}) ended", end=" ")
            print(f"after {took_s:.3f} s of {STREAM_END_S}")

        wait_until(lambda: is_gone(before["pid"]) and is_gone(before["engine_pid"]), 30)
        wait_until(lambda: is_back(mesh, victim, before["epoch"]), 120, lambda: mesh.text)
        async with asyncio.timeout(60):
            while (await caller.rest(ask)).timeline.worker_id != victim:
                await asyncio.sleep(0.1)
        # A worker whose engine is gone closes its ports before it ends.
        assert "Exception ignored" not in mesh.log(victim)


def check_typed(error: Exception | None, victim: str) -> None:
    """The client learns that the worker was lost, and that another try can help."""
    if isinstance(error, grpc.aio.AioRpcError):
        typed = from_rpc_error(error)
        assert isinstance(typed, PeerUnavailable)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (typed.retryable, typed.worker_id) == (True, victim)
        assert typed.retry_after_s is not None
    else:
        assert isinstance(error, openai.APIError)
        assert error.code == "peer_unavailable"
        assert error.type == "server_error"
        assert victim in error.message
