"""The operators' port: who is let in, what it does, what it never tells."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2_grpc
from prometheus_client import CollectorRegistry
from weft.cli.up.state import locked_state_folder
from weft.common.admin import AdminServer, read_token
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.server import ServiceServer
from weft.common.settings import LogLevel, ServiceSettings, load_settings
from weft.contract.errors import ConfigError, FaultsDisabled, InvalidRequest, Unauthenticated
from weft.contract.faults import BOARD, FaultSpec, FaultState
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import gateway
from weft.v1 import admin_pb2, admin_pb2_grpc, common_pb2, gateway_pb2, weights_pb2


class Backend:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.level: LogLevel | None = None
        self.entry = "x"
        self.asked: list[int] = []
        self.faults: list[FaultState] = []

    async def flush_cache(self) -> int:
        return 7

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        self.asked.append(max_entries)
        return {"entries": [self.entry] * max_entries}

    async def order_faults(
        self, *, add: FaultSpec | None = None, clear: str | None = None
    ) -> list[FaultState]:
        """The other process's part: it has passed the point twice for every fault."""
        if clear is not None:
            self.faults.clear()
        if add is not None:
            self.faults.append(FaultState(spec=add, reached=2, fired=1))
        return self.faults

    def set_log_level(self, level: LogLevel) -> None:
        self.level = level


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(secrets.token_urlsafe(32) + "\n")
    return path


@asynccontextmanager
async def serving(
    token_file: Path, **changes: Any
) -> AsyncIterator[tuple[Backend, grpc.aio.Channel]]:
    backend = Backend()
    settings = ServiceSettings(admin_port=0, admin_token_file=token_file, **changes)
    server = AdminServer(settings, backend)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            server.address, options=(("grpc.max_receive_message_length", 16 << 20),)
        ) as channel:
            yield backend, channel
    finally:
        await server.stop()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_operators_get_what_they_ask_for(token_file: Path) -> None:
    root = logging.getLogger()
    level = root.level
    async with serving(token_file) as (backend, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        allowed = bearer(read_token(token_file))
        flushed = await stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=allowed)
        assert flushed.flushed_pages == 7
        for request, entries in (
            (admin_pb2.DumpStateRequest(), 1000),
            (admin_pb2.DumpStateRequest(max_entries=3), 3),
        ):
            answer = await stub.DumpState(request, metadata=allowed)
            assert json.loads(answer.state) == {"entries": ["x"] * entries}
        try:
            root.setLevel(logging.WARNING)
            request = admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_ERROR)
            answer = await stub.SetLogLevel(request, metadata=allowed)
            assert answer.previous_level == admin_pb2.LOG_LEVEL_WARNING
            assert (root.level, backend.level) == (logging.ERROR, "error")
        finally:
            root.setLevel(level)


@pytest.mark.parametrize(
    ("host", "admin_host", "is_told"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", False),
        ("0.0.0.0", "0.0.0.0", True),
    ],
)
async def test_a_port_that_callers_cannot_reach_is_not_told(
    token_file: Path, host: str, admin_host: str, is_told: bool
) -> None:
    settings = ServiceSettings(
        host=host,
        port=0,
        admin_host=admin_host,
        admin_port=0,
        admin_token_file=token_file,
        metrics_port=None,
        insecure=True,
    )
    server = ServiceServer(settings, CollectorRegistry(), admin=Backend())
    await server.start([])
    told = int(server.admin_address.rpartition(":")[2])
    assert server.admin_port == (told if is_told else 0)
    await server.stop()


async def test_bounds(token_file: Path) -> None:
    async with serving(token_file) as (backend, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        allowed = bearer(read_token(token_file))
        backend.entry = "x" * 2000
        for entries in (0, 10_001, 10_000):  # the last one is within bounds, its answer is not
            request = admin_pb2.DumpStateRequest(max_entries=entries)
            error = await refusal(stub.DumpState(request, metadata=allowed))
            assert isinstance(error, InvalidRequest)
            assert error.param == "max_entries"
        assert backend.asked == [10_000]
        for level in (0, 77):
            request = admin_pb2.SetLogLevelRequest(level=level)  # type: ignore[arg-type]
            error = await refusal(stub.SetLogLevel(request, metadata=allowed))
            assert (type(error), error.param) == (InvalidRequest, "level")
        # Of these gRPC would take some as files of sockets, and call others an unknown error.
        for peer in ("\0:1", "unix:/tmp/x:1", "ipv4:1:2", "dns:", "worker", "worker:0", "[::1:80"):
            refit = weights_pb2.RefitRequest(peer=peer)
            error = await refusal(stub.Refit(refit, metadata=allowed))
            assert (type(error), error.param) == (InvalidRequest, "peer")


async def test_without_the_token_nothing_is_answered_or_logged(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = read_token(token_file)
    other = secrets.token_urlsafe(32)
    attempts: list[tuple[tuple[str, str], ...]] = [
        (),
        bearer(other),
        bearer(token[:-1]),
        bearer(token + "x"),
        bearer(""),
        (("authorization", token),),
        (("authorization", f"Basic {token}"),),
        (("authorization", f"bearer  {token}"),),
        (("x-authorization", f"Bearer {token}"),),
        (*bearer(token), *bearer(other)),
    ]
    async with serving(token_file) as (backend, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        for metadata in attempts:
            request = admin_pb2.DumpStateRequest()
            error = await refusal(stub.DumpState(request, metadata=metadata))
            assert isinstance(error, Unauthenticated), metadata
            assert token not in error.message
            assert other not in error.message
        unknown = channel.unary_unary("/weft.v1.AdminService/Nothing")
        assert isinstance(await refusal(unknown(b"")), Unauthenticated)
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            timeout=60
        )
        assert isinstance(await refusal(reflected.read()), Unauthenticated)
        assert not backend.asked
    assert "no valid token" in caplog.text
    assert token[:8] not in caplog.text
    assert other not in caplog.text


@pytest.mark.parametrize("content", [None, b"", b"short", b"x" * 2000, b"\xff" * 32, b"a\nb" * 20])
def test_unusable_tokens_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--admin-token-file") as caught:
        read_token(path)
    assert not content or content.decode(errors="replace") not in caught.value.message


def test_a_port_needs_a_token_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(ServiceSettings, ["--admin-port", "0"], {})
    assert "--admin-token-file" in capsys.readouterr().err


def test_each_mesh_has_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        with locked_state_folder(tmp_path) as folder:
            assert folder.admin_token.stat().st_mode & 0o777 == 0o600
            tokens.append(read_token(folder.admin_token))
    assert tokens[0] != tokens[1]


async def test_a_gateway_forgets_and_tells(tmp_path: Path, token_file: Path) -> None:
    """`weft flush` reaches a gateway, whose index of prefixes is empty then."""

    def script(submit: Any, prompt: list[int]) -> Script:
        return Script(tokens=[[65]], fill_by=0)

    async with gateway(
        tmp_path,
        script,
        num_prefill=1,
        admin_port=0,
        admin_token_file=token_file,
        # It learns from what was filled, while the worker behind it holds nothing.
        kv_events=False,
    ) as mesh:
        ids = common_pb2.TokenIds(ids=range(5, 70))
        for _ in range(2):
            request = gateway_pb2.CompleteRequest(token_ids=ids)
            assert [message async for message in mesh.typed.Complete(request)]
        submits = mesh.workers[0].submits
        assert [s.prefill_candidates[0].match_tokens for s in submits] == [0, 64]

        address = mesh.app.server.admin_address
        async with grpc.aio.insecure_channel(address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            allowed = bearer(read_token(token_file))
            async with asyncio.timeout(60):
                while True:
                    answer = await stub.DumpState(admin_pb2.DumpStateRequest(), metadata=allowed)
                    state = json.loads(answer.state)
                    # Clients have their answers before the gateway has let go of everything.
                    if state["running_prompts"] == state["num_requests"] == 0:
                        break
                    await asyncio.sleep(0.01)
        assert {worker["worker_id"] for worker in state["workers"]} == {"decode-0", "prefill-0"}

        command = [sys.executable, "-m", "weft.cli", "flush", "--admin-address", address]
        for file, status in ((token_file, 0), (tmp_path / "none", 1)):
            done = await asyncio.create_subprocess_exec(
                *command, "--token-file", str(file), stdout=PIPE, stderr=PIPE
            )
            out, err = await asyncio.wait_for(done.communicate(), 60)
            assert done.returncode == status, err
            # What the gateway knows of either pool.
            assert b"8 pages flushed" in out or status
        request = gateway_pb2.CompleteRequest(token_ids=ids)
        assert [message async for message in mesh.typed.Complete(request)]
        assert submits[-1].prefill_candidates[0].match_tokens == 0


# ---- faults ------------------------------------------------------------------------------------


@pytest.fixture
def faults_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just begun."""
    monkeypatch.setattr(BOARD, "is_enabled", False)
    yield
    BOARD.clear()


@pytest.mark.usefixtures("faults_off")
async def test_faults_are_refused_without_the_flag(token_file: Path) -> None:
    async with serving(token_file) as (backend, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        allowed = bearer(read_token(token_file))
        fault = admin_pb2.Fault(point="ship.post", kind=admin_pb2.FAULT_KIND_DROP)
        for call, request in (
            (stub.InjectFault, admin_pb2.InjectFaultRequest(fault=fault)),
            (stub.ListFaults, admin_pb2.ListFaultsRequest()),
            (stub.ClearFaults, admin_pb2.ClearFaultsRequest()),
        ):
            error = await refusal(call(request, metadata=allowed))
            assert isinstance(error, FaultsDisabled)
            assert "--enable-faults" in error.message
        assert not backend.faults
        assert not BOARD.states()


@pytest.mark.usefixtures("faults_off")
async def test_faults_are_armed_in_all_processes_of_a_service(token_file: Path) -> None:
    async with serving(token_file, enable_faults=True) as (backend, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        allowed = bearer(read_token(token_file))
        fault = admin_pb2.Fault(point="store.put", kind=admin_pb2.FAULT_KIND_DROP, count=5, seed=9)
        request = admin_pb2.InjectFaultRequest(fault=fault)
        await stub.InjectFault(request, metadata=allowed)
        assert [state.spec for state in BOARD.states()] == [state.spec for state in backend.faults]
        answer = await stub.ListFaults(admin_pb2.ListFaultsRequest(), metadata=allowed)
        (state,) = answer.faults
        assert (state.fault.point, state.fault.count, state.fault.seed) == ("store.put", 5, 9)
        assert (state.reached, state.fired) == (2, 1)
        assert {point.name for point in answer.points} == {point.name for point in BOARD.points}
        other = admin_pb2.ClearFaultsRequest(point="store.lookup")
        assert (await stub.ClearFaults(other, metadata=allowed)).cleared_faults == 0
        everything = admin_pb2.ClearFaultsRequest()
        assert (await stub.ClearFaults(everything, metadata=allowed)).cleared_faults == 1
        assert not backend.faults
        request.fault.kind = admin_pb2.FAULT_KIND_CORRUPT
        error = await refusal(stub.InjectFault(request, metadata=allowed))
        assert isinstance(error, InvalidRequest)
        assert "drop" in error.message


def test_faults_need_the_operators_port() -> None:
    with pytest.raises(ValueError, match="--admin-port"):
        ServiceSettings(enable_faults=True)
