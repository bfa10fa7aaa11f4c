"""Latency targets through both faces: refusals, holding, tenants' terms, what operators see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.duration_pb2 import Duration
from pydantic import ValidationError
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ConfigError, InvalidRequest, TargetUnattainable
from weft.gateway.admission.keys import new_key, write_keys
from weft.gateway.admission.tenants import Tenants
from weft.gateway.settings import GatewaySettings
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2

RATE = 1000.0


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 5])


def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * 10_000])


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with gateway(tmp_path, script) as harness:
        yield harness


async def load(mesh: Harness, queued_tokens: int, worker: int = 0) -> None:
    """The worker says how fast it is and what waits there, and the gateway has heard it."""
    mesh.workers[worker].prefill_tokens_per_second = RATE
    mesh.workers[worker].queued_tokens = queued_tokens

    def heard() -> bool:
        known = list(mesh.app.fleet.workers("decode"))[worker]
        return known.load.queued_tokens == queued_tokens and known.tokens_per_second == RATE

    await mesh.wait(heard)


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def within(first_s: float | None = None, between_s: float | None = None) -> Any:
    return gateway_pb2.LatencyTargets(
        first_token=None if first_s is None else duration(first_s),
        between_tokens=None if between_s is None else duration(between_s),
    )


async def test_a_typed_request_is_refused_with_the_time_to_come_again(mesh: Harness) -> None:
    await load(mesh, 5000)
    request = gateway_pb2.CompleteRequest(text="hello", targets=within(1.0))
    began = time.monotonic()
    error = await refusal(mesh.typed.Complete(request))
    took_s = time.monotonic() - began
    assert isinstance(error, TargetUnattainable)
    assert (error.reason, error.grpc_code, error.http_status) == (
        "TARGET_UNATTAINABLE",
        "RESOURCE_EXHAUSTED",
        429,
    )
    assert error.retryable
    assert error.stage == "admit"
    assert error.retry_after_s is not None
    # What it has waited already counts as well.
    assert 3.8 <= error.retry_after_s <= 4.2 + took_s
    assert not mesh.workers[0].submits
    request.targets.first_token.FromSeconds(60)
    answers = [answer async for answer in mesh.typed.Complete(request)]
    assert answers[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("way", ["body", "header"])
async def test_rest_bodies_and_headers_have_targets(mesh: Harness, way: str) -> None:
    await load(mesh, 5000)
    body: dict[str, object] = {"prompt": "hello"}
    metadata = []
    if way == "body":
        body["ttft_target_ms"] = 1500
    else:
        metadata = [("x-ttft-target-ms", "1500.5")]
    request = HttpBody(content_type="application/json", data=json.dumps(body).encode())
    error = await refusal(mesh.openai.Completions(request, metadata=metadata))
    assert isinstance(error, TargetUnattainable)
    # A field of the body is stronger than the header.
    body["ttft_target_ms"] = 60_000
    request.data = json.dumps(body).encode()
    messages = [one async for one in mesh.openai.Completions(request, metadata=metadata)]
    assert json.loads(messages[0].data)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ttft_target_ms": 0.5}, "ttft_target_ms"),
        ({"ttft_target_ms": -1}, "ttft_target_ms"),
        ({"itl_target_ms": 1e9}, "itl_target_ms"),
        ({"itl_target_ms": "20"}, "itl_target_ms"),
    ],
)
async def test_bad_targets_are_named(mesh: Harness, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"prompt": "x", **fields}).encode()
    error = await refusal(mesh.openai.Completions(HttpBody(data=body)))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


async def test_a_header_that_is_no_number_is_named(mesh: Harness) -> None:
    call = mesh.typed.Complete(
        gateway_pb2.CompleteRequest(text="x"), metadata=[("x-itl-target-ms", "soon")]
    )
    error = await refusal(call)
    assert isinstance(error, InvalidRequest)
    assert error.param == "x-itl-target-ms"


async def test_a_pace_that_workers_do_not_have_is_refused(mesh: Harness) -> None:
    worker = mesh.workers[0]
    worker.decode_step_s, worker.decode_step_requests = 0.05, 1.0
    await mesh.wait(
        lambda: mesh.app.catalogue.first.latency_admission.gate._forecaster.least_step_s()
    )
    request = gateway_pb2.CompleteRequest(text="x", targets=within(between_s=0.02))
    assert isinstance(await refusal(mesh.typed.Complete(request)), TargetUnattainable)


async def test_without_targets_nobody_is_refused_or_held(mesh: Harness) -> None:
    await load(mesh, 10**7)
    answers = [a async for a in mesh.typed.Complete(gateway_pb2.CompleteRequest(text="x"))]
    assert answers[-1].usage.completion_tokens == 5


async def test_goodput_is_counted_and_shown(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, metrics_port=0) as mesh:
        await load(mesh, 3000)
        asks = [within(60.0), within(60.0, 10.0), within(60.0, 0.001), within(0.5)]
        for targets in asks:
            call = mesh.typed.Complete(gateway_pb2.CompleteRequest(text="hi", targets=targets))
            if targets is asks[-1]:
                await refusal(call)
            else:
                assert [answer async for answer in call]
        metric = mesh.app.metrics.registry.get_sample_value
        expected = {"met": 2, "slow_tokens": 1, "refused": 1}
        await mesh.wait(
            lambda: (
                {
                    outcome: metric("weft_slo_requests_total", {"outcome": outcome})
                    for outcome in expected
                }
                == expected
            )
        )
        fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
        assert fleet.load.requests_with_target == 4
        assert fleet.load.requests_within_target == 2
        assert fleet.load.held_requests == 0
        assert fleet.load.HasField("first_token")
        assert metric("weft_requests_held") == 0


# Tenants


TERMS = """
[default]
weight = 0.5

[tenants.chat]
ttft_target_ms = 800
itl_target_ms = 500
weight = 2
"""


async def test_tenants_have_targets_and_a_flood_is_held(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TERMS)
    keys = {name: new_key(name) for name in ("chat", "flood")}
    write_keys(tmp_path / "keys.json", [entry for _, entry in keys.values()])
    metadata = {name: (("authorization", f"Bearer {key}"),) for name, (key, _) in keys.items()}
    async with gateway(
        tmp_path,
        script,
        api_keys_file=tmp_path / "keys.json",
        tenants_file=tmp_path / "tenants.toml",
    ) as mesh:
        gate = mesh.app.catalogue.first.latency_admission.gate
        await load(mesh, 700)  # more than 0.25 s of work
        flood = [
            mesh.typed.Complete(gateway_pb2.CompleteRequest(text="x"), metadata=metadata["flood"])
            for _ in range(6)
        ]
        await mesh.wait(lambda: gate.num_held == 6)
        fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
        assert fleet.load.held_requests == 6
        await load(mesh, 5000)
        # Held as the others are, it would be late: refused at once.
        late = mesh.typed.Complete(gateway_pb2.CompleteRequest(text="x"), metadata=metadata["chat"])
        assert isinstance(await refusal(late), TargetUnattainable)
        own = gateway_pb2.CompleteRequest(text="x", targets=within(30.0))
        patient = mesh.typed.Complete(own, metadata=metadata["chat"])
        await mesh.wait(lambda: gate.num_held == 7)
        flood.pop().cancel()
        await mesh.wait(lambda: gate.num_held == 6)
        await load(mesh, 0)
        for call in [patient, *flood]:
            assert [answer async for answer in call][-1].usage.completion_tokens == 5
        order = [submit.tenant for submit in mesh.workers[0].submits]
        assert order.index("chat") <= 1, "a turn of its own, before most of the flood"
        await mesh.wait(lambda: gate.num_held == 0)


async def test_held_requests_end_at_their_deadline(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.other]\nttft_target_ms = 5\n")
    async with gateway(tmp_path, script, tenants_file=tmp_path / "tenants.toml") as mesh:
        await load(mesh, 10**6)
        request = gateway_pb2.CompleteRequest(text="x", timeout=duration(0.3))
        error = await refusal(mesh.typed.Complete(request))
        assert (error.reason, error.stage) == ("DEADLINE_EXCEEDED", "admit")
        gate = mesh.app.catalogue.first.latency_admission.gate
        await mesh.wait(lambda: gate.num_held == mesh.app._admission.num_running == 0)


async def test_places_at_the_gateway_are_shared_by_tenants(tmp_path: Path) -> None:
    """One tenant fills the queue; the other one still gets in, and soon."""
    keys = {name: new_key(name) for name in ("flood", "chat")}
    write_keys(tmp_path / "keys.json", [entry for _, entry in keys.values()])
    metadata = {name: (("authorization", f"Bearer {key}"),) for name, (key, _) in keys.items()}
    async with gateway(
        tmp_path,
        endless,
        api_keys_file=tmp_path / "keys.json",
        max_running_requests=1,
        max_queued_requests=4,
        step_s=0.05,
    ) as mesh:
        body = gateway_pb2.CompleteRequest(text="x", stream=True)
        body.stop.max_tokens = 400
        calls = [mesh.typed.Complete(body, metadata=metadata["flood"]) for _ in range(5)]
        await mesh.wait(lambda: mesh.app._admission.num_queued == 4)
        error = await refusal(mesh.typed.Complete(body, metadata=metadata["flood"]))
        assert error.reason == "OVERLOADED"
        quick = mesh.typed.Complete(body, metadata=metadata["chat"])
        error = await refusal(calls[-1])
        assert error.reason == "OVERLOADED", "the newest of those that have most"
        calls[0].cancel()
        await mesh.wait(lambda: len(mesh.workers[0].submits) == 2)
        calls[1].cancel()
        await mesh.wait(lambda: len(mesh.workers[0].submits) == 3)
        assert "chat" in [submit.tenant for submit in mesh.workers[0].submits]
        for call in [*calls, quick]:
            call.cancel()


def test_terms_follow_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TERMS)
    tenants = Tenants(path)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert tenants.of("chat").targets.first_token_s == pytest.approx(0.8)
    assert (tenants.of("other").weight, tenants.of("").weight) == (0.5, 0.5)
    assert tenants.has_targets
    path.write_text("[tenants.other]\nweight = 7\n")
    now_s += 2
    assert tenants.of("other").weight == 7
    assert not tenants.of("chat").targets
    assert not tenants.has_targets
    path.write_text("[tenants.other]\nweight = -7\n")
    now_s += 2
    assert tenants.of("other").weight == 7, "a bad file changes nothing"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.a]\nweight = 0\n", "tenants.a.weight"),
        ("[tenants.a]\nweight = 1e-320\n", "tenants.a.weight"),
        ("[tenants.a]\nweight = nan\n", "tenants.a.weight"),
        ("[default]\ntokens_per_minute = inf\n", "default.tokens_per_minute"),
        ("[tenants.a]\nttft_ms = 5\n", "tenants.a.ttft_ms"),
        ("[default]\nttft_target_ms = 0\n", "default.ttft_target_ms"),
        ("nonsense", "not TOML"),
        (None, "No such file"),
    ],
)
def test_bad_terms_are_named(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "tenants.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        Tenants(path)


def test_workers_may_always_have_something_to_do(tmp_path: Path) -> None:
    """Nothing ahead would mean that everybody is held for ever."""
    with pytest.raises(ValidationError, match="ahead_s"):
        GatewaySettings(model_dir=tmp_path, decode=["127.0.0.1:1"], ahead_s=0)


def test_a_misspelt_table_of_tenants_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenant.chat]\nweight = 4\n")
    with pytest.raises(ConfigError, match=r"tenants.toml: tenant: no such name; .*targets"):
        Tenants(path)


async def test_without_a_decode_worker_targets_do_not_make_clients_wait(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[default]\nttft_target_ms = 60000\n")
    async with gateway(tmp_path, script, tenants_file=tmp_path / "tenants.toml") as mesh:
        await load(mesh, 0)
        await mesh.workers[0].stop()
        worker = next(iter(mesh.app.fleet.workers("decode")))
        await mesh.wait(lambda: worker.problem(asyncio.get_running_loop().time()))
        request = gateway_pb2.CompleteRequest(text="x", targets=within(30.0, 1.0))
        error = await refusal(mesh.typed.Complete(request, timeout=60))
        assert (error.reason, error.stage) == ("PEER_UNAVAILABLE", "route")
        assert error.retry_after_s


async def test_a_gateway_that_stops_lets_held_requests_go(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("[default]\nttft_target_ms = 600000\n")
    async with gateway(
        tmp_path, script, tenants_file=tmp_path / "tenants.toml", drain_grace_s=60.0
    ) as mesh:
        await load(mesh, 10_000)
        held = mesh.typed.Complete(gateway_pb2.CompleteRequest(text="x"))
        await mesh.wait(lambda: mesh.app.catalogue.first.latency_admission.gate.num_held == 1)
        drained = asyncio.create_task(mesh.app.drain())
        await load(mesh, 0)
        assert [answer async for answer in held]
        await asyncio.wait_for(drained, 60)
