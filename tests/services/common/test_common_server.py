"""Bootstrap and errors over real sockets, and drain of a real process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, Counter
from weft.common.rpc.errors import error_detail, from_error_detail, from_rpc_error
from weft.common.rpc.server import SECOND_SIGNAL_AFTER_S, ServiceServer
from weft.common.settings import ServiceSettings
from weft.contract.errors import (
    ConfigError,
    ContextTooLong,
    Draining,
    Internal,
    InvalidRequest,
    Overloaded,
    WeftError,
)
from weft.testing.services.processes import listening_ports
from weft.v1 import gateway_pb2, gateway_pb2_grpc

FAILURES: list[Exception] = [
    InvalidRequest("bad field", param="temperature", stage="validate"),
    ContextTooLong("12 > 10", param="messages"),
    Overloaded("full", retry_after_s=1.5, worker_id="decode-1", attempt=2),
    Draining("going"),
]
LONG: list[WeftError] = [
    # Of characters that take most room on the wire.
    InvalidRequest("a你" * 5000, param="é" * 5000),
    Overloaded("\n%é" * 5000, retry_after_s=1.5, worker_id="decode-1", attempt=2),
    Internal("x" + "🎉" * 600),
    InvalidRequest("\ud800" * 5000),
]


class Faulty(gateway_pb2_grpc.GatewayServiceServicer):
    """Fails as the model name says."""

    async def Chat(self, request, context):  # type: ignore[no-untyped-def]
        if request.model == "slow":
            await asyncio.sleep(6)
        yield gateway_pb2.ChatResponse(request_id="one")
        if request.model == "slow":
            return
        if request.model == "hang":
            await asyncio.sleep(60)
        raise [*FAILURES, *LONG][int(request.model)]

    async def GetModel(self, request, context):  # type: ignore[no-untyped-def]
        if request.model == "bug":
            raise KeyError("secret-path")
        if request.model == "left":
            raise grpc.aio.InternalError("a write that fails")
        raise [*FAILURES, *LONG][int(request.model)]


@pytest.fixture
async def server() -> AsyncIterator[ServiceServer]:
    registry = CollectorRegistry()
    Counter("demo_total", "d", registry=registry).inc(3)
    server = ServiceServer(ServiceSettings(), registry)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Faulty(), server.grpc)
    await server.start(["weft.v1.GatewayService"])
    yield server
    await server.stop()


async def test_health_reflection_and_metrics(server: ServiceServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        states = health_pb2.HealthCheckResponse
        for name in ("", "weft.v1.GatewayService"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert (await health.Check(request)).status == states.NOT_SERVING
        await server.set_serving(True)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        listed = [s.name async for r in call for s in r.list_services_response.service]
        assert {"weft.v1.GatewayService", "grpc.health.v1.Health"} <= set(listed)
    url = f"http://{server.metrics_address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert "demo_total 3.0" in text


async def test_a_client_may_ping_while_it_waits(server: ServiceServer) -> None:
    """As the REST edge does, for as long as a request takes: gRPC's default is five minutes."""
    pings = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with grpc.aio.insecure_channel(server.address, options=pings) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Chat(gateway_pb2.ChatRequest(model="slow"), timeout=60)
        assert [answer.request_id async for answer in call] == ["one"]


async def test_a_burst_that_python_has_not_taken_yet_is_answered(server: ServiceServer) -> None:
    """gRPC itself cancels calls at random above 1,000."""
    failed = asyncio.Queue[grpc.StatusCode]()
    loop = asyncio.get_running_loop()
    with grpc.insecure_channel(server.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        def ask() -> list[Any]:
            return [
                stub.GetModel.future(gateway_pb2.GetModelRequest(model="0")) for _ in range(1500)
            ]

        def note(call: Any) -> None:
            loop.call_soon_threadsafe(failed.put_nowait, call.code())

        await asyncio.to_thread(grpc.channel_ready_future(channel).result)
        thread = ThreadPoolExecutor(1)
        calls = thread.submit(ask).result()  # Meanwhile the server's loop takes nothing.
        for call in calls:
            call.add_done_callback(note)
        codes = {await failed.get() for _ in calls}
        thread.shutdown()
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("index", range(len(FAILURES)))
async def test_typed_failures_cross_the_wire(server: ServiceServer, index: int) -> None:
    expected = FAILURES[index]
    assert isinstance(expected, WeftError)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetModel(gateway_pb2.GetModelRequest(model=str(index)))
        call = stub.Chat(gateway_pb2.ChatRequest(model=str(index)))
        assert (await call.read()).request_id == "one"
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await call.read()
    for caught in (unary.value, stream.value):
        assert caught.code().name == expected.grpc_code
        error = from_rpc_error(caught)
        assert type(error) is type(expected)
        for name in ("message", "param", "stage", "worker_id", "attempt", "retry_after_s"):
            assert getattr(error, name) == getattr(expected, name)
        assert error.retryable == expected.retryable


@pytest.mark.parametrize("index", range(len(LONG)))
async def test_long_failures_arrive_with_their_type(server: ServiceServer, index: int) -> None:
    expected = LONG[index]
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        # Between the soft and the hard limit of metadata gRPC refuses at random.
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModel(gateway_pb2.GetModelRequest(model=str(len(FAILURES) + index)))
            error = from_rpc_error(caught.value)
            assert type(error) is type(expected)
            assert error.message == caught.value.details()
            assert 1000 < len(error.message.encode()) <= 1024
            kept = error.message.removesuffix("...").replace("?", "\ud800")
            assert expected.message.startswith(kept)
            assert (expected.param or "").startswith((error.param or "").removesuffix("..."))
            assert (error.worker_id, error.attempt) == (expected.worker_id, expected.attempt)
            assert error.retry_after_s == expected.retry_after_s


async def test_unknown_failure_leaks_nothing(
    server: ServiceServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(gateway_pb2.GetModelRequest(model="bug"))
    assert isinstance(from_rpc_error(caught.value), Internal)
    assert "secret" not in str(caught.value)
    assert sum("unexpected failure" in r.message for r in caplog.records) == 1


async def test_a_write_that_fails_is_no_defect(
    server: ServiceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails where a client leaves; one that has not is answered all the same."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(gateway_pb2.GetModelRequest(model="left"))
    assert isinstance(from_rpc_error(caught.value), Internal)
    ours = [record for record in caplog.records if record.name.startswith("weft")]
    assert not [r for r in ours if r.levelname in ("WARNING", "ERROR")]


async def test_malformed_messages_are_invalid_argument(server: ServiceServer) -> None:
    method = "/weft.v1.GatewayService/GetModel"
    async with grpc.aio.insecure_channel(server.address) as channel:
        for body in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(body)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert isinstance(from_rpc_error(caught.value), InvalidRequest)


async def test_a_drain_that_fails_ends_the_server_and_is_told() -> None:
    server = ServiceServer(ServiceSettings(), CollectorRegistry())
    await server.start([])

    async def drain() -> None:
        raise KeyError("of the drain")

    serving = asyncio.create_task(server.run_until_signal(drain))
    server.request_stop()
    with pytest.raises(KeyError, match="of the drain"):
        await asyncio.wait_for(serving, 60)
    ports = {int(one.rsplit(":", 1)[1]) for one in (server.address, server.metrics_address)}
    assert not ports & listening_ports()


async def test_port_in_use_is_a_clear_error(server: ServiceServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    other = ServiceServer(ServiceSettings(port=port, metrics_port=None), CollectorRegistry())
    with pytest.raises(ConfigError, match="--port"):
        await other.start([])
    await other.stop()


def test_error_detail_round_trip() -> None:
    for expected in FAILURES:
        assert isinstance(expected, WeftError)
        error = from_error_detail(error_detail(expected), expected.retry_after_s)
        assert type(error) is type(expected)
        assert (error.message, error.worker_id) == (expected.message, expected.worker_id)
    unknown = error_detail(Draining("x"))
    unknown.code = "FROM_THE_FUTURE"
    rebuilt = from_error_detail(unknown)
    assert isinstance(rebuilt, Internal)
    assert rebuilt.retryable


PROGRAM = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from weft.common.rpc import server as rpc_server
from weft.common.rpc.server import ServiceServer, run
from weft.common.settings import ServiceSettings, load_settings
from weft.common.telemetry.logging import configure_logging, request_id

rpc_server.SECOND_SIGNAL_AFTER_S = float(sys.argv[1])

async def main() -> int:
    settings = load_settings(ServiceSettings, sys.argv[2:])
    configure_logging("demo", settings.log_level, settings.log_format)
    server = ServiceServer(settings, CollectorRegistry())
    await server.start([])
    await server.set_serving(True)
    server.write_ready_file(worker_id="w")
    request_id.set("r1")
    async def drain() -> None:
        print("draining", flush=True)
        await asyncio.sleep(float(await asyncio.to_thread(sys.stdin.readline)))
        print("drained", flush=True)
        if settings.drain_grace_s == 17:
            raise KeyError("of the drain")
    await server.run_until_signal(drain)
    return 0

sys.exit(run(main()))
"""


@pytest.mark.parametrize("is_good", [True, False])
def test_process_drains_on_sigterm(tmp_path: Path, is_good: bool) -> None:
    ready = tmp_path / "ready.json"
    process = subprocess.Popen(
        # The second signal counts as a repetition, however busy the machine is.
        [sys.executable, "-c", textwrap.dedent(PROGRAM), "60", "--ready-file", str(ready)]
        + ([] if is_good else ["--drain-grace-s", "17"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        content = json.loads(ready.read_text())
        assert content["pid"] == process.pid
        assert content["worker_id"] == "w"
        assert urllib.request.urlopen(f"http://{content['metrics_address']}").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)  # from another sender of the same one
        out, err = process.communicate("0.3\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == (0 if is_good else 1), err
    assert "drained" in out
    record, *others = map(json.loads, err.splitlines())
    assert record["message"] == "draining"
    assert record["signal"] == "SIGTERM"
    assert record["request_id"] == "r1"
    assert record["service"] == "demo"
    assert ["of the drain" in json.dumps(other) for other in others] == ([] if is_good else [True])


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    flags = ["--ready-file", str(ready), "--drain-grace-s", "600"]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(SECOND_SIGNAL_AFTER_S), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "draining\n"
        process.stdin.write("500\n")
        process.stdin.flush()
        time.sleep(1.5 * SECOND_SIGNAL_AFTER_S)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "drained" not in out


def test_a_signal_before_the_service_waits_for_it_ends_it_in_order() -> None:
    """As process 1 of a container it would be ignored otherwise."""
    program = """
import asyncio
from weft.common.rpc.server import run

async def main():
    try:
        print("begun", flush=True)
        await asyncio.sleep(60)
    finally:
        print("ended", flush=True)
    return 0

raise SystemExit(run(main()))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert rest == "ended\n"
    assert process.returncode == 128 + signal.SIGTERM
