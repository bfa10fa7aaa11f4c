"""Relays: many streamed answers of one edge in one stream, and their ends on their own calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, edge_pb2, edge_pb2_grpc

TEXT = "a text of some length, which repeats. "
EDGE = "0123456789abcdef" * 2
WINDOW = 64 << 10


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    tokens = byte_level_bpe().encode(TEXT, add_special_tokens=False).ids

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        count = submit.stop.max_tokens
        return Script(tokens=[(tokens * (count // len(tokens) + 1))[:count]])

    async with gateway(
        tmp_path, script, max_context_tokens=8192, step_s=0.0005, rl=True
    ) as harness:
        yield harness


class Edge:
    """Opens a relay, and keeps what comes on it by stream."""

    def __init__(self, mesh: Harness, number: int = 7) -> None:
        self.mesh = mesh
        self.number = number
        self.data: dict[int, bytes] = defaultdict(bytes)
        self.ended: list[int] = []
        self.has_closed = False
        self.call: Any = edge_pb2_grpc.EdgeServiceStub(mesh.channel).Relay()

    async def open(self) -> Edge:
        await self.call.write(edge_pb2.RelayRequest(edge=EDGE, relay=self.number))
        assert not (await self.call.read()).streams
        self.reader = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            for stream, data in zip(message.streams, message.data, strict=True):
                self.data[stream] += data
                if not data:
                    self.ended.append(stream)
        self.has_closed = True

    def ask(self, number: int, **fields: object) -> Any:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        request = HttpBody(content_type="application/json", data=json.dumps(body).encode())
        metadata = (("weft-relay", f"{EDGE}/{number}"),)
        return self.mesh.openai.ChatCompletions(request, metadata=metadata)


async def header_of(call: Any) -> dict[str, str]:
    return dict(await call.initial_metadata())


def contents(data: bytes) -> str:
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content", "") for delta in deltas)


async def test_answers_share_a_relay_and_end_on_their_own_calls(mesh: Harness) -> None:
    edge = await Edge(mesh).open()
    calls = [edge.ask(number, max_tokens=20 + number) for number in range(1, 9)]
    rests = [[one.data async for one in call] for call in calls]
    for number, (call, rest) in enumerate(zip(calls, rests, strict=True), 1):
        assert (await header_of(call))["weft-relay"] == "7"
        assert rest == [b"data: [DONE]\n\n"]
        await mesh.wait(lambda number=number: number in edge.ended)  # type: ignore[misc]
        alone = await mesh.events(
            "ChatCompletions",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20 + number},
        )
        wanted = "".join(event["choices"][0]["delta"].get("content", "") for event in alone)
        assert contents(edge.data[number]) == wanted != ""


DIALECTS: dict[str, tuple[str, dict[str, object]]] = {
    "completions": ("OpenAIService/Completions", {"prompt": "hi", "max_tokens": 12}),
    "responses": ("ResponsesService/CreateResponse", {"input": "hi", "max_output_tokens": 16}),
    "anthropic": (
        "AnthropicService/CreateMessage",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12},
    ),
    "ollama": (
        "OllamaService/Generate",
        {"prompt": "hi", "options": {"num_predict": 12}},
    ),
    "sglang": (
        "TrainerService/GenerateTokens",
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 12}},
    ),
}
TEXTS = re.compile(rb'"(?:text|delta|response)": ?"([^"]*)"')


def whole_text(dialect: str, events: bytes) -> bytes:
    texts: list[bytes] = TEXTS.findall(events)
    # These also say the text so far.
    return max(texts, key=len) if dialect in ("responses", "sglang") else b"".join(texts)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_events_of_each_dialect_come_on_the_relay(mesh: Harness, dialect: str) -> None:
    method, fields = DIALECTS[dialect]
    request = HttpBody(
        content_type="application/json",
        data=json.dumps({"stream": True, **fields}).encode(),
    )
    ask = mesh.channel.unary_stream(
        f"/weft.v1.{method}",
        request_serializer=HttpBody.SerializeToString,
        response_deserializer=HttpBody.FromString,
    )
    alone = b"".join([one.data async for one in ask(request)])
    edge = await Edge(mesh).open()
    call = ask(request, metadata=(("weft-relay", f"{EDGE}/1"),))
    last = b"".join([one.data async for one in call])
    assert (await header_of(call))["weft-relay"] == "7"
    await mesh.wait(lambda: 1 in edge.ended)
    events = edge.data[1]
    assert TEXTS.search(events)
    assert whole_text(dialect, events + last) == whole_text(dialect, alone)
    assert len(last) < len(alone) / 2


async def test_an_answer_without_a_relay_comes_on_its_own_call(mesh: Harness) -> None:
    edge = Edge(mesh)
    for metadata in ((), (("weft-relay", f"{EDGE}/1"),), (("weft-relay", "nonsense"),)):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
        request = HttpBody(content_type="application/json", data=json.dumps(body).encode())
        call = edge.mesh.openai.ChatCompletions(request, metadata=metadata)
        data = b"".join([one.data async for one in call])
        assert "weft-relay" not in await header_of(call)
        assert data.endswith(b"data: [DONE]\n\n")
        assert data.count(b"data: ") > 2


async def test_whole_answers_and_refusals_do_not_use_it(mesh: Harness) -> None:
    edge = await Edge(mesh).open()
    (whole,) = [one async for one in edge.ask(1, stream=False, max_tokens=3)]
    assert json.loads(whole.data)["usage"]["completion_tokens"] == 3
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await edge.ask(2, max_tokens=-1).read()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not edge.data
    assert not edge.ended


async def test_a_slow_client_holds_back_its_own_answer_alone(mesh: Harness) -> None:
    edge = await Edge(mesh).open()
    slow = edge.ask(1, max_tokens=4000)
    await slow.initial_metadata()
    await mesh.wait(lambda: len(edge.data[1]) > WINDOW)
    fast = edge.ask(2, max_tokens=50)
    assert [one.data async for one in fast] == [b"data: [DONE]\n\n"]
    held = len(edge.data[1])
    assert held < 2 * WINDOW
    assert 1 not in edge.ended
    told = 0
    while 1 not in edge.ended:
        if now := len(edge.data[1]) - told:
            await edge.call.write(edge_pb2.RelayRequest(streams=[1], bytes=[now]))
            told += now
        await asyncio.sleep(0.01)
    assert [one.data async for one in slow] == [b"data: [DONE]\n\n"]
    assert len(contents(edge.data[1])) > 4000


async def test_answers_of_an_edge_that_goes_are_cancelled_or_fail(mesh: Harness) -> None:
    edge = await Edge(mesh).open()
    cancelled, failing = (edge.ask(number, max_tokens=8000) for number in (1, 2))
    await mesh.wait(lambda: edge.data[1] and edge.data[2])
    cancelled.cancel()
    await mesh.wait(lambda: 1 in edge.ended)
    edge.call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await failing.read()
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    await mesh.wait(lambda: len(mesh.workers[0].cancels) == 2)


async def test_a_newer_relay_takes_new_answers_and_the_older_ends_behind_its_own(
    mesh: Harness,
) -> None:
    old = await Edge(mesh, 7).open()
    first = old.ask(1, max_tokens=200)
    await mesh.wait(lambda: old.data[1])
    new = await Edge(mesh, 8).open()
    second = new.ask(2, max_tokens=5)
    assert (await header_of(second))["weft-relay"] == "8"
    assert [one.data async for one in second] == [b"data: [DONE]\n\n"]
    assert (await header_of(first))["weft-relay"] == "7"
    assert [one.data async for one in first] == [b"data: [DONE]\n\n"]
    await mesh.wait(lambda: old.has_closed)
    assert 1 in old.ended
    assert 1 not in new.data


async def test_relays_end_with_the_gateway(mesh: Harness) -> None:
    edge = await Edge(mesh).open()
    call = edge.ask(1, max_tokens=200)
    await mesh.wait(lambda: edge.data[1])
    await mesh.app.drain()
    assert [one.data async for one in call] == [b"data: [DONE]\n\n"]
    await mesh.wait(lambda: edge.has_closed)
    assert edge.ended == [1]


async def test_an_edge_has_to_name_itself(mesh: Harness) -> None:
    call = edge_pb2_grpc.EdgeServiceStub(mesh.channel).Relay()
    await call.write(edge_pb2.RelayRequest(edge="someone"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
