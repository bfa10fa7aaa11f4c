"""Mutual TLS: who is let in, who may call what, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import logging
import pkgutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import weft.v1
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry
from weft.cli.certs import files_of, issue
from weft.common.rpc.authorize import ANYONE, CALLERS, SERVICES, AuthorizeInterceptor
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.server import LIVENESS, ServiceServer
from weft.common.rpc.tls import Identity, read_material
from weft.common.settings import ServiceSettings, load_settings
from weft.contract.errors import ConfigError, PermissionDenied
from weft.gateway.settings import GatewaySettings
from weft.keda import externalscaler_pb2
from weft.kvstore.settings import KvStoreSettings
from weft.kvstore.store import KvStore
from weft.prefill.main import PrefillSettings
from weft.testing.services.certificates import DAY, identity, make_certificates, raw_channel
from weft.v1 import decode_pb2, decode_pb2_grpc

TIMEOUT_S = 20.0


def contract() -> list[str]:
    """Full paths of all methods that Weft's services have."""
    files: list[FileDescriptor] = [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    files.append(externalscaler_pb2.DESCRIPTOR)
    for module in pkgutil.iter_modules(weft.v1.__path__):
        if module.name.endswith("_pb2"):
            files.append(importlib.import_module(f"weft.v1.{module.name}").DESCRIPTOR)
    return [
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


class Echo(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers every method, however many messages it takes or gives."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
            yield b"answer"

        return grpc.stream_stream_rpc_method_handler(answer)


@asynccontextmanager
async def echoing(own: Identity, requires_client: bool = True) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=(AuthorizeInterceptor(),))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_secure_port("127.0.0.1:0", own.server_credentials(requires_client))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def outcome(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(b"", timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_method_of_the_contract_has_its_callers() -> None:
    """A new rpc must say who may call it; a removed one must go from the table too."""
    assert sorted(CALLERS) == sorted(contract())
    known = {*SERVICES, ANYONE}
    assert all(callers and callers <= known for callers in CALLERS.values())


async def test_each_service_may_call_what_the_table_says_and_nothing_else(
    tmp_path: Path,
) -> None:
    make_certificates(tmp_path)
    async with echoing(identity(tmp_path, "decode")) as address:
        for caller in SERVICES:
            async with open_channel(address, "decode", identity(tmp_path, caller)) as channel:
                for method in [*contract(), "/weft.v1.DecodeService/Unheard"]:
                    allowed = caller in CALLERS.get(method, ())
                    code = await outcome(channel, method)
                    expected = "OK" if allowed else "PERMISSION_DENIED"
                    assert code.name == expected, (caller, method)


TOKEN_METHODS = tuple(f"/weft.v1.TrainerService/{name}Tokens" for name in ("Generate", "Continue"))
FACES = ("Gateway", "OpenAI", "Responses", "Anthropic", "Ollama", "Pooling", "Server")
"""What clients may call."""


def test_what_matters_most_in_the_table() -> None:
    """Spelled out once more by hand, so that a slip in the table shows."""
    assert CALLERS["/weft.v1.DecodeService/Session"] == {"gateway"}
    for method in ("Fill", "FillStatus"):
        assert CALLERS[f"/weft.v1.PrefillService/{method}"] == {"decode"}
    for method in ("Lookup", "Fill", "FillStatus", "Put", "PutData", "ReportCorrupt"):
        assert CALLERS[f"/weft.v1.KvStoreService/{method}"] == {"decode", "prefill"}
    assert CALLERS["/weft.v1.WorkerService/ReportExit"] == {"cli"}
    for method in ("Drain", "Undrain"):
        assert CALLERS[f"/weft.v1.WorkerService/{method}"] == {"cli", "gateway"}
        assert CALLERS[f"/weft.v1.GatewayService/{method}Worker"] == {"cli"}
    for method, callers in CALLERS.items():
        if "AdminService" in method:
            assert callers == {"cli"}
        is_face = method.startswith(tuple(f"/weft.v1.{name}Service/" for name in FACES))
        assert (ANYONE in callers) <= (is_face or method in TOKEN_METHODS)
    assert ANYONE not in CALLERS["/weft.v1.ServerService/Metrics"]


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Answers every message of a Session."""

    async def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for _ in request_iterator:
            yield decode_pb2.SessionEvent()


class DecodeSettings(ServiceSettings):
    program = "decode"


def settings(folder: Path, service: str = "decode", **values: Any) -> DecodeSettings:
    files = files_of(folder, service)
    return DecodeSettings(
        tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca, metrics_port=None, **values
    )


@asynccontextmanager
async def serving(folder: Path, **values: Any) -> AsyncIterator[ServiceServer]:
    server = ServiceServer(settings(folder, **values), CollectorRegistry())
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(), server.grpc)
    await server.start(["weft.v1.DecodeService"])
    try:
        yield server
    finally:
        await server.stop()


async def test_strangers_are_refused_and_nothing_of_theirs_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    authority = make_certificates(tmp_path)
    issue(authority, tmp_path, "client", lifetime=-DAY)  # expired
    wrong = tmp_path / "wrong"
    make_certificates(wrong, "gateway")
    expired, stranger = files_of(tmp_path, "client"), files_of(wrong, "gateway")
    ca = tmp_path / "ca.pem"
    async with serving(tmp_path) as server:
        strangers = {
            "no certificate": raw_channel(server.address, "decode", ca),
            "another authority": raw_channel(
                server.address, "decode", ca, (stranger.cert, stranger.key)
            ),
            "expired": raw_channel(server.address, "decode", ca, (expired.cert, expired.key)),
            "no TLS": grpc.aio.insecure_channel(server.address),
        }
        for name, channel in strangers.items():
            async with channel:
                call = decode_pb2_grpc.DecodeServiceStub(channel).Session(timeout=TIMEOUT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, name
        # A worker that is known, and may not open a Session.
        async with open_channel(server.address, "decode", identity(tmp_path, "prefill")) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Session(timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = from_rpc_error(caught.value)
            assert isinstance(error, PermissionDenied)
            assert "prefill may not call /weft.v1.DecodeService/Session" in error.message
        async with open_channel(server.address, "decode", identity(tmp_path, "gateway")) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
            await call.write(decode_pb2.SessionRequest())
            assert await call.read() == decode_pb2.SessionEvent()
            call.cancel()
    refusals = [record for record in caplog.records if record.message == "a call was refused"]
    assert [(r.method, r.caller) for r in refusals] == [  # type: ignore[attr-defined]
        ("/weft.v1.DecodeService/Session", "prefill")
    ]
    shown = "".join(capfd.readouterr()) + caplog.text
    assert "CERTIFICATE" in shown  # gRPC's own word for each refused handshake
    assert "PRIVATE KEY" not in shown
    for path in (expired.key, stranger.key):
        assert path.read_text().splitlines()[1] not in shown


async def test_a_caller_refuses_a_server_that_is_another_service(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    async with serving(tmp_path) as server:
        own = identity(tmp_path, "gateway")
        async with open_channel(server.address, "prefill", own) as channel:
            assert await outcome(channel, "/a/b") is grpc.StatusCode.UNAVAILABLE
    other = tmp_path / "other"
    make_certificates(other, "decode")
    async with (
        serving(other) as server,
        open_channel(server.address, "decode", identity(tmp_path, "gateway")) as channel,
    ):
        assert await outcome(channel, "/a/b") is grpc.StatusCode.UNAVAILABLE


async def test_callers_without_certificates_reach_what_is_for_everybody(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    async with (
        echoing(identity(tmp_path, "gateway"), requires_client=False) as address,
        raw_channel(address, "gateway", tmp_path / "ca.pem") as channel,
    ):
        for method, callers in CALLERS.items():
            expected = "OK" if ANYONE in callers else "PERMISSION_DENIED"
            assert (await outcome(channel, method)).name == expected, method


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def test_rotation_without_a_restart(tmp_path: Path) -> None:
    """A new authority: first trusted beside the old one, then alone; a Session outlives it all."""
    make_certificates(tmp_path)
    old_ca = (tmp_path / "ca.pem").read_bytes()
    own = identity(tmp_path, "gateway")
    async with serving(tmp_path) as server, open_channel(server.address, "decode", own) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        session = stub.Session()
        await session.write(decode_pb2.SessionRequest())
        assert await session.read() == decode_pb2.SessionEvent()

        async def works() -> bool:
            call = stub.Session(timeout=TIMEOUT_S)
            try:
                await call.write(decode_pb2.SessionRequest())
                return await call.read() == decode_pb2.SessionEvent()
            except grpc.aio.AioRpcError:
                return False
            finally:
                call.cancel()

        new = tmp_path / "new"
        make_certificates(new)
        new_ca = (new / "ca.pem").read_bytes()
        newcomer = identity(new, "gateway")
        async with open_channel(server.address, "decode", newcomer) as other:
            assert await outcome(other, "/a/b") is grpc.StatusCode.UNAVAILABLE

        (tmp_path / "ca.pem").write_bytes(old_ca + new_ca)
        await asyncio.sleep(1.2)  # both ends have looked again
        assert await works()
        for name in ("decode", "gateway"):
            # As a copy would do it: one file after the other, with a moment of misfit.
            for suffix in ("-key.pem", ".pem"):
                (tmp_path / f"{name}{suffix}").write_bytes((new / f"{name}{suffix}").read_bytes())
                assert await works()
        await asyncio.sleep(1.2)  # An end that trusts the new authority alone meets no old one.
        (tmp_path / "ca.pem").write_bytes(new_ca)

        async def is_new() -> bool:
            assert await works()
            return own.current().cert == (new / "gateway.pem").read_bytes()

        await wait_for(is_new)

        async def is_welcome() -> bool:
            async with open_channel(server.address, "decode", newcomer) as other:
                return await outcome(other, "/a/b") is grpc.StatusCode.UNIMPLEMENTED

        await wait_for(is_welcome)
        await session.write(decode_pb2.SessionRequest())
        assert await session.read() == decode_pb2.SessionEvent()
        session.cancel()


async def test_probes_need_no_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    async with serving(tmp_path, health_port=0) as server:
        assert server.health_address != server.address
        async with grpc.aio.insecure_channel(server.health_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def state(name: str) -> str:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

            assert [await state(""), await state(LIVENESS)] == ["NOT_SERVING", "SERVING"]
            await server.set_serving(True)
            await server.set_alive(False)
            assert [await state(""), await state(LIVENESS)] == ["SERVING", "NOT_SERVING"]
            assert await outcome(channel, "/weft.v1.DecodeService/Session") is (
                grpc.StatusCode.UNIMPLEMENTED
            )


def test_files_that_cannot_be_used_are_told_apart(tmp_path: Path) -> None:
    authority = make_certificates(tmp_path, "decode", "gateway", "rest")
    other = tmp_path / "other"
    make_certificates(other, "decode")
    issue(authority, tmp_path, "rest", lifetime=-DAY)
    good = files_of(tmp_path, "decode")
    assert read_material(good, "decode").services == {"decode"}
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    cases = [
        ({"cert": tmp_path / "none"}, "--tls-cert .*No such file"),
        ({"cert": empty}, "--tls-cert .*no PEM certificate"),
        ({"key": empty}, "--tls-key .*no unencrypted PEM key"),
        ({"key": files_of(tmp_path, "gateway").key}, "is not the key of"),
        ({"ca": other / "ca.pem"}, "not issued by an authority"),
        ({"ca": empty}, "--tls-ca .*no PEM certificate"),
    ]
    for change, message in cases:
        files = type(good)(**{"cert": good.cert, "key": good.key, "ca": good.ca, **change})
        with pytest.raises(ConfigError, match=message):
            read_material(files, "decode")
    with pytest.raises(ConfigError, match="names decode; gateway needs"):
        read_material(good, "gateway")
    with pytest.raises(ConfigError, match="ended at"):
        read_material(files_of(tmp_path, "rest"), "rest")
    with pytest.raises(ConfigError, match="names gateway; decode needs"):
        ServiceServer(settings(tmp_path, "gateway"), CollectorRegistry())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines"),
        (["--host", "::"], "is open to other machines"),
        (["--tls-cert", "x"], "give all three"),
        (
            ["--admin-port", "0", "--admin-token-file", "x", "--admin-host", "0.0.0.0"],
            "--admin-host 0.0.0.0",
        ),
    ],
)
def test_nothing_is_opened_to_other_machines_by_accident(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(ServiceSettings, flags, {})
    assert message in capsys.readouterr().err
    if "--tls-cert" not in flags:
        assert load_settings(ServiceSettings, [*flags, "--insecure"], {}).exposure


def test_a_gateway_that_is_open_needs_keys_too(capsys: pytest.CaptureFixture[str]) -> None:
    tls = ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"]
    flags = ["--model-dir", "m", "--decode", "h:1", "--host", "0.0.0.0", *tls]
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, flags, {})
    assert "there is no --api-keys-file" in capsys.readouterr().err
    load_settings(GatewaySettings, [*flags, "--api-keys-file", "f"], {})
    load_settings(GatewaySettings, [*flags, "--insecure"], {})


OPEN = ["--host", "0.0.0.0", "--insecure"]
TLS = ["--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "auto"),
        (["--insecure"], "auto"),
        (["--host", "0.0.0.0", *TLS], "auto"),
        # Nobody knows who tells where to write there.
        (OPEN, "shared"),
        ([*OPEN, "--transport", "data"], "data"),
        ([*OPEN, "--transport", "nixl"], "nixl"),
    ],
)
def test_nixl_takes_nobodys_metadata_unless_it_is_told_to(flags: list[str], expected: str) -> None:
    store = load_settings(KvStoreSettings, flags, {})
    assert store.page_transport == expected
    worker = load_settings(PrefillSettings, ["--model-dir", "m", *flags], {})
    assert worker.engine_config("prefill", "prefill-0").transport == expected


def test_what_pages_cost_or_risk_on_an_open_port_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def said(*flags: str, nixl: bool) -> str:
        caplog.clear()
        load_settings(KvStoreSettings, flags, {}).tell_of_pages(nixl)
        return caplog.text

    assert "from anybody who reaches --host 0.0.0.0" in said(
        *OPEN, "--transport", "nixl", nixl=True
    )
    assert "accept that with --transport nixl" in said(*OPEN, nixl=False)
    assert "anybody" not in said("--host", "0.0.0.0", *TLS, nixl=True)
    assert not said(nixl=True)


async def test_a_store_that_is_open_does_not_speak_nixl() -> None:
    flags = ["--port", "0", "--metrics-port", "none", "--memory-bytes", "1048576"]
    store = KvStore(load_settings(KvStoreSettings, [*flags, *OPEN], {}), "store")
    try:
        assert store.transport.names == ["shared", "data"]
    finally:
        await store.close()


async def test_an_open_port_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    values = ServiceSettings(host="0.0.0.0", insecure=True, metrics_port=None)
    server = ServiceServer(values, CollectorRegistry())
    await server.start([])
    await server.stop()
    assert "insecure: --host 0.0.0.0 is open to other machines" in caplog.text


def test_weft_certs_makes_and_renews(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    command = [sys.executable, "-m", "weft.cli", "certs", str(folder)]

    def run(*flags: str) -> str:
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "a new authority" in run("--host", "weft.example.org", "--days", "30")
    for path in folder.iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o600 if path.name.endswith("-key.pem") else 0o644), path
    assert {path.name for path in folder.iterdir()} == {
        "ca.pem",
        "ca-key.pem",
        *(f"{service}{suffix}" for service in SERVICES for suffix in (".pem", "-key.pem")),
    }
    before = {service: read_material(files_of(folder, service), service) for service in SERVICES}
    days = (before["decode"].expires - datetime.datetime.now(datetime.UTC)).days
    assert 29 <= days <= 30
    assert "the authority that was there" in run("--service", "decode")
    after = {service: read_material(files_of(folder, service), service) for service in SERVICES}
    assert after["decode"].cert != before["decode"].cert
    assert after["gateway"] == before["gateway"]
