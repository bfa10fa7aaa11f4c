"""The OpenAPI document and the server agree on which bodies are valid."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ContextTooLong, InvalidRequest
from weft.gateway.api.openai.bodies import ChatBody, CompletionBody
from weft.gateway.api.openai.bounds import BOUNDS
from weft.gateway.api.openai.document import openapi_document
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2

DOCUMENT = openapi_document()
USER = [{"role": "user", "content": "hi"}]
NEEDED: dict[str, Any] = {"ChatBody": {"messages": USER}, "CompletionBody": {"prompt": "x"}}
METHODS = {
    "ChatBody": "ChatCompletions",
    "CompletionBody": "Completions",
    "TokenizeBody": "TokenizeText",
    "DetokenizeBody": "DetokenizeTokens",
    "EndSessionBody": "EndSession",
}
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 2**31 - 1},
}
"""What a field needs of others, as its description says."""


def around(keywords: dict[str, Any]) -> Iterator[Any]:
    """Values at bounds, and just beyond."""
    if "minimum" in keywords:
        low, high = keywords["minimum"], keywords["maximum"]
        whole = isinstance(low, int) and isinstance(high, int)
        step = 1 if whole else 1e-4
        yield from (low, high, low - step, high + step)
        if abs(high) < 2**50:
            yield float(high)
    if "exclusiveMinimum" in keywords:
        yield from (0, 1e-9 if "maximum" in keywords else 60.0, -1)
    if "minLength" in keywords or "maxLength" in keywords:
        yield from ("", "x", "x" * keywords.get("maxLength", 9))
        if "maxLength" in keywords:
            yield "x" * (keywords["maxLength"] + 1)
    if "pattern" in keywords:
        yield from ("x", "two words", "", "x" * 64, "x" * 65)
    if "minItems" in keywords:
        yield []
    if "enum" in keywords:
        yield from (*keywords["enum"], True)


def bounds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Bounds of fields: those that a body states, and those of the module."""
    for body in (ChatBody, CompletionBody):
        for name, field in body.model_fields.items():
            stated = BOUNDS[body.__name__].get(name) or field.json_schema_extra
            if isinstance(stated, dict):
                yield body.__name__, name, dict(stated)


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for model, name, keywords in bounds():
        for value in around(keywords):
            beside = dict(BESIDE.get(name, {}))
            if name == "best_of":
                beside["n"] = value
            yield model, name, {**NEEDED[model], **beside, name: value}


OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("ChatBody", "messages", {"messages": [{"role": "user"}]}),
    ("ChatBody", "messages", {"messages": [{"role": "user", "content": None}]}),
    ("ChatBody", "messages", {"messages": [*USER, {"role": "assistant"}]}),
    ("ChatBody", "messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("ChatBody", "messages", {"messages": [{"role": "", "content": "x"}]}),
    ("ChatBody", "stream_options", {"messages": USER, "stream_options": {}}),
    ("ChatBody", "stream_options", {"messages": USER, "stream_options": {}, "stream": True}),
    ("ChatBody", "top_logprobs", {"messages": USER, "top_logprobs": 0}),
    ("ChatBody", "top_logprobs", {"messages": USER, "top_logprobs": 1}),
    ("ChatBody", "end_session", {"messages": USER, "end_session": True}),
    ("ChatBody", "end_session", {"messages": USER, "end_session": True, "session_id": "a"}),
    ("ChatBody", "prompt_logprobs", {"messages": USER, "prompt_logprobs": 1, "n": 2}),
    ("ChatBody", "prompt_logprobs", {"messages": USER, "prompt_logprobs": 1, "stream": True}),
    ("ChatBody", "prompt_logprobs", {"messages": USER, "prompt_logprobs": 1, "n": 1}),
    ("ChatBody", "response_format", {"messages": USER, "response_format": {"type": "json_schema"}}),
    ("ChatBody", "logit_bias", {"messages": USER, "logit_bias": {"5": 100, "6": -100}}),
    ("ChatBody", "logit_bias", {"messages": USER, "logit_bias": {"5": 101}}),
    ("ChatBody", "logit_bias", {"messages": USER, "logit_bias": {"-5": 1}}),
    ("ChatBody", "n", {"messages": USER, "n": 2.0}),
    ("ChatBody", "n", {"messages": USER, "n": 2.5}),
    ("ChatBody", "n", {"messages": USER, "n": "2"}),
    ("CompletionBody", "prompt", {"prompt": [5.0, 6]}),
    ("CompletionBody", "prompt", {"prompt": [5.5]}),
    ("CompletionBody", "prompt", {"prompt": ["a", "b"]}),
    ("CompletionBody", "prompt", {"prompt": ["a", ""]}),
    ("CompletionBody", "prompt", {"prompt": [[5, 6], [7.0]]}),
    ("CompletionBody", "prompt", {"prompt": [[]]}),
    ("CompletionBody", "prompt", {"prompt": []}),
    ("CompletionBody", "prompt", {"prompt": ""}),
    ("CompletionBody", "prompt", {"prompt": [-1]}),
    ("CompletionBody", "stop_token_ids", {"prompt": "x", "stop_token_ids": [1.0, -1]}),
    ("CompletionBody", "stop_token_ids", {"prompt": "x", "stop_token_ids": [1.0]}),
    ("TokenizeBody", "prompt", {}),
    ("TokenizeBody", "prompt", {"prompt": "x", "messages": USER}),
    ("TokenizeBody", "prompt", {"prompt": "x", "messages": None}),
    ("TokenizeBody", "messages", {"messages": []}),
    ("DetokenizeBody", "tokens", {"tokens": [-1]}),
    ("DetokenizeBody", "tokens", {"tokens": [5.0]}),
    ("EndSessionBody", "session_id", {"session_id": ""}),
    ("EndSessionBody", "session_id", {"session_id": "x" * 129}),
]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[7]])

    async with gateway(tmp_path, script) as harness:
        yield harness


async def problem(mesh: Harness, model: str, body: dict[str, Any]) -> str:
    """Why the server refuses a body; empty if it does not."""
    try:
        await mesh.post(METHODS[model], body)
    except grpc.aio.AioRpcError as failure:
        error = from_rpc_error(failure)
        assert isinstance(error, InvalidRequest), error
        # The context is the model's, not the document's.
        return "" if isinstance(error, ContextTooLong) else error.message
    return ""


async def test_bodies_are_valid_for_both_or_for_neither(mesh: Harness) -> None:
    found: set[tuple[str, bool]] = set()
    for model, name, body in [*cases(), *OTHERS]:
        schema = {**DOCUMENT, "$ref": f"#/components/schemas/{model}"}
        is_stated = jsonschema.Draft202012Validator(schema).is_valid(body)
        told = await problem(mesh, model, body)
        assert is_stated == (not told), (json.dumps(body)[:300], told)
        found.add((name, is_stated))
    names = {name for name, _ in found}
    assert len(found) > 1.5 * len(names)
