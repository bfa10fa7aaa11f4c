"""A whole mesh with certificates and API keys: it works, and strangers find every door shut."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import weft.v1
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from weft.cli.certs import files_of, issue, read_authority
from weft.common.rpc.authorize import ANYONE, CALLERS
from weft.common.rpc.channel import open_blocking_channel
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import PermissionDenied, Unauthenticated
from weft.gateway.admission.keys import PREFIX
from weft.gateway.api.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.secure_mesh import SecureMesh
from weft.testing.meshes.tiny_mesh import Greedy
from weft.testing.services.certificates import DAY, identity, make_certificates, raw_channel
from weft.testing.services.fuzz import bodies, json_values, payloads
from weft.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    kv_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600)]

STREAM_S = 0.3
"""Streams that end with nobody's help are ended by the deadline."""
NUM_NEW = 8


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[SecureMesh]:
    mesh = SecureMesh(tmp_path_factory.mktemp("secure"))
    try:
        mesh.wait_ready()
        wait_until(lambda: all(worker["healthy"] for worker in workers_of(mesh)), 60)
        yield mesh
    finally:
        assert mesh.stop() == 0, mesh.text


def workers_of(mesh: SecureMesh) -> list[dict[str, Any]]:
    """As operators see them."""
    done = mesh.weft("status", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["workers"]
    return found


def test_text_pages_and_store_travel_as_they_should(mesh: SecureMesh) -> None:
    """REST by HTTPS, gateway, Session, a fill by the prefill worker, then one by the store."""
    greedy = Greedy(mesh.model_dir)
    prompt = greedy.prompt(100, NUM_NEW)
    expected = greedy.text(greedy.ids(prompt, NUM_NEW))
    assert mesh.complete(prompt, NUM_NEW) == expected
    wait_until(lambda: mesh.counter("decode-0", "fills_done"), 20)

    def is_stored() -> bool:
        stats = kvstore_pb2.StatsRequest()
        stub = kvstore_pb2_grpc.KvStoreServiceStub
        return int(mesh.call("cli", "kvstore-0", stub, "Stats", stats).cached_pages) >= 6

    wait_until(is_stored, 30)

    def comes_from_the_store() -> bool:
        # The store is asked for 80 ms at most, which a busy machine may miss.
        flush = mesh.weft("flush", "decode-0", "prefill-0", "--state-dir", str(mesh.state))
        assert flush.returncode == 0, flush.stderr
        assert mesh.complete(prompt, NUM_NEW) == expected
        return mesh.counter("decode-0", "store_hit_pages") >= 6

    wait_until(comes_from_the_store, 60)


def test_operators_see_the_mesh(mesh: SecureMesh) -> None:
    workers = workers_of(mesh)
    assert {worker["role"] for worker in workers} == {"prefill", "decode", "kvstore"}
    assert all(worker["healthy"] for worker in workers), workers
    done = subprocess.run(
        [*WEFT, "status", "--address", mesh.grpc_address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "--tls-dir" in done.stderr


def test_rest_wants_a_key(mesh: SecureMesh) -> None:
    url = f"{mesh.url}/v1/models"
    with httpx.Client(verify=mesh.context, trust_env=False) as client:
        for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": mesh.key}):
            answer = client.get(url, headers=headers)
            assert answer.status_code == 401
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("invalid_api_key", None)
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get(url, headers={"authorization": f"Bearer {mesh.key}"}).status_code == 200
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert client.get(f"{mesh.url}{path}").status_code == 200
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(url, trust_env=False)


def test_the_console_needs_the_operators_token(mesh: SecureMesh) -> None:
    """A tenant's key sees nothing of others; the token passes the gateway on to every member."""
    token = (mesh.state / "admin-token").read_text().strip()
    members = ("decode-0", "prefill-0", "kvstore-0")
    with httpx.Client(
        base_url=mesh.url, verify=mesh.context, trust_env=False, timeout=30
    ) as client:
        for secret, status in ((None, 401), ("wrong", 401), (mesh.key, 403), (token, 200)):
            headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
            with client.stream("GET", "/mesh/watch", headers=headers) as answer:
                assert answer.status_code == status
                if status == 200:
                    first = json.loads(next(answer.iter_lines()).removeprefix("data: "))
                    assert first["can_operate"]
                    assert {one["member_id"] for one in first["members"]} >= set(members[:2])
            for member in members:
                answer = client.post("/mesh/flush", json={"member_id": member}, headers=headers)
                assert answer.status_code == (200 if status == 200 else 401), answer.text
            for path in ("start_profile", "stop_profile"):
                answer = client.post(f"/{path}", headers=headers)
                assert answer.status_code == (200 if status == 200 else 401), answer.text
        profile = Path(answer.json()["path"])
        wait_until(profile.exists, 60)
        assert len(answer.json()["workers"]) == 2
        level = {"member_id": "decode-0", "level": "info"}
        assert client.post("/mesh/log_level", json=level, headers=headers).status_code == 200
        for change in ("drain", "undrain"):
            answer = client.post(
                f"/mesh/{change}", json={"member_id": "prefill-0"}, headers=headers
            )
            assert answer.status_code == 200, answer.text


def test_workers_do_not_take_calls_from_those_who_may_not(mesh: SecureMesh) -> None:
    forbidden: list[tuple[str, str, Any, str]] = [
        ("prefill", "decode-0", worker_pb2_grpc.WorkerServiceStub, "ReportExit"),
        ("prefill", "decode-0", worker_pb2_grpc.WorkerServiceStub, "Drain"),
        ("client", "decode-0", worker_pb2_grpc.WorkerServiceStub, "GetInfo"),
        ("gateway", "prefill-0", prefill_pb2_grpc.PrefillServiceStub, "FillStatus"),
        ("gateway", "kvstore-0", kvstore_pb2_grpc.KvStoreServiceStub, "Lookup"),
        ("client", "kvstore-0", kvstore_pb2_grpc.KvStoreServiceStub, "Put"),
        ("kvstore", "gateway", gateway_pb2_grpc.GatewayServiceStub, "GetFleet"),
        ("client", "gateway", gateway_pb2_grpc.GatewayServiceStub, "GetFleet"),
    ]
    requests = {
        "ReportExit": worker_pb2.ReportExitRequest(worker_id="prefill-0", epoch=1),
        "Drain": worker_pb2.DrainRequest(),
        "GetInfo": worker_pb2.GetInfoRequest(),
        "FillStatus": kv_pb2.FillStatusRequest(),
        "Lookup": kvstore_pb2.LookupRequest(),
        "Put": kvstore_pb2.PutRequest(),
        "GetFleet": gateway_pb2.GetFleetRequest(),
    }
    for caller, name, stub, method in forbidden:
        with pytest.raises(grpc.RpcError) as caught:
            mesh.call(caller, name, stub, method, requests[method])
        error = from_rpc_error(caught.value)  # type: ignore[arg-type]
        assert isinstance(error, PermissionDenied), (caller, name, method, error)
    for caller in ("decode", "prefill", "rest", "client", "cli"):
        address = mesh.service("decode-0")["address"]
        with open_blocking_channel(address, "decode", identity(mesh.tls, caller)) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Session(iter(()), timeout=60)
            with pytest.raises(grpc.RpcError) as caught:
                next(iter(call))
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)  # type: ignore[arg-type]
    assert "a call was refused" in mesh.log("decode-0")


async def test_strangers_are_refused_everywhere_and_the_mesh_goes_on(
    mesh: SecureMesh, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    make_certificates(wrong, "gateway")
    expired = tmp_path / "expired"
    expired.mkdir()
    issue(read_authority(mesh.tls), expired, "gateway", lifetime=-DAY)
    bad = [files_of(folder, "gateway") for folder in (wrong, expired)]
    for name in ("decode-0", "prefill-0", "kvstore-0", "gateway"):
        role = name.rpartition("-")[0] or name
        for key in ("address", "admin_address"):
            address = mesh.service(name)[key]
            channels = [raw_channel(address, role, mesh.tls / "ca.pem")]
            channels += [
                raw_channel(address, role, mesh.tls / "ca.pem", (files.cert, files.key))
                for files in bad
            ]
            channels.append(grpc.aio.insecure_channel(address))
            for channel in channels:
                async with channel:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, (name, key)
    assert mesh.complete([5, 7], NUM_NEW)


def test_a_tenants_key_opens_no_operators_port(mesh: SecureMesh) -> None:
    token = (mesh.state / "admin-token").read_text().strip()
    for name in ("gateway", "decode-0", "prefill-0", "kvstore-0"):
        role = name.rpartition("-")[0] or name
        address = mesh.service(name)["admin_address"]
        for caller, secret, refused in (
            ("cli", mesh.key, Unauthenticated),
            ("client", token, PermissionDenied),
            ("gateway", token, PermissionDenied),
            ("cli", token, None),
        ):
            with open_blocking_channel(address, role, identity(mesh.tls, caller)) as channel:
                call = admin_pb2_grpc.AdminServiceStub(channel).DumpState
                metadata = (("authorization", f"Bearer {secret}"),)
                dump = partial(call, admin_pb2.DumpStateRequest(), metadata=metadata, timeout=60)
                if refused is None:
                    assert dump().state
                    continue
                with pytest.raises(grpc.RpcError) as caught:
                    dump()
                assert isinstance(from_rpc_error(caught.value), refused)  # type: ignore[arg-type]


# Fuzzing


OF_SERVICE = {
    "GatewayService": "gateway",
    "OpenAIService": "gateway",
    "ResponsesService": "gateway",
    "AnthropicService": "gateway",
    "OllamaService": "gateway",
    "PoolingService": "gateway",
    "ServerService": "gateway",
    "TrainerService": "gateway",
    "MeshService": "gateway",
    "EdgeService": "gateway",
    "TraceService": "gateway",
    "DecodeService": "decode-0",
    "PrefillService": "prefill-0",
    "KvStoreService": "kvstore-0",
    "WorkerService": "decode-0",
    "AdminService": "prefill-0",
}
HARMFUL = {
    # A worker that drains takes nothing more, as it was told to.
    "/weft.v1.WorkerService/Drain",
    # So does one that is paused.
    "/weft.v1.AdminService/Pause",
}
# `SupervisorService` is of `weft up`, which this mesh has not.
METHODS = [
    method
    for method in CALLERS
    if method.startswith("/weft.v1.") and "Supervisor" not in method and method not in HARMFUL
]


def num_examples(request: pytest.FixtureRequest, short: int, long: int) -> int:
    return long if request.config.getoption("--full") else short


def method_of(path: str) -> MethodDescriptor:
    _, service, name = path.split("/")
    for module in pkgutil.iter_modules(weft.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"weft.v1.{module.name}").DESCRIPTOR
            if (found := file.services_by_name.get(service.rpartition(".")[2])) is not None:
                return found.methods_by_name[name]
    raise AssertionError(path)


class Fuzzed:
    """One rpc, called with anything."""

    def __init__(self, mesh: SecureMesh, path: str) -> None:
        service = path.split("/")[1].rpartition(".")[2]
        self.path, self.method = path, method_of(path)
        caller = sorted(CALLERS[path] - {ANYONE})[0]
        port = "admin_address" if service == "AdminService" else "address"
        token = (mesh.state / "admin-token").read_text().strip()
        secret = token if service == "AdminService" else mesh.key
        self._metadata = (("authorization", f"Bearer {secret}"),)
        self._channel = mesh.open(caller, OF_SERVICE[service], port)

    def __enter__(self) -> Fuzzed:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, payloads: list[bytes]) -> grpc.StatusCode:
        """One call; a stream gets all payloads, another rpc the first."""
        kinds = (self.method.client_streaming, self.method.server_streaming)
        names = {True: "stream", False: "unary"}
        make = getattr(self._channel, "_".join(names[kind] for kind in kinds))
        given = iter(payloads) if kinds[0] else (payloads or [b""])[0]
        call = make(self.path)
        try:
            if not kinds[1]:
                call(given, timeout=60, metadata=self._metadata)
            else:
                for _ in call(given, timeout=STREAM_S, metadata=self._metadata):
                    pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


@pytest.mark.parametrize("path", METHODS)
def test_no_message_crashes_a_service(
    mesh: SecureMesh, path: str, request: pytest.FixtureRequest
) -> None:
    """Any bytes at any rpc get a typed answer: nothing ends, nothing is surprised."""
    before, known = mesh.incarnations(), len(mesh.surprises())
    codes: Counter[grpc.StatusCode] = Counter()
    with Fuzzed(mesh, path) as fuzzed:
        payload = payloads(fuzzed.method.input_type)
        is_stream = fuzzed.method.client_streaming
        short = 4 if is_stream or fuzzed.method.server_streaming else 12

        @settings(
            max_examples=num_examples(request, short, 50 * short),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(payload, min_size=1, max_size=6))
        def check(given_payloads: list[bytes]) -> None:
            batches = [given_payloads] if is_stream else [[p] for p in given_payloads]
            with ThreadPoolExecutor(6) as pool:
                codes.update(pool.map(fuzzed.call, batches))

        check()
    assert not codes[grpc.StatusCode.UNKNOWN], codes
    assert not codes[grpc.StatusCode.INTERNAL], codes
    assert mesh.incarnations() == before
    assert mesh.surprises()[known:] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ChatBody),
        ("/v1/completions", CompletionBody),
        ("/tokenize", TokenizeBody),
        ("/detokenize", DetokenizeBody),
    ],
)
def test_no_body_crashes_the_mesh(
    mesh: SecureMesh, path: str, body: type[BaseModel], request: pytest.FixtureRequest
) -> None:
    before = mesh.incarnations()
    names = list(body.model_fields)
    headers = {"authorization": f"Bearer {mesh.key}", "content-type": "application/json"}
    seen: Counter[int] = Counter()
    with httpx.Client(verify=mesh.context, trust_env=False, timeout=60) as client:

        @settings(
            max_examples=num_examples(request, 40, 3000),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies(names) | json_values(), st.none() | st.integers(0, 200))
        def check(value: object, cut: int | None) -> None:
            data = json.dumps(value).encode(errors="replace")[:cut]
            answer = client.post(f"{mesh.url}{path}", content=data, headers=headers)
            seen[answer.status_code] += 1
            assert answer.status_code < 500, (data, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], data

        check()
    assert mesh.incarnations() == before
    assert seen[400]


def test_the_mesh_answers_after_all_that(mesh: SecureMesh) -> None:
    greedy = Greedy(mesh.model_dir)
    prompt = greedy.prompt(100, NUM_NEW)
    assert mesh.complete(prompt, NUM_NEW) == greedy.text(greedy.ids(prompt, NUM_NEW))


@pytest.mark.parametrize("name", ["gateway", "decode-0", "prefill-0", "kvstore-0"])
def test_messages_that_are_too_large_are_refused(mesh: SecureMesh, name: str) -> None:
    """Each service has a bound, and so has the operators' port; nothing of it is read."""
    caller = "gateway" if name == "decode-0" else "decode"
    path = {
        "gateway": "/weft.v1.OpenAIService/ChatCompletions",
        "decode-0": "/weft.v1.WorkerService/GetInfo",
        "prefill-0": "/weft.v1.PrefillService/FillStatus",
        "kvstore-0": "/weft.v1.KvStoreService/Lookup",
    }[name]
    caller = "rest" if name == "gateway" else caller
    token = (mesh.state / "admin-token").read_text().strip()
    cases = [
        (caller, "address", path, 17 << 20, mesh.key),
        ("cli", "admin_address", "/weft.v1.AdminService/DumpState", 17 << 20, token),
    ]
    for who, port, method, size, secret in cases:
        with mesh.open(who, name, port) as channel:
            call = channel.unary_stream(method)(
                bytes(size), timeout=60, metadata=(("authorization", f"Bearer {secret}"),)
            )
            with pytest.raises(grpc.RpcError) as caught:
                next(iter(call))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, method  # type: ignore[attr-defined]


def test_no_log_has_a_secret(mesh: SecureMesh) -> None:
    token = (mesh.state / "admin-token").read_text().strip()
    keys = [path.read_text().splitlines()[1] for path in mesh.tls.glob("*-key.pem")]
    logs = [path.read_text(errors="replace") for path in (mesh.state / "logs").iterdir()]
    assert logs
    for log in (*logs, mesh.text):
        for secret in (mesh.key, mesh.key.removeprefix(PREFIX).partition("-")[2], token, *keys):
            assert secret not in log
