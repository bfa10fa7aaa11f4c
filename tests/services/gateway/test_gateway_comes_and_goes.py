"""What edges and clients see of a gateway that starts, ages and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import Draining
from weft.gateway.fleet.discovery import Endpoint
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, gateway_pb2, openai_pb2_grpc

FACE = "weft.v1.OpenAIService"
"""The name under which edges ask."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE_S = 60


def letters(submit: Any, prompt: list[int]) -> Script:
    return Script(tokens=[byte_level_bpe().encode("a" * submit.stop.max_tokens).ids])


@asynccontextmanager
async def watch(mesh: Harness, service: str = FACE) -> AsyncIterator[Any]:
    """States of a service, as edges are told."""
    call = health_pb2_grpc.HealthStub(mesh.channel).Watch(
        health_pb2.HealthCheckRequest(service=service)
    )
    try:
        yield call
    finally:
        call.cancel()


async def until(call: Any, state: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await call.read()).status != state:
            pass


async def test_a_gateway_is_not_serving_before_it_refuses_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.gateway.app._NOTICE_S", 600.0)
    async with gateway(tmp_path, letters, drain_grace_s=3600.0) as mesh, watch(mesh) as states:
        await until(states, SERVING)
        leaving = asyncio.create_task(mesh.app.server.stop(mesh.app.leave))
        await until(states, NOT_SERVING)
        answer = await mesh.json(
            "ChatCompletions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        )
        assert answer["choices"][0]["finish_reason"]
        leaving.cancel()


async def test_what_still_runs_when_the_grace_ends_is_told_why(tmp_path: Path) -> None:
    limits = {"max_running_requests": 2, "drain_grace_s": 1.2}
    async with gateway(tmp_path, letters, step_s=0.05, **limits) as mesh:
        stop = common_pb2.StopCriteria(max_tokens=400)
        said = [gateway_pb2.ChatMessage(role="user", content="hi")]
        request = gateway_pb2.ChatRequest(messages=said, stop=stop, stream=True)
        running = mesh.typed.Chat(request)
        await running.read()
        whole = asyncio.create_task(
            mesh.json("Completions", {"prompt": "hi", "max_tokens": 400, "min_tokens": 400})
        )
        await mesh.wait(lambda: len(mesh.workers[0].submits) == 2)
        queued = mesh.typed.Chat(request)
        await mesh.wait(lambda: mesh.app._admission.num_queued)
        stopping = asyncio.create_task(mesh.app.server.stop(mesh.app.leave))

        async def to_the_end() -> None:
            while await running.read() is not grpc.aio.EOF:
                pass

        for failed in (to_the_end(), whole, queued.read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await failed
            error = from_rpc_error(caught.value)
            assert isinstance(error, Draining), error
            assert error.retry_after_s
        await stopping
        await mesh.wait(lambda: len(mesh.workers[0].cancels) == 2)


class LateDiscovery:
    """Finds nothing until it is told."""

    def __init__(self) -> None:
        self._told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(self, address: str) -> None:
        self._told.set_result(address)

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        yield ()
        yield (Endpoint("decode", await self._told),)
        await asyncio.Event().wait()


async def test_edges_send_nothing_until_the_workers_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.gateway.app._FIND_WORKERS_S", 600.0)
    late = LateDiscovery()
    async with gateway(tmp_path, letters, wait=False, discovery=late) as mesh:
        async with watch(mesh, "") as process:
            await until(process, SERVING)
        async with watch(mesh) as states:
            assert (await states.read()).status == NOT_SERVING
            late.tell(mesh.workers[0].address)
            await until(states, SERVING)
            await mesh.openai.Ready(Empty())


async def test_a_gateway_that_finds_no_workers_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.gateway.app._FIND_WORKERS_S", 0.1)
    async with (
        gateway(tmp_path, letters, wait=False, discovery=LateDiscovery()) as mesh,
        watch(mesh) as states,
    ):
        await until(states, SERVING)
        with pytest.raises(grpc.aio.AioRpcError, match="no healthy decode worker"):
            await mesh.openai.Ready(Empty())


async def test_connections_take_no_calls_beyond_their_age_and_lose_none(tmp_path: Path) -> None:
    async with gateway(
        tmp_path, letters, max_context_tokens=2048, max_connection_age_s=1.0, step_s=0.01
    ) as mesh:
        request = gateway_pb2.CompleteRequest(text="x", stream=True, model=MODEL)
        request.stop.max_tokens = 400
        call = mesh.typed.Complete(request)
        text = (await call.read()).choices[0].text
        async with asyncio.timeout(PATIENCE_S):
            while mesh.channel.get_state() == grpc.ChannelConnectivity.READY:
                await mesh.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await openai_pb2_grpc.OpenAIServiceStub(mesh.channel).Ready(Empty())
        while (message := await call.read()) is not grpc.aio.EOF:
            text += "".join(choice.text for choice in message.choices)
        assert text == "a" * 400
