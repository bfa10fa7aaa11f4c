"""What an endpoint picker asks before a request is sent on: refused as the request would be, and
nothing is taken.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import (
    DeadlineExceeded,
    Draining,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PeerUnavailable,
    RateLimited,
)
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2, edge_pb2, edge_pb2_grpc, gateway_pb2

Metadata = tuple[tuple[str, str], ...]


def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 400])


def brief(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65, 66]])


async def check(mesh: Harness, model: str = MODEL, metadata: Metadata = ()) -> Any:
    """None if a request would be admitted, else why not."""
    stub = edge_pb2_grpc.EdgeServiceStub(mesh.channel)
    request = edge_pb2.CheckAdmissionRequest(model=model)
    try:
        await stub.CheckAdmission(request, metadata=metadata, timeout=30)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


def ask(mesh: Harness, metadata: Metadata = ()) -> Any:
    request = gateway_pb2.CompleteRequest(text="hi", model=MODEL)
    request.stop.max_tokens = 400
    return mesh.typed.Complete(request, metadata=metadata)


async def test_a_request_is_refused_when_the_queue_is_full_and_takes_nothing(
    tmp_path: Path,
) -> None:
    places = {"max_running_requests": 1, "max_queued_requests": 1}
    async with gateway(tmp_path, endless, step_s=0.01, **places) as mesh:
        demand = mesh.app.catalogue.base(MODEL).demand
        for _ in range(5):
            assert await check(mesh) is None
        assert await check(mesh, "") is None
        assert demand.requests == 0
        calls = [ask(mesh), ask(mesh)]
        load = mesh.app.pipeline.load
        await mesh.wait(lambda: (load().running_prompts, load().queued_prompts) == (1, 1))
        arrived = demand.requests
        for number in range(1, 4):
            error = await check(mesh)
            assert isinstance(error, Overloaded)
            assert error.retry_after_s
            assert error.retry_after_s >= 1
            # Planners see what is refused here.
            assert (demand.requests, demand.refused_requests) == (arrived + number, number)
        assert (load().running_prompts, load().queued_prompts) == (1, 1)
        for call in calls:
            call.cancel()
        await mesh.wait(lambda: load().running_prompts == 0)
        assert await check(mesh) is None


async def test_rates_and_keys_count_and_are_not_charged(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.small]\nrequests_per_minute = 1\n")
    made = {name: new_key(name) for name in ("small", "large")}
    write_keys(tmp_path / "keys.json", [entry for _, entry in made.values()])
    keys: dict[str, Metadata] = {
        name: (("authorization", f"Bearer {key}"),) for name, (key, _) in made.items()
    }
    files = {
        "api_keys_file": tmp_path / "keys.json",
        "tenants_file": tmp_path / "tenants.toml",
    }
    async with gateway(tmp_path, brief, **files) as mesh:
        assert isinstance(await check(mesh), InvalidApiKey)
        for _ in range(3):
            assert await check(mesh, metadata=keys["small"]) is None
        async for _ in ask(mesh, keys["small"]):
            pass
        assert isinstance(await check(mesh, metadata=keys["small"]), RateLimited)
        assert await check(mesh, metadata=keys["large"]) is None


async def test_what_is_wrong_is_told_and_not_counted(tmp_path: Path) -> None:
    async with gateway(tmp_path, brief) as mesh:
        assert isinstance(await check(mesh, "nobody's"), ModelNotFound)
        wrong = (("x-request-timeout-ms", "soon"),)
        assert isinstance(await check(mesh, metadata=wrong), InvalidRequest)
        assert mesh.app.catalogue.base(MODEL).demand.requests == 0


async def test_without_workers_it_says_so_within_the_request_s_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, brief) as mesh:
        await mesh.workers[0].stop()
        router = mesh.app.catalogue.base(MODEL).router
        await mesh.wait(lambda: not router.has_holder(b""))
        error = await check(mesh, metadata=(("x-request-timeout-ms", "1"),))
        assert isinstance(error, (PeerUnavailable, DeadlineExceeded))
        error = await check(mesh)
        assert isinstance(error, PeerUnavailable)
        assert "no decode worker is ready" in error.message
        assert error.retry_after_s


async def test_a_gateway_that_drains_sends_the_question_to_another(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.01) as mesh:
        call = ask(mesh)
        await mesh.wait(lambda: mesh.app.pipeline.load().running_prompts == 1)
        draining = asyncio.create_task(mesh.app.drain())
        await mesh.wait(lambda: mesh.app.pipeline.is_draining)
        assert isinstance(await check(mesh), Draining)
        assert mesh.app.catalogue.base(MODEL).demand.refused_requests == 0
        call.cancel()
        await draining
