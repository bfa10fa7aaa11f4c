"""Long strings that are cut out of bodies: a JSON parser would have found the same."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
from pydantic_core import from_json
from weft.contract.errors import InvalidRequest
from weft.gateway.api.anthropic.bodies import MessagesBody
from weft.gateway.api.ollama.bodies import GenerateBody
from weft.gateway.api.openai.bodies import ChatBody
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.long_text import LEAST_BYTES, BodyBytes, LongText, cut

MAX_BYTES = 1 << 24


def encoded(num_bytes: int = 3 * LEAST_BYTES) -> str:
    return base64.b64encode(random.randbytes(num_bytes)).decode()


def string() -> str:
    """Of any kind and length."""
    size = random.choice((0, 3, LEAST_BYTES - 1, LEAST_BYTES, 2 * LEAST_BYTES, 5 * LEAST_BYTES))
    kind = random.randrange(6)
    if kind == 0:
        return encoded(size)
    if kind == 1:
        return "data:image/png;base64," + encoded(size)
    if kind == 2:
        return "\\" * random.randint(0, 3) + "a" * size + random.choice(("", '"', "\\", "\n"))
    if kind == 3:
        return f'say "{"x" * size}" twice'
    return ("é" if kind == 4 else ": ,") * (size // 2)


def value(depth: int = 0) -> Any:
    kind = random.randrange(8 if depth < 3 else 3)
    if kind == 0:
        return random.choice((None, True, -1.5e3, [7] * 40_000))
    if kind < 3:
        return string()
    if kind < 5:
        return [value(depth + 1) for _ in range(random.randrange(4))]
    return {random.choice(("a", "b", string())): value(depth + 1) for _ in range(4)}


def test_nothing_is_lost() -> None:
    """Any JSON, somewhere in a message; fields of images are texts that lie in it."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    num_cut = 0
    for _ in range(60):
        wanted = {"rest": value(), "image": encoded(), "images": [encoded(), string()]}
        body = json.dumps(wanted, ensure_ascii=random.random() < 0.5).encode()
        before, after = random.randbytes(random.randrange(40)), random.choice((b"", b'"', b"zz"))
        data = BodyBytes(before + body + after, len(before), len(before) + len(body))
        assert data.count(ord("[")) == body.count(b"[")
        short = cut(data)
        num_cut += len(short.texts)
        parsed = from_json(short.data)
        fields = [(parsed, "image"), (parsed, "images"), (parsed, "none")]
        found = short.put_back(parsed, fields, lambda text: None)
        assert isinstance(found["image"], LongText)
        assert isinstance(found["images"][0], LongText)
        assert len(found["image"]) == len(wanted["image"])
        assert found["image"].head(9) == wanted["image"][:9]
        assert bytes(found["image"].bytes_from(5)).decode() == wanted["image"][5:]
        for name in ("image", "images"):
            many = found[name] if name == "images" else [found[name]]
            texts = [one.to_str() if isinstance(one, LongText) else one for one in many]
            found[name] = texts if name == "images" else texts[0]
        assert found == wanted
    assert num_cut > 120


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b"A" * 300_000,
        b'{"a": "' + b"A" * 300_000 + b'" "b"}',
        b'{"a" ' + b"A" * 300_000 + b' "b": 1}',
        b'{"a": "b"' + b"A" * 300_000 + b'"c"}',
        b'["' + b"A" * 300_000 + b"\xff" + b'"]',
        b"A" * 300_000,
    ],
)
def test_what_is_no_json_stays_so(body: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(body)
    with pytest.raises(InvalidRequest, match="JSON"):
        parse_body(ChatBody, body, MAX_BYTES)


@pytest.mark.parametrize("content", ["a" + "[{" * (1 << 17) + "[", ["[" * 1000] * 300])
def test_brackets_count_in_texts_of_any_length(content: object) -> None:
    """A text may be parsed as JSON later, as arguments of past calls are."""
    with pytest.raises(InvalidRequest, match="brackets"):
        parse_body(ChatBody, chat_of(content), MAX_BYTES)


def chat_of(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def test_images_of_bodies_are_where_they_lie() -> None:
    """Elsewhere the same strings are texts."""
    image, url = encoded(), "data:image/png;base64," + encoded()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": image},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": image}]
    body = parse_body(ChatBody, json.dumps({"messages": messages}).encode(), MAX_BYTES)
    content = body.messages[0].content
    assert isinstance(content, list)
    inner = content[0].image_url
    assert isinstance(getattr(inner, "url", None), LongText)
    assert isinstance(content[1].image_url, LongText)
    assert content[2].text == image == body.messages[1].content

    block = {"type": "image", "source": {"type": "base64", "data": image}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [block]}
    call = {"type": "tool_use", "id": "x", "name": "f", "input": {"source": {"data": image}}}
    turns = [{"role": "user", "content": [block, result]}, {"role": "assistant", "content": [call]}]
    given = {"model": "m", "max_tokens": 1, "messages": turns}
    blocks = [
        one
        for turn in parse_body(MessagesBody, json.dumps(given).encode(), MAX_BYTES).messages
        for one in turn.content
    ]
    assert isinstance(blocks[0].source["data"], LongText)
    assert isinstance(blocks[1].content[0].source["data"], LongText)
    assert blocks[2].input == {"source": {"data": image}}

    asked = {"model": "m", "prompt": image, "images": [image]}
    generate = parse_body(GenerateBody, json.dumps(asked).encode(), MAX_BYTES)
    assert generate.prompt == image
    assert generate.images is not None
    assert isinstance(generate.images[0], LongText)
