"""Requests that name their decode worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import InvalidRequest, PeerUnavailable
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, dialects_pb2_grpc

WORKER, RANK = "x-worker-id", "x-data-parallel-rank"


def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7, 8]])


async def ask(mesh: Harness, key: str, value: str, *more: tuple[str, str]) -> None:
    body = HttpBody(data=json.dumps({"prompt": "hello", "max_tokens": 2}).encode())
    async for _ in mesh.openai.Completions(body, metadata=((key, value), *more)):
        pass


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_rpc_error(error.value)


async def test_requests_run_where_they_say(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=11, allow_worker_choice=True) as mesh:
        for number in (3, 10, 0):
            before = len(mesh.workers[number].submits)
            await ask(mesh, WORKER, f"decode-{number}")
            await ask(mesh, RANK, str(number))
            assert len(mesh.workers[number].submits) == before + 2


@pytest.mark.parametrize(
    ("stub", "method", "fields"),
    [
        (
            dialects_pb2_grpc.AnthropicServiceStub,
            "CreateMessage",
            {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]},
        ),
        (
            dialects_pb2_grpc.ResponsesServiceStub,
            "CreateResponse",
            {"max_output_tokens": 16, "input": "hello"},
        ),
        (
            dialects_pb2_grpc.OllamaServiceStub,
            "Generate",
            {"options": {"num_predict": 2}, "prompt": "hello"},
        ),
    ],
    ids=["anthropic", "responses", "ollama"],
)
async def test_other_dialects_take_the_headers_too(
    tmp_path: Path, stub: Callable[[Any], Any], method: str, fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", **fields}
    async with gateway(tmp_path, script, num_decode=2, allow_worker_choice=True) as mesh:
        call = getattr(stub(mesh.channel), method)
        given = ((RANK, "1"), ("x-first-token-timeout-ms", "2000"))
        async for _ in call(HttpBody(data=json.dumps(body).encode()), metadata=given):
            pass
        (submit,) = mesh.workers[1].submits
        assert submit.first_token_timeout.ToNanoseconds() <= 2e9


async def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2, allow_worker_choice=True) as mesh:
        error = await failure(ask(mesh, WORKER, "decode-7"))
        assert isinstance(error, InvalidRequest)
        assert error.param == WORKER
        assert "decode-0, decode-1" in error.message
        for value in ("2", "first"):
            error = await failure(ask(mesh, RANK, value))
            assert isinstance(error, InvalidRequest)
            assert error.param == RANK
        error = await failure(ask(mesh, RANK, "0", (WORKER, "decode-0")))
        assert isinstance(error, InvalidRequest)
        assert "contradicts" in error.message


async def test_a_worker_that_is_not_well(tmp_path: Path) -> None:
    async with gateway(tmp_path, script, num_decode=2, allow_worker_choice=True) as mesh:
        mesh.workers[1].is_draining = True
        async with asyncio.timeout(60):
            while True:
                try:
                    await ask(mesh, WORKER, "decode-1")
                except grpc.aio.AioRpcError as error:
                    refused = from_rpc_error(error)
                    break
        assert isinstance(refused, PeerUnavailable)
        assert "decode-1 is not ready" in refused.message
        await ask(mesh, WORKER, "decode-0")


async def test_choice_is_off_by_default(tmp_path: Path) -> None:
    async with gateway(tmp_path, script) as mesh:
        for key, value in ((WORKER, "decode-0"), (RANK, "0")):
            error = await failure(ask(mesh, key, value))
            assert isinstance(error, InvalidRequest)
            assert error.param == key
            assert "--allow-worker-choice" in error.message
