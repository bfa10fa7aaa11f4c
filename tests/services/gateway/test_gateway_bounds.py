"""What one request may cost the gateway while others are served."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ContextTooLong, InvalidRequest, WeftError
from weft.gateway.text import prepare
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2

USER = [{"role": "user", "content": "hi"}]
BODY_BYTES, NUM_STREAMS = 2 << 20, 40


def endless(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[7] * 400])


async def refusal(mesh: Harness, body: object) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.post("ChatCompletions", body)
    return from_rpc_error(caught.value)


async def test_a_running_request_keeps_no_copy_of_its_body(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless, step_s=0.2) as mesh:
        ask = {"messages": USER, "max_tokens": 400, "stream": True}
        data = json.dumps(ask).encode() + b" " * BODY_BYTES

        async def begin() -> Any:
            call = mesh.openai.ChatCompletions(HttpBody(data=data))
            await call.read()
            return call

        calls = [await begin() for _ in range(4)]
        gc.collect()
        before = psutil.Process().memory_info().rss
        calls += [await begin() for _ in range(NUM_STREAMS)]
        gc.collect()
        grown = psutil.Process().memory_info().rss - before
        # The client of this process keeps one copy, the message that it has sent.
        assert grown < 1.6 * NUM_STREAMS * BODY_BYTES
        for call in calls:
            call.cancel()


async def test_prompts_that_wait_are_not_begun_when_their_request_is_cancelled(
    tmp_path: Path,
) -> None:
    begun: list[str] = []

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        begun.append(submit.request_id)
        return endless(submit, prompt)

    async with gateway(tmp_path, script, step_s=0.02, max_prompts=300) as mesh:
        body = {"prompt": ["hi"] * 300, "max_tokens": 400, "stream": True}
        call = mesh.openai.Completions(HttpBody(data=json.dumps(body).encode()))
        await call.read()
        await mesh.wait(lambda: len(begun) == 256)
        (request_id,) = mesh.app.pipeline.running_ids
        assert mesh.app.pipeline.cancel(request_id, None)
        data = b""
        while (message := await call.read()) is not grpc.aio.EOF:
            data += message.data
        assert data.count(b'"finish_reason":"abort"') == 300
        await mesh.wait(lambda: len(mesh.workers[0].cancels) >= 256)
        assert len(begun) == 256


async def test_a_chat_that_is_too_long_through_its_calls_is_not_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    encode = prepare.encode

    def watched(tokenizer: Any, text: str, **options: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(prepare, "encode", watched)
    arguments = json.dumps({"text": " ab" * 200_000})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    async with gateway(tmp_path, endless) as mesh:
        error = await refusal(mesh, {"messages": messages, "max_tokens": 4})
        assert isinstance(error, ContextTooLong)
        assert longest < 10_000


async def test_states_of_expressions_are_bounded_by_samples(tmp_path: Path) -> None:
    async with gateway(tmp_path, endless) as mesh:
        large = ["(a|b){100}c"]
        body: dict[str, Any] = {"messages": USER, "max_tokens": 4, "stop_regex": large}
        await mesh.json("ChatCompletions", body)
        error = await refusal(mesh, {**body, "n": 128})
        assert isinstance(error, InvalidRequest)
        assert error.param == "stop_regex"
        assert "samples" in error.message
        await mesh.json("ChatCompletions", {**body, "n": 128, "stop_regex": r"\d+\."})


@pytest.mark.parametrize("opening", ["(", "(?:", "(a|"])
async def test_groups_within_each_other_are_bounded(tmp_path: Path, opening: str) -> None:
    async with gateway(tmp_path, endless) as mesh:
        pattern = opening * (256 // len(opening))
        error = await refusal(mesh, {"messages": USER, "max_tokens": 4, "stop_regex": pattern})
        assert isinstance(error, InvalidRequest)
        assert error.param == "stop_regex"
