"""The link between the REST edge and its gateway fails: clients get errors, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import grpc
import openai
import pytest
from weft.chaos.proxy import FaultProxy, Mode
from weft.testing.services.fake_openai import FakeOpenAI
from weft.testing.services.processes import ServiceProcess
from weft.v1 import openai_pb2_grpc

pytestmark = pytest.mark.needs("go")
NOTICED_S = 90.0
"""The edge notices a silent gateway after 15 s."""


class Edge(NamedTuple):
    """An edge, the proxy between it and the gateway, and the SDK in front of it."""

    fake: FakeOpenAI
    proxy: FaultProxy
    client: openai.AsyncOpenAI


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[Edge]:
    fake = FakeOpenAI()
    server = grpc.aio.server()
    openai_pb2_grpc.add_OpenAIServiceServicer_to_server(fake, server)
    proxy = FaultProxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await proxy.start()
    command = [str(rest_binary), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with ServiceProcess("rest", [*command, "--backend", proxy.address], tmp_path) as process:
        ready = await process.ready()
        async with openai.AsyncOpenAI(
            base_url=f"http://{ready['address']}/v1", api_key="-", max_retries=0, timeout=NOTICED_S
        ) as client:
            yield Edge(fake, proxy, client)
    await proxy.close()
    await server.stop(0)


MESSAGES = [{"role": "user", "content": "two words"}]


async def stream(edge: Edge) -> str:
    """Reads a stream that would hang after its first word."""
    text = ""
    chunks = await edge.client.chat.completions.create(model="hang", messages=MESSAGES, stream=True)
    async for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
    return text


async def ask(edge: Edge) -> str | int | None:
    """The text of an answer, or the status of a failure."""
    try:
        answer = await edge.client.chat.completions.create(model="echo", messages=MESSAGES)
    except openai.APIStatusError as error:
        return error.status_code
    return answer.choices[0].message.content


@pytest.mark.full_after(2)
@pytest.mark.parametrize(
    "mode", [Mode.CUT, Mode.BLACK_HOLE, Mode.MUTE_SERVER], ids=lambda mode: mode.value
)
async def test_requests_end_in_errors_and_later_ones_are_served(edge: Edge, mode: Mode) -> None:
    streaming = asyncio.create_task(stream(edge))
    await edge.fake.started.wait()
    whole = asyncio.create_task(
        edge.client.chat.completions.create(model="hang", messages=MESSAGES)
    )
    async with edge.proxy.misbehaving(mode):
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(openai.APIError) as streamed:
                await streaming
            with pytest.raises(openai.APIStatusError) as answered:
                await whole
    assert "retry" in str(streamed.value) or "again" in str(streamed.value), streamed.value
    assert answered.value.status_code in (502, 503)
    async with asyncio.timeout(NOTICED_S):
        while (answer := await ask(edge)) in (502, 503):
            await asyncio.sleep(0.2)
    assert answer == "two words"
