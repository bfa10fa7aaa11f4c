"""A worker's start and end, whatever fails: its engine is let go, and its exit status tells."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from weft.cli.up.ports import free_ports
from weft.common.rpc.server import QUARANTINE_STATUS
from weft.common.worker import host
from weft.common.worker.prefill_service import PrefillService
from weft.common.worker.settings import WorkerSettings
from weft.contract.errors import PeerUnavailable
from weft.contract.messages import Inbox
from weft.contract.reports import EngineInfo
from weft.gateway.app import GatewayApp
from weft.gateway.settings import GatewaySettings
from weft.testing.models.tiny_tokenizers import write_model_dir
from weft.testing.services.processes import listening_ports
from weft.v1 import mesh_pb2, mesh_pb2_grpc, worker_pb2, worker_pb2_grpc

INFO = EngineInfo(
    epoch=7,
    model_digest=bytes(32),
    dtype="float32",
    weight_format="float32",
    vocab_size=10,
    max_context_tokens=64,
    num_pages=4,
    page_size=16,
    page_bytes=1024,
    layers=1,
    kv_heads=1,
    head_dim=8,
    transports=["data"],
    transport_detail="data",
    versions={},
    notices=[],
    engine_pid=os.getpid(),
)


class FakeEngine:
    """An engine client without an engine."""

    def __init__(
        self, config: object, on_outbox: object, on_progress: Any, *_: object, **__: object
    ) -> None:
        self.on_progress = on_progress
        self.is_loaded = asyncio.Event()
        self.is_loaded.set()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.load: Any = None
        self.loop_age_s = 0.0
        self.info = INFO
        self.is_stopped = False

    async def spawn(self) -> None:
        """There is nothing to spawn."""

    def configure(self, config: object) -> None:
        """There is nothing to load."""

    async def wait_ready(self) -> EngineInfo:
        await self.is_loaded.wait()
        return INFO

    async def stop(self) -> None:
        self.is_stopped = True

    def send(self, inbox: Inbox) -> None:
        """Nobody drains."""


class Host:
    """`run_worker` in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines: list[FakeEngine] = []
        self.ready_file = folder / "ready.json"
        self._folder = folder
        # The test runner's handlers stay.
        monkeypatch.setattr(host, "configure_logging", lambda *_: None)
        monkeypatch.setattr(host, "EngineClient", self._make_engine)

    def _make_engine(self, *arguments: object, **named: object) -> FakeEngine:
        self.engines.append(FakeEngine(*arguments, **named))
        return self.engines[-1]

    def run(
        self, make_service: Callable[[Any], Any] = PrefillService, **settings: Any
    ) -> asyncio.Task[int]:
        values: dict[str, Any] = {
            "model_dir": self._folder,
            "ready_file": self.ready_file,
            "metrics_port": None,
            "drain_grace_s": 0.1,
            **settings,
        }
        work = host.run_worker(WorkerSettings(**values), "prefill", [make_service])
        return asyncio.create_task(work)

    async def ready(self, **settings: Any) -> asyncio.Task[int]:
        running = self.run(**settings)
        async with asyncio.timeout(60):
            while not self.ready_file.exists():
                assert not running.done(), await running
                await asyncio.sleep(0.01)
        return running

    def check_ended(self) -> None:
        """Nothing is left: no engine, and no port."""
        (engine,) = self.engines
        assert engine.is_stopped
        if self.ready_file.exists():
            port = json.loads(self.ready_file.read_text())["address"].rsplit(":", 1)[1]
            assert int(port) not in listening_ports()


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


async def fails(*_: object) -> None:
    raise KeyError("a fault")


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("weft")]
    return [str(r.exc_info[1]) for r in ours if r.exc_info and r.exc_info[1]]


async def test_a_signal_ends_a_worker(worker: Host) -> None:
    running = await worker.ready()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    worker.check_ended()


async def test_a_worker_that_says_it_is_ready_waits_for_signals(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[object] = []
    write = host.ServiceServer.write_ready_file

    def note(server: host.ServiceServer, **extra: object) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        write(server, **extra)

    monkeypatch.setattr(host.ServiceServer, "write_ready_file", note)
    running = await worker.ready()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    assert signal.SIG_DFL not in handlers


async def test_a_service_that_cannot_be_made_leaves_no_engine(worker: Host) -> None:
    def make_service(_: object) -> Any:
        raise KeyError("a fault")

    with pytest.raises(KeyError, match="a fault"):
        await asyncio.wait_for(worker.run(make_service), 60)
    worker.check_ended()


async def test_a_port_that_is_taken_leaves_no_engine(worker: Host, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = worker.run(metrics_port=port, crash_dir=dumps)
        assert await asyncio.wait_for(running, 60) == 1
    worker.check_ended()
    assert list(dumps.iterdir()) == []


@pytest.mark.parametrize("watch", ["_tell_liveness", "_end_by_quarantine"])
async def test_a_watch_that_fails_is_logged_and_is_no_quarantine(
    worker: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watch: str
) -> None:
    monkeypatch.setattr(host, watch, fails)
    running = await worker.ready()
    async with asyncio.timeout(60):
        while not failures(caplog):
            await asyncio.sleep(0.01)
    assert failures(caplog) == ["'a fault'"]
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0
    worker.check_ended()


async def test_quarantine_is_told_by_the_exit_status(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(server: Any, *_: object) -> None:
        server.request_stop()

    monkeypatch.setattr(host, "_end_by_quarantine", ends)
    assert await asyncio.wait_for(worker.run(), 60) == QUARANTINE_STATUS
    worker.check_ended()


async def test_a_drain_that_fails_is_told_once_all_has_ended(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.WorkerServicer, "drain", fails)
    running = await worker.ready()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyError, match="a fault"):
        await asyncio.wait_for(running, 60)
    worker.check_ended()


async def test_a_worker_ends_with_its_engine(
    worker: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    monkeypatch.setattr(PrefillService, "on_engine_gone", lambda _, why: told.append(why))
    running = await worker.ready()
    worker.engines[0].gone.set_result("signal 11")
    assert await asyncio.wait_for(running, 60) == 1
    assert told == ["signal 11"]
    worker.check_ended()


async def test_an_engine_that_does_not_start_is_stopped(
    worker: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_ready(_: FakeEngine) -> EngineInfo:
        raise PeerUnavailable("no memory")

    monkeypatch.setattr(FakeEngine, "wait_ready", wait_ready)
    assert await asyncio.wait_for(worker.run(), 60) == 1
    worker.check_ended()


async def test_a_worker_tells_how_far_its_start_is(worker: Host, tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    running = worker.run(port=port, worker_id="prefill-7")
    (engine,) = await _first_engine(worker)
    engine.is_loaded.clear()
    settings = GatewaySettings(
        port=0,
        model_dir=write_model_dir(tmp_path / "tiny"),
        decode=["127.0.0.1:1"],
        prefill=[f"127.0.0.1:{port}"],
        metrics_port=None,
    )
    gateway = GatewayApp(settings)
    await gateway.start()
    async with grpc.aio.insecure_channel(gateway.server.address) as channel:
        stub = mesh_pb2_grpc.MeshServiceStub(channel)
        interval = Duration(nanos=500_000_000)

        async def member(is_wanted: Callable[[mesh_pb2.MeshMember], bool]) -> mesh_pb2.MeshMember:
            watch = stub.WatchMesh(mesh_pb2.WatchMeshRequest(interval=interval), timeout=60)
            async for message in watch:
                role = mesh_pb2.MEMBER_ROLE_PREFILL
                (found,) = (one for one in message.members if one.role == role)
                if is_wanted(found):
                    watch.cancel()
                    return found
            raise AssertionError

        engine.on_progress(0, 0, "measuring memory")
        found = await member(lambda one: one.start.phase == "measuring memory")
        assert (found.member_id, found.healthy) == ("prefill-7", False)
        assert not found.start.HasField("fraction")
        engine.on_progress(2, 4, "capturing graphs: 0.1 s, 20 MiB")
        cost = "capturing graphs: 0.2 s, 30 MiB"
        engine.on_progress(3, 4, cost)
        found = await member(lambda one: one.start.HasField("fraction"))
        assert (found.start.phase, found.start.fraction) == (cost, 0.75)
        assert found.problem.startswith(f"starting: {cost}, 75%, for ")
        engine.is_loaded.set()
        found = await member(lambda one: not one.HasField("start"))
        assert "serves model" in found.problem  # The gateway has another one.
    seconds: dict[str, float] = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as own, asyncio.timeout(60):
        while not seconds:
            info = worker_pb2_grpc.WorkerServiceStub(own).GetInfo(worker_pb2.GetInfoRequest())
            seconds = dict((await info).start_seconds)
    assert seconds.keys() == {
        *(
            "starting the server",
            "starting the engine",
            "measuring memory",
            "capturing graphs",
            "opening the ports",
        ),
    }
    await gateway.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    worker.check_ended()


async def _first_engine(worker: Host) -> list[FakeEngine]:
    async with asyncio.timeout(60):
        while not worker.engines:
            await asyncio.sleep(0)
    return worker.engines
