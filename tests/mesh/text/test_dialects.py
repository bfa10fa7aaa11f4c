"""The dialects against the whole mesh, by their own SDKs: the same texts as chats give."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from weft.testing.meshes.local_mesh import MODEL, LocalMesh
from weft.testing.meshes.mesh_kinds import NUM_TOKENS, on
from weft.testing.meshes.mesh_prompts import BY_NAME
from weft.testing.meshes.text_reference import TextReference

pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600), on("nixl")]

CHAT = BY_NAME["capital"]
QUESTION = "What is the weather in Paris?"
ENOUGH = 1024
"""Tokens for any JSON of the schema here."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def expected(reference: TextReference) -> str:
    return reference.text(reference.of(CHAT, NUM_TOKENS).token_ids)


async def test_responses(mesh: LocalMesh, expected: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        asked: dict[str, Any] = {
            "model": MODEL,
            "input": CHAT.as_messages(),
            "temperature": 0,
            "max_output_tokens": NUM_TOKENS,
        }
        whole = await client.responses.create(**asked)
        assert whole.output_text == expected
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert "".join([e.delta for e in events if e.type == "response.output_text.delta"]) == (
            expected
        )
        assert events[-1].response.output_text == expected
        more = await client.responses.create(
            model=MODEL, input="And of Italy?", previous_response_id=whole.id, max_output_tokens=4
        )
        assert more.usage is not None
        assert whole.usage is not None
        assert more.usage.input_tokens > whole.usage.input_tokens
        called = await client.responses.create(
            model=MODEL,
            input=QUESTION,
            tools=[{"type": "function", "name": "get_weather", "parameters": SCHEMA}],  # type: ignore[list-item]
            tool_choice={"type": "function", "name": "get_weather"},
            max_output_tokens=ENOUGH,
        )
        (call,) = called.output
        assert call.type == "function_call"
        assert json.loads(call.arguments).keys() == {"city"}
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_x")


async def test_anthropic(mesh: LocalMesh, expected: str) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=mesh.url, api_key="none", max_retries=0, timeout=120
    ) as client:
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": NUM_TOKENS,
            "messages": CHAT.as_messages(),
            "extra_body": {"temperature": 0},
        }
        whole = await client.messages.create(**asked)
        assert [block.text for block in whole.content] == [expected]
        async with client.messages.stream(**asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == expected
        called = await client.messages.create(
            model=MODEL,
            max_tokens=ENOUGH,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[{"name": "get_weather", "input_schema": SCHEMA}],
            tool_choice={"type": "tool", "name": "get_weather"},
        )
        assert called.stop_reason == "tool_use"
        (use,) = called.content
        assert use.type == "tool_use"
        assert isinstance(use.input, dict)
        assert use.input.keys() == {"city"}
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**asked, "model": "other"})


async def test_ollama(mesh: LocalMesh, expected: str) -> None:
    client = ollama.AsyncClient(host=mesh.url, timeout=120)
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": CHAT.as_messages(),
        "options": {"temperature": 0, "num_predict": NUM_TOKENS},
    }
    whole = await client.chat(**asked)
    assert whole.message.content == expected
    parts = [part async for part in await client.chat(**asked, stream=True)]
    assert "".join([part.message.content or "" for part in parts]) == expected
    assert parts[-1].eval_count == whole.eval_count
    formed = await client.generate(
        model=MODEL, prompt=QUESTION, format=SCHEMA, options={"num_predict": ENOUGH}
    )
    assert json.loads(formed.response).keys() == {"city"}
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        await client.chat(**{**asked, "model": "other"})


async def test_load_balancers_read_the_load_of_the_mesh(mesh: LocalMesh) -> None:
    body = {"model": MODEL, "messages": CHAT.as_messages(), "max_tokens": 2}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for path in ("/v1/chat/completions", "/v1/messages"):
            for stream in (False, True):
                answer = await http.post(
                    f"{mesh.url}{path}",
                    json={**body, "stream": stream},
                    headers={"endpoint-load-metrics-format": "JSON"},
                )
                assert answer.status_code == 200, answer.text
                kind, _, value = answer.headers["endpoint-load-metrics"].partition(" ")
                assert kind == "JSON"
                metrics = json.loads(value)["named_metrics"]
                assert metrics.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
                assert 0 <= metrics["kv_cache_usage_perc"] < 1
                assert metrics["num_requests_waiting"] == 0


async def test_a_probe_generates_a_token(mesh: LocalMesh) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for path in ("/health_generate", "/ping", "/version", "/tokenizer_info", "/api/tags"):
            answer = await http.get(f"{mesh.url}{path}")
            assert answer.status_code == 200, answer.text
