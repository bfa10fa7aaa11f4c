"""Random bodies to every API: an answer or a refusal that names what is wrong, never a 5xx."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from pydantic import BaseModel
from weft.common.rpc.errors import from_rpc_error
from weft.gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from weft.gateway.api.ollama.bodies import ChatBody, GenerateBody, ShowBody
from weft.gateway.api.openai.bodies import (
    ChatBody as OpenAIChatBody,
)
from weft.gateway.api.openai.bodies import (
    CompletionBody,
    DetokenizeBody,
    EndSessionBody,
    TokenizeBody,
)
from weft.gateway.api.responses.bodies import ResponsesBody
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody
from weft.testing.services.dialect_edge import TEMPLATE
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.testing.services.random_bodies import random_body
from weft.v1 import decode_pb2, dialects_pb2_grpc, openai_pb2_grpc

CALLS: list[tuple[str, str, type[BaseModel]]] = [
    ("OpenAI", "ChatCompletions", OpenAIChatBody),
    ("OpenAI", "CountChatTokens", OpenAIChatBody),
    ("OpenAI", "Completions", CompletionBody),
    ("OpenAI", "TokenizeText", TokenizeBody),
    ("OpenAI", "DetokenizeTokens", DetokenizeBody),
    ("OpenAI", "EndSession", EndSessionBody),
    ("Responses", "CreateResponse", ResponsesBody),
    ("Anthropic", "CreateMessage", MessagesBody),
    ("Anthropic", "CountTokens", CountTokensBody),
    ("Ollama", "Chat", ChatBody),
    ("Ollama", "Generate", GenerateBody),
    ("Ollama", "ShowModel", ShowBody),
    ("Trainer", "GenerateTokens", GenerateTokensBody),
    ("Trainer", "ContinueTokens", ContinueTokensBody),
]
TEXTS = (
    "Weft answers.",
    "<think>hm</think> So.",
    '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>',
    '<tool_call>{"name": "get_weather", "argum',
    "<think> never ends \u2028",
    '[{"name": "x", "arguments": {}}]',
    "",
)


@pytest.mark.parametrize(("service", "method", "cls"), CALLS, ids=lambda value: str(value)[-30:])
async def test_random_bodies(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    service: str,
    method: str,
    cls: type[BaseModel],
) -> None:
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    mesh: Harness

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        ids = mesh.ids(rng.choice(TEXTS))
        most = submit.stop.max_tokens
        return Script(tokens=[[*ids, mesh.end][:most]], chunk=rng.choice((1, 3, 50)))

    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    number = 20000 if request.config.getoption("--full") else 400
    num_good = 0
    async with gateway(tmp_path, script, step_s=0, max_stored_responses=20, rl=True) as mesh:
        module = openai_pb2_grpc if service == "OpenAI" else dialects_pb2_grpc
        stub = getattr(module, f"{service}ServiceStub")(mesh.channel)
        for turn in range(number):
            body = random_body(rng, cls)
            where: Any = (seed, turn, body)
            if rng.random() < 0.9:
                body["model"] = MODEL
            if "input" in cls.model_fields and rng.random() < 0.5:
                body["input"] = "hi"
            if "messages" in cls.model_fields and rng.random() < 0.5:
                body["messages"] = [{"role": "user", "content": "hi"}]
            if "input_ids" in cls.model_fields and rng.random() < 0.5:
                body["text"], body["input_ids"] = "hi", None
            data = json.dumps(body).encode()
            call = getattr(stub, method)(HttpBody(data=data), timeout=60)
            try:
                if isinstance(call, grpc.aio.UnaryUnaryCall):
                    messages = [await call]
                else:
                    messages = [message async for message in call]
            except grpc.aio.AioRpcError as failed:
                error = from_rpc_error(failed)
                assert 400 <= error.http_status < 500, (where, error)
                assert error.message, where
            else:
                num_good += 1
                assert b"response.failed" not in messages[-1].data, where
                assert b"".join([message.data for message in messages]), where
        await mesh.wait(lambda: not mesh.app.pipeline.running_ids)
    assert num_good > number / 20
