"""`stop_regex` over all faces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, dialects_pb2_grpc, gateway_pb2

TEXT = "The answer is 42. Thank you! 你好 Bye"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    tokenizer = byte_level_bpe()
    tokens = [*tokenizer.encode(TEXT).ids, *[7] * 300]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens])

    async with gateway(tmp_path, script) as harness:
        yield harness


@pytest.mark.parametrize(
    ("given", "shown", "reason"),
    [
        ({"stop_regex": r"\d+\."}, "The answer is ", r"\d+\."),
        ({"stop_regex": [r"x+", "你."]}, "The answer is 42. Thank you! ", "你."),
        ({"stop_regex": "[0-9]", "stop": ["is"]}, "The answer ", "is"),
        ({"stop_regex": "[A-Z]h.n", "stop": ["Bye"]}, "The answer is 42. ", "[A-Z]h.n"),
        (
            {"stop_regex": r"\d+\.", "include_stop_str_in_output": True},
            "The answer is 42.",
            r"\d+\.",
        ),
    ],
)
async def test_a_match_ends_the_text(mesh: Harness, given: Any, shown: str, reason: str) -> None:
    body: dict[str, Any] = {"messages": USER, "max_tokens": 300, **given}
    (choice,) = (await mesh.json("ChatCompletions", body))["choices"]
    assert choice["message"]["content"] == shown
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    choices = [e["choices"][0] for e in await mesh.events("ChatCompletions", body)]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == shown
    assert choices[-1]["stop_reason"] == reason
    await mesh.wait(lambda: len(mesh.workers[0].cancels) >= 2)


async def test_responses_have_it(mesh: Harness) -> None:
    responses = dialects_pb2_grpc.ResponsesServiceStub(mesh.channel)
    body = {"input": "hi", "max_output_tokens": 300, "stop_regex": r"\d+\."}
    (message,) = [one async for one in responses.CreateResponse(http_body(body))]
    assert json.loads(message.data)["output"][0]["content"][0]["text"] == "The answer is "


async def test_messages_of_anthropic_refuse_it(mesh: Harness) -> None:
    messages = dialects_pb2_grpc.AnthropicServiceStub(mesh.channel)
    body = {"messages": USER, "max_tokens": 3, "stop_regex": "a"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [one async for one in messages.CreateMessage(http_body(body))]
    assert from_rpc_error(caught.value).param == "stop_regex"


async def test_grpc_has_it(mesh: Harness) -> None:
    request = gateway_pb2.CompleteRequest(
        text="hi", stop=common_pb2.StopCriteria(max_tokens=300, stop_regex=[r"\d+\."])
    )
    (whole,) = [message async for message in mesh.typed.Complete(request)]
    assert whole.choices[0].text == "The answer is "
    request.stop.stop_regex[0] = "("
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [message async for message in mesh.typed.Complete(request)]
    assert from_rpc_error(caught.value).param == "stop_regex"


def http_body(body: object) -> HttpBody:
    return HttpBody(content_type="application/json", data=json.dumps(body).encode())


@pytest.mark.parametrize(
    "given",
    ["(a", "a*", "(?=x)y", "^a", "a" * 257, "", ["a"] * 17, 5, r"((a{200}){200}){200}", [""]],
)
async def test_what_is_refused(mesh: Harness, given: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.post("Completions", {"prompt": "x", "stop_regex": given})
    error = from_rpc_error(caught.value)
    assert (error.http_status, error.param) == (400, "stop_regex")
