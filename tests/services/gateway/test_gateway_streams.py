"""What streams look like to clients: lines, usage, and the end of what a client sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from weft.gateway.api.openai import answers
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2

TEXT = "one\u0085two\u2028three\u2029four\x0bfive\x1csix\r\nseven é"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    tokenizer = byte_level_bpe()
    end = tokenizer.token_to_id("<|im_end|>")
    tokens = [*tokenizer.encode(TEXT, add_special_tokens=False).ids, end]

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens])

    async with gateway(tmp_path, script) as harness:
        yield harness


async def test_events_are_single_lines_for_every_client(mesh: Harness) -> None:
    for method, body in (("ChatCompletions", {"messages": USER}), ("Completions", {"prompt": "x"})):
        asked: dict[str, Any] = {**body, "stream": True, "stop": ["six\r\nseven"], "max_tokens": 90}
        data = b"".join([one.data for one in await mesh.post(method, asked)]).decode()
        # Python's own idea of lines is the widest there is.
        lines = [line for line in data.splitlines() if line]
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
        assert text == TEXT[: TEXT.index("six")]
        assert choices[-1]["stop_reason"] == "six\r\nseven"
        (whole,) = await mesh.post(method, {**asked, "stream": False})
        assert len(whole.data.decode().splitlines()) == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_every_chunk_has_the_usage_so_far(mesh: Harness, n: int) -> None:
    for method, body, model in (
        ("ChatCompletions", {"messages": USER}, answers.ChatChunk),
        ("Completions", {"prompt": "hello"}, answers.CompletionAnswer),
    ):
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {**body, "n": n, "max_tokens": 7, "stream_options": options}
        for more in ({}, {"logprobs": True if method == "ChatCompletions" else 1}):
            events = await mesh.events(method, {**asked, **more})
            for event in events:
                model.model_validate_json(json.dumps(event))
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            # The first chunk of a chat tells the role alone. A late reader gets several tokens.
            assert counts[1 if method == "ChatCompletions" else 0] in range(1, n * 7 + 1)
            assert (counts[0] == 0) == (method == "ChatCompletions")
            assert counts[-1] == counts[-2] == 7 * n
            assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
            assert events[-1]["choices"] == []
        only = {"stream_options": {"continuous_usage_stats": True}}
        events = await mesh.events(method, {**asked, **only})
        assert events[-1]["choices"]
        assert not any(event.get("usage") for event in events)  # as vLLM's
