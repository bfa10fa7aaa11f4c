"""Unmodified clients send images: OpenAI's for both of its APIs, Anthropic's and Ollama's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest
from weft.gateway.settings import image_body_bytes
from weft.testing.models.tiny_images import (
    add_images,
    data_url,
    encoded,
    image_tokenizer,
    random_image,
)
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL

pytestmark = pytest.mark.needs("go")

PICTURE = encoded(random_image(5, 90, 20), "JPEG", quality=90)
URL = data_url(PICTURE, "image/jpeg")
BARE = base64.b64encode(PICTURE).decode()
WHOLE = f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
MOST = image_body_bytes(8 << 20, 64 << 20)


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[DialectEdge]:
    async with dialect_edge(
        rest_binary,
        tmp_path,
        template="",
        edge_flags=("--max-body-bytes", str(MOST)),
        tokenizer=image_tokenizer(),
        change_model=add_images,
    ) as made:
        yield made


@pytest.fixture
async def openai_client(edge: DialectEdge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{edge.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def is_whole(text: str, before: str, after: str) -> bool:
    """Whether an image stands between two texts."""
    begin, end = text.find(before), text.rfind(after)
    return 0 <= begin < end and text[begin + len(before) : end].endswith(WHOLE)


async def test_openais_chats(edge: DialectEdge, openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
                    {"type": "text", "text": "What is it?"},
                ],
            }
        ],
    )
    assert answer.choices[0].message.content == edge.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(edge.mesh.workers[0].prompts[-1])
    assert is_whole(edge.prompt, "User: Look:", "What is it?")


async def test_openais_responses(edge: DialectEdge, openai_client: openai.AsyncOpenAI) -> None:
    first = await openai_client.responses.create(
        model=MODEL,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Look:"},
                    {"type": "input_image", "image_url": URL, "detail": "auto"},
                ],
            }
        ],
    )
    assert first.output_text == edge.text
    assert is_whole(edge.prompt, "User: Look:", "<end_of_utterance>\nAssistant:")
    before = edge.prompt
    await openai_client.responses.create(
        model=MODEL, previous_response_id=first.id, input="And now?"
    )
    assert edge.prompt.startswith(before)
    items = await openai_client.responses.input_items.list(first.id)
    assert URL in json.dumps(items.model_dump(mode="json"))


async def test_an_agent_looks_at_a_screenshot(edge: DialectEdge) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=edge.url, api_key="none", max_retries=0, timeout=60
    ) as client:
        answer = await client.messages.create(
            model=MODEL,
            max_tokens=50,
            tools=[{"name": "screenshot", "input_schema": {"type": "object"}}],
            messages=[
                {"role": "user", "content": "What is on the screen?"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "screenshot", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [
                                {"type": "text", "text": "Taken:"},
                                {
                                    "type": "image",
                                    "source": {
                                        "type": "base64",
                                        "media_type": "image/jpeg",
                                        "data": BARE,
                                    },
                                },
                            ],
                        }
                    ],
                },
            ],
        )
    assert answer.content[0].type == "text"
    num_cached = answer.usage.cache_read_input_tokens or 0
    num_tokens = answer.usage.input_tokens + num_cached
    assert num_tokens == len(edge.mesh.workers[0].prompts[-1])
    assert is_whole(edge.prompt, "<tool_response>\nTaken:", "\n</tool_response>")


async def test_ollamas_chats_and_generations(edge: DialectEdge, tmp_path: Path) -> None:
    client = ollama.AsyncClient(host=edge.url, timeout=60)
    path = tmp_path / "picture.jpg"
    path.write_bytes(PICTURE)
    chat = await client.chat(
        model=MODEL, messages=[{"role": "user", "content": "What is it?", "images": [str(path)]}]
    )
    assert chat.message.content == edge.text
    assert is_whole(edge.prompt, "User:", "What is it?")
    await client.generate(model=MODEL, prompt="What is it?", images=[PICTURE])
    assert is_whole(edge.prompt, "User:", "What is it?")


async def test_large_files_come_through(edge: DialectEdge) -> None:
    noise = encoded(random_image(3, 2200, 2200), compress_level=0)
    part = {"type": "image_url", "image_url": {"url": data_url(noise)}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [part] * 3}]}
    assert len(json.dumps(body)) > 48 << 20
    answer = await edge.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert edge.prompt.count("<image>") == 3 * 17 * 4
    # Only the head of a larger body is sent: the edge need not read the rest to refuse it.
    url = httpx.URL(edge.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: weft\r\nContent-Length: {MOST + 1}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
    writer.close()
