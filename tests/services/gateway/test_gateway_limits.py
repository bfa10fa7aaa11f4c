"""Rates of requests and tokens over gRPC and, through the built edge, with the openai SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import InvalidRequest, RateLimited
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, gateway_pb2_grpc

NUM_TOKENS = 5
TERMS = """
[tenants.small]
requests_per_minute = 2
tokens_per_minute = 120
"""


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[65] * NUM_TOKENS])


@asynccontextmanager
async def limited(folder: Path, **settings: Any) -> AsyncIterator[tuple[Harness, dict[str, str]]]:
    """A gateway with two tenants, one of them limited; and their keys."""
    (folder / "tenants.toml").write_text(TERMS)
    made = {name: new_key(name) for name in ("small", "large")}
    write_keys(folder / "keys.json", [entry for _, entry in made.values()])
    async with gateway(
        folder,
        script,
        api_keys_file=folder / "keys.json",
        tenants_file=folder / "tenants.toml",
        **settings,
    ) as mesh:
        yield mesh, {name: key for name, (key, _) in made.items()}


def ask(mesh: Harness, key: str, max_tokens: int = 10, text: str = "hi") -> Any:
    request = gateway_pb2.CompleteRequest(text=text)
    request.stop.max_tokens = max_tokens
    return mesh.typed.Complete(request, metadata=(("authorization", f"Bearer {key}"),))


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_rpc_error(caught.value)


async def test_requests_that_are_wrong_count(tmp_path: Path) -> None:
    """Each was tokenised; what they had reserved of the tokens is returned."""
    async with limited(tmp_path) as (mesh, keys):
        for _ in range(2):
            error = await refusal(ask(mesh, keys["small"], max_tokens=100_000))
            assert isinstance(error, InvalidRequest)
        assert isinstance(await refusal(ask(mesh, keys["small"])), RateLimited)
        now = asyncio.get_running_loop().time()
        headers = dict(mesh.app.pipeline.limits.headers("small", now))
        assert int(headers["x-ratelimit-remaining-tokens"]) > 100


async def test_a_tenant_is_limited_and_others_are_not(tmp_path: Path) -> None:
    async with limited(tmp_path, metrics_port=0) as (mesh, keys):
        for number in range(2):
            call = ask(mesh, keys["small"])
            header = dict(await call.initial_metadata())
            assert header["x-ratelimit-limit-requests"] == "2"
            assert header["x-ratelimit-remaining-requests"] == str(1 - number)
            assert [answer async for answer in call]
        call = ask(mesh, keys["small"])
        error = await refusal(call)
        assert isinstance(error, RateLimited)
        assert error.retryable
        assert error.retry_after_s is not None
        assert 20 < error.retry_after_s <= 30
        trailer = dict(await call.trailing_metadata())
        assert trailer["x-ratelimit-remaining-requests"] == "0"
        call = ask(mesh, keys["large"])
        assert not [key for key, _ in await call.initial_metadata() if "ratelimit" in key]
        assert [answer async for answer in call]
        count = mesh.app.metrics.registry.get_sample_value(
            "weft_rate_limited_total", {"scope": "tenant", "kind": "requests"}
        )
        assert count == 1


async def test_unused_tokens_are_given_back(tmp_path: Path) -> None:
    async with limited(tmp_path) as (mesh, keys):
        call = ask(mesh, keys["small"], max_tokens=100)
        header = dict(await call.initial_metadata())
        assert int(header["x-ratelimit-remaining-tokens"]) < 20
        (answer,) = [answer async for answer in call]
        used = answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.completion_tokens == NUM_TOKENS
        limits = mesh.app.pipeline.limits

        def left() -> Any:
            tenants: Any = limits.describe(asyncio.get_running_loop().time(), 9)["tenants"]
            return tenants["small"]["tokens"]

        await mesh.wait(lambda: left() >= 120 - used)
        # So a second one of that size is taken, which would not have been.
        assert [answer async for answer in ask(mesh, keys["small"], max_tokens=100)]


async def test_a_prompt_beyond_the_rate_is_refused_before_it_runs(tmp_path: Path) -> None:
    async with limited(tmp_path) as (mesh, keys):
        assert [answer async for answer in ask(mesh, keys["small"], max_tokens=90)]
        error = await refusal(ask(mesh, keys["small"], max_tokens=115))
        assert isinstance(error, RateLimited)
        assert "tokens per minute" in error.message
        assert len(mesh.workers[0].submits) == 1
        # The refused one does not count as a request.
        assert [answer async for answer in ask(mesh, keys["small"], max_tokens=20)]


@pytest.mark.parametrize("code", ["OVERLOADED", "PEER_UNAVAILABLE"])
async def test_what_workers_refuse_costs_nothing(tmp_path: Path, code: str) -> None:
    refused = decode_pb2.SessionEvent.Failed(
        error=common_pb2.ErrorDetail(code=code, retryable=True, message="no")
    )
    async with limited(tmp_path, max_attempts=1, resume_timeout_s=0, breaker_failures=0) as (
        mesh,
        keys,
    ):
        mesh.workers[0].script = lambda submit, prompt: Script(
            tokens=[[65]], fail=refused, fail_after=0
        )
        for _ in range(4):  # of two a minute, and the tokens of one
            error = await refusal(ask(mesh, keys["small"], max_tokens=100))
            assert error.reason == code
        mesh.workers[0].script = script
        assert [answer async for answer in ask(mesh, keys["small"], max_tokens=100)]


async def test_replicas_and_everybodys_limit(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=6, replicas=3) as (mesh, keys):
        for _ in range(2):
            assert [answer async for answer in ask(mesh, keys["large"])]
        error = await refusal(ask(mesh, keys["large"]))
        assert isinstance(error, RateLimited)
        assert "all tenants together" in error.message


@pytest.mark.needs("go")
async def test_openai_clients_see_status_headers_and_when_to_come_again(
    tmp_path: Path, rest_binary: Path
) -> None:
    async with limited(tmp_path) as (mesh, keys):
        command = [
            *(str(rest_binary), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--backend", mesh.app.server.address),
        ]
        with ServiceProcess("rest", command, tmp_path) as process:
            ready = await process.ready()
            async with openai.AsyncOpenAI(
                base_url=f"http://{ready['address']}/v1",
                api_key=keys["small"],
                max_retries=0,
                timeout=30,
            ) as client:
                body: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 6}
                raw = await client.completions.with_raw_response.create(**body)
                assert raw.headers["x-ratelimit-limit-requests"] == "2"
                assert raw.headers["x-ratelimit-remaining-requests"] == "1"
                assert raw.headers["x-ratelimit-limit-tokens"] == "120"
                stream = await client.completions.create(**body, stream=True)
                assert [chunk async for chunk in stream]
                with pytest.raises(openai.RateLimitError) as refused:
                    await client.completions.create(**body)
    answer = refused.value.response
    assert answer.status_code == 429
    assert 20 < int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.code == "rate_limit_exceeded"
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_a_client_that_reads_nothing_keeps_no_place(tmp_path: Path) -> None:
    """Not even where what it does not read is the end of its answer."""
    places = {"max_running_requests": 2, "request_timeout_s": 3600.0}
    one_byte = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    async with (
        gateway(tmp_path, script, **places) as mesh,
        grpc.aio.insecure_channel(
            mesh.app.server.address, options=(*one_byte, ("grpc.use_local_subchannel_pool", 1))
        ) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.CompleteRequest(text="hi", stream=True)
        request.stop.max_tokens = NUM_TOKENS
        calls = [stub.Complete(request) for _ in range(2)]
        for call in calls:
            await call.initial_metadata()
        await mesh.wait(lambda: not mesh.app._admission.num_running)
        request.stream = False
        answer = [message async for message in mesh.typed.Complete(request)]
        assert answer[-1].choices[0].finish_reason
        for call in calls:
            call.cancel()
