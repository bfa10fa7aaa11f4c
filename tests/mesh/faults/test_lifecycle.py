"""The ends of `weft up`: told to stop while busy or while starting, or killed. Nothing is left."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from weft.testing.meshes.local_mesh import LocalMesh, ownerless_shared_memory, wait_until
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.needs("go")

STOP_S = 60.0
LONG = 1500


class Traces:
    """What a mesh has on this machine: processes, listening ports, shared memory, files."""

    def __init__(self, mesh: LocalMesh, shared_memory: set[str]) -> None:
        self._shared_memory = shared_memory
        self._run = mesh.state / "run"
        self.family = mesh.family()
        # A later process of another test may be given a port at once.
        self._pids = set(psutil.pids())
        self._ports = listening({process.pid for process in self.family})

    def left(self) -> dict[str, object]:
        """Processes and ports that are still there."""
        found = {
            "processes": [command for process in self.family if (command := command_of(process))],
            "ports": sorted(self._ports & listening(self._pids)),
        }
        return {name: left for name, left in found.items() if left}

    def wait_for_memory(self) -> None:
        """Returns once nobody's shared memory is left; tests beside this one leave some, too, which
        is soon removed.
        """
        wait_until(
            lambda: ownerless_shared_memory() <= self._shared_memory,
            30,
            lambda: str(ownerless_shared_memory() - self._shared_memory),
        )


def command_of(process: psutil.Process) -> str | None:
    """How a process was started; None when it has ended, if perhaps not been waited for."""
    try:
        return " ".join(process.cmdline()[:6]) if process.is_running() else None
    except psutil.NoSuchProcess:  # a zombie too
        return None


def listening(pids: set[int]) -> set[int]:
    """Ports that some of these processes listen on."""
    return {
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids
    }


Start = Callable[..., tuple[LocalMesh, set[str]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    return make_tiny("llama", folder, tokenizer=True, vocab_size=512)


@pytest.fixture
def start(tmp_path: Path, model_dir: Path, rest_binary: Path) -> Iterator[Start]:
    """Starts a mesh; it and the shared memory before."""
    started: list[LocalMesh] = []

    def start_mesh(*flags: str) -> tuple[LocalMesh, set[str]]:
        before = ownerless_shared_memory()
        own = ("--model", str(model_dir), "--kv-memory-bytes", "4194304")
        started.append(LocalMesh(tmp_path, *own, "--local-prefill-max-tokens", "0", *flags))
        return started[-1], before

    yield start_mesh
    for mesh in started:
        mesh.process.kill()
        mesh.process.wait()


async def test_ctrl_c_ends_a_busy_mesh(start: Start) -> None:
    mesh, before = start("--drain-grace-s", "0.5")
    mesh.wait_ready()
    traces = Traces(mesh, before)
    assert len(traces.family) == 6
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False, timeout=60) as http:
        begun = [asyncio.Event() for _ in range(4)]
        reading = [asyncio.create_task(rest_stream(http, event)) for event in begun[:2]]
        reading += [asyncio.create_task(grpc_stream(mesh, event)) for event in begun[2:]]
        async with asyncio.timeout(240):
            await asyncio.gather(*(event.wait() for event in begun))
        mesh.process.send_signal(signal.SIGINT)
        status = await asyncio.to_thread(mesh.process.wait, STOP_S)
        ends = await asyncio.gather(*reading)
    assert status == 0, mesh.text
    assert traces.left() == {}
    traces.wait_for_memory()
    assert not list((mesh.state / "run").iterdir())
    # No answer looks whole that is not.
    assert set(ends) <= {"whole", "told", "cut"}, ends


async def rest_stream(http: httpx.AsyncClient, begun: asyncio.Event) -> str:
    """How a long streamed answer ended."""
    body = {"prompt": "abc", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        try:
            async for piece in answer.aiter_text():
                begun.set()
                text += piece
        except httpx.TransportError:
            return "cut"
    if text.endswith("data: [DONE]\n\n") and '"error"' not in text:
        return "whole"
    return "told" if '"error"' in text else text[-300:]


async def grpc_stream(mesh: LocalMesh, begun: asyncio.Event) -> str:
    """Likewise over gRPC."""
    request = gateway_pb2.CompleteRequest(
        text="abc",
        stop=common_pb2.StopCriteria(max_tokens=LONG, ignore_eos=True),
        stream=True,
    )
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            async for _ in stub.Complete(request):
                begun.set()
        except grpc.aio.AioRpcError as error:
            codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            return "told" if error.code() in codes else str(error.code())
    return "whole"


def test_ctrl_c_ends_a_mesh_that_is_starting(start: Start) -> None:
    mesh, before = start()
    wait_until(lambda: len(mesh.family()) >= 4, 60)
    time.sleep(0.5)  # anywhere in the start will do
    traces = Traces(mesh, before)
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.process.wait(STOP_S) == 0, mesh.text
    assert traces.left() == {}
    traces.wait_for_memory()


def test_nothing_survives_a_killed_supervisor(start: Start) -> None:
    mesh, before = start()
    mesh.wait_ready()
    traces = Traces(mesh, before)
    assert len(traces.family) == 6
    mesh.process.kill()
    mesh.process.wait()
    wait_until(lambda: not traces.left(), STOP_S, lambda: str(traces.left()))
    traces.wait_for_memory()
