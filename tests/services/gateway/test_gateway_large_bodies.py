"""Bodies of megabytes: refused at their first fault, and others' streams go on beside them."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from pydantic import ValidationError
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import InvalidRequest
from weft.gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from weft.gateway.api.ollama.bodies import ChatBody as OllamaChatBody
from weft.gateway.api.ollama.bodies import GenerateBody
from weft.gateway.api.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.api.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from weft.gateway.api.responses.bodies import ResponsesBody
from weft.gateway.settings import GatewaySettings
from weft.gateway.text.stops import StopAutomaton
from weft.gateway.warnings import begin_warnings, current_warnings
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY_BYTES = 1 << 20
USER = [{"role": "user", "content": "hi"}]
ANSWER = "A good answer, every time."
NUM_REPEATS = 8


def filled(before: str, item: str, after: str) -> bytes:
    """A body of about a megabyte: one item again and again."""
    times = (BODY_BYTES - len(before) - len(after) - 10) // len(item)
    return (before + item * times + item.rstrip(",") + after).encode()


def in_chat(field: str) -> str:
    return f'{{"messages": {json.dumps(USER)}, "{field}": '


def unknown(before: str) -> bytes:
    """A body with 60,000 fields that nobody knows behind others."""
    return f"{before}, {UNKNOWN}}}".encode()


UNKNOWN = ", ".join(f'"x{number}": 1' for number in range(60_000))
MESSAGE = '{"messages": [{"role": "user", "content": '
NUMBERED = ", ".join(f'"{number}": null' for number in range(60_000))

BAD: list[tuple[type[Body], bytes, str]] = [
    (CompletionBody, filled('{"prompt": [', "null,", "]}"), "prompt"),
    (CompletionBody, filled('{"prompt": [', "1,", ', "x"]}'), "prompt"),
    (CompletionBody, filled('{"prompt": [', "1.5,", "]}"), "prompt"),
    (CompletionBody, filled('{"prompt": ["x", ', "1,", "]}"), "prompt"),
    (CompletionBody, filled('{"prompt": [', '"",', "]}"), "prompt"),
    (CompletionBody, filled('{"prompt": [[', "null,", "]]}"), "prompt"),
    (CompletionBody, filled('{"prompt": [', "[null,1.5,2.5,true],", "]}"), "prompt"),
    (ChatBody, filled('{"messages": [', "null,", "]}"), "messages"),
    (ChatBody, filled('{"messages": [', '{"role": "user"},', "]}"), "messages"),
    (ChatBody, filled('{"messages": [', '{"content": null},', "]}"), "messages"),
    (ChatBody, filled(MESSAGE + "[", "null,", "]}]}"), "messages[0].content"),
    (ChatBody, filled(MESSAGE + "[", '{"text": 5},', "]}]}"), "messages[0].content"),
    (ChatBody, filled(MESSAGE + '"", "tool_calls": [', "1,", "]}]}"), "messages[0].tool_calls"),
    (ChatBody, filled(in_chat("stop") + "[", "null,", "]}"), "stop"),
    (ChatBody, filled(in_chat("stop") + "[", '"x",', "]}"), "stop"),
    (ChatBody, filled(in_chat("stop_token_ids") + "[", "null,", "]}"), "stop_token_ids"),
    (ChatBody, filled(in_chat("stop_token_ids") + "[", "1,", "]}"), "stop_token_ids"),
    (ChatBody, (in_chat("logit_bias") + f"{{{NUMBERED}}}}}").encode(), "logit_bias"),
    (ChatBody, filled(in_chat("guided_choice") + "[", "null,", "]}"), "guided_choice"),
    (ChatBody, filled(in_chat("guided_choice") + "[", '"x",', "]}"), "guided_choice"),
    (
        ChatBody,
        filled(in_chat("structured_outputs") + '{"choice": [', "1,", "]}}"),
        "structured_outputs.choice",
    ),
    (ChatBody, filled(in_chat("modalities") + "[", "null,", "]}"), "modalities"),
    (ChatBody, filled(in_chat("tools") + "[", "1,", "]}"), "tools"),
    (ChatBody, filled(in_chat("temperature") + "[", "1,", "]}"), "temperature"),
    (TokenizeBody, filled('{"messages": [', "null,", "]}"), "messages"),
    (DetokenizeBody, filled('{"tokens": [', "null,", "]}"), "tokens"),
    (DetokenizeBody, filled('{"tokens": [', "1,", ', "x"]}'), "tokens"),
]
DIALECT_BAD: list[tuple[type[Body], bytes, str]] = [
    (ResponsesBody, f'{{"input": "hi", "metadata": {{{UNKNOWN}}}}}'.encode(), "metadata"),
    (MessagesBody, unknown('{"messages": [{"role": "user"') + b"]}", "messages[0].content"),
]
DIALECT_LEFT_OUT: list[tuple[type[Body], bytes]] = [
    (ResponsesBody, unknown('{"input": "hi"')),
    (ResponsesBody, unknown('{"input": "hi", "text": {"a": 1') + b"}"),
    (MessagesBody, unknown(in_chat("max_tokens") + "1")),
    (OllamaChatBody, unknown(in_chat("think") + "false")),
    (GenerateBody, unknown('{"prompt": "hi"')),
]
METHODS = {
    ChatBody: "ChatCompletions",
    CompletionBody: "Completions",
    TokenizeBody: "TokenizeText",
    DetokenizeBody: "DetokenizeTokens",
}
DIALECTS = (
    ResponsesBody,
    MessagesBody,
    CountTokensBody,
    OllamaChatBody,
    GenerateBody,
    EmbeddingsBody,
    CohereEmbedBody,
    RerankBody,
    ScoreBody,
    ClassifyBody,
    PoolingBody,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    tokens = byte_level_bpe().encode(ANSWER).ids * NUM_REPEATS

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens])

    folder = tmp_path_factory.mktemp("large")
    async with gateway(folder, script, max_body_bytes=2 * BODY_BYTES) as harness:
        yield harness


@pytest.mark.parametrize(
    ("cls", "body", "param"), [*BAD, *DIALECT_BAD], ids=range(len(BAD) + len(DIALECT_BAD))
)
async def test_checking_ends_at_the_first_fault(cls: type[Body], body: bytes, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(json.loads(body))
    assert caught.value.error_count() <= 8  # one for each member of a union
    with pytest.raises(InvalidRequest) as refused:
        parse_body(cls, body, 2 * BODY_BYTES)
    assert (refused.value.param or "").startswith(param)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(("cls", "body"), DIALECT_LEFT_OUT)
async def test_many_unknown_fields_of_a_dialect_are_told_in_few_words(
    cls: type[Body], body: bytes
) -> None:
    begin_warnings()
    parse_body(cls, body, 2 * BODY_BYTES)
    assert 0 < len(current_warnings()) <= 20


async def test_unknown_options_are_refused_at_the_first() -> None:
    body = unknown(in_chat("options") + '{"seed": 1') + b"}"
    with pytest.raises(InvalidRequest) as refused:
        parse_body(OllamaChatBody, body, 2 * BODY_BYTES)
    assert (refused.value.param or "").startswith("options.x0")


def lists_of(schema: object) -> Iterator[dict[str, Any]]:
    """The schemas of lists within a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            yield from lists_of(item)


@pytest.mark.parametrize("cls", [*METHODS, *DIALECTS])
async def test_every_list_of_a_body_fails_fast(cls: type[Body]) -> None:
    for schema in lists_of(cls.__pydantic_core_schema__):
        is_any = schema["items_schema"]["type"] == "any"  # has no faults
        assert schema.get("fail_fast") or is_any, schema


async def test_nesting_is_bounded(mesh: Harness) -> None:
    for item in ("[],", "{},", "[[]],"):
        body = filled(in_chat("chat_template_kwargs") + '{"x": [', item, "]}}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.post("ChatCompletions", body)
        error = from_rpc_error(caught.value)
        assert error.http_status == 400
        assert "brackets" in error.message


async def test_a_stream_goes_on_beside_bad_bodies(mesh: Harness) -> None:
    async def refused(cls: type[Body], body: bytes, param: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.post(METHODS[cls], body)
        error = from_rpc_error(caught.value)
        assert error.http_status == 400
        assert (error.param or "").startswith(param)

    bodies = asyncio.gather(*(refused(*case) for case in BAD))
    ask: dict[str, object] = {"messages": USER, "model": MODEL}
    streams = await asyncio.gather(*(mesh.events("ChatCompletions", ask) for _ in range(4)))
    await bodies
    for events in streams:
        texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
        assert "".join(texts) == ANSWER * NUM_REPEATS


REFUSED: list[tuple[str, bytes]] = [
    ("ChatCompletions", filled(MESSAGE + '"', "x ", '"}]}')),
    ("ChatCompletions", filled(MESSAGE + '"', "x ", '"}], "model": "no"}')),
    ("ChatCompletions", filled(MESSAGE + '"', "x ", '"}], "temperature": 999}')),
    ("ChatCompletions", filled(MESSAGE + '"hi"}]', " ", '"')),
    ("ChatCompletions", filled(in_chat("stop") + '"', "x ", '"}')),
    ("Completions", filled('{"prompt": "', "x ", '"}')),
    ("TokenizeText", filled('{"prompt": "', "x ", '"}')),
    ("DetokenizeTokens", filled('{"tokens": "', "x ", '"}')),
]


@pytest.mark.parametrize(("method", "body"), REFUSED, ids=range(len(REFUSED)))
async def test_what_a_refused_body_took_is_free_with_its_answer(
    mesh: Harness, method: str, body: bytes
) -> None:
    """Without the collector of cycles, which does not see how large something is."""

    async def refused() -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.post(method, body)

    await refused()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(6):
            await refused()
        held = 6 * BODY_BYTES
        async with asyncio.timeout(30):
            while held > BODY_BYTES:  # The server may be a little behind its answer.
                await asyncio.sleep(0.01)
                held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_large_good_bodies(mesh: Harness) -> None:
    long = mesh.ids("the fox " * 40_000)
    assert len(json.dumps(long)) > 64 << 10
    answer = await mesh.json("DetokenizeTokens", {"tokens": long})
    assert answer["prompt"] == "the fox " * 40_000
    filler = "x" * (1 << 20)
    answer = await mesh.json("ChatCompletions", {"messages": USER, "metadata": filler})
    assert answer["choices"][0]["message"]["content"] == ANSWER * NUM_REPEATS
    bias = {str(number): 0.5 for number in range(mesh.tokenizer.get_vocab_size())}
    answer = await mesh.json("ChatCompletions", {"messages": USER, "logit_bias": bias})
    assert answer["choices"][0]["message"]["content"] == ANSWER * NUM_REPEATS


async def test_every_setting_of_prompts_fits_the_bound_of_bodies() -> None:
    (bound,) = [
        item.le
        for item in GatewaySettings.model_fields["max_prompts"].metadata
        if hasattr(item, "le")
    ]
    CompletionBody.model_validate({"prompt": ["x"] * bound})
    CompletionBody.model_validate({"prompt": [[1]] * bound})


@pytest.mark.asyncio(loop_scope="function")
async def test_a_large_answer_is_not_lost(tmp_path: Path) -> None:
    """What may be received says nothing of what is sent."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[65] * 200], chunk=50, top_logprobs=20)

    async with gateway(tmp_path, script, max_message_bytes=1 << 16) as mesh:
        body = {"messages": USER, "n": 2, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
        answer = await mesh.json("ChatCompletions", body)
        assert len(json.dumps(answer)) > 4 << 16
        assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [200, 200]


@pytest.mark.asyncio(loop_scope="function")
async def test_prompts_of_a_request_share_their_stop_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[byte_level_bpe().encode(ANSWER).ids])

    made = []

    class Counted(StopAutomaton):
        def __init__(self, stops: Sequence[str]) -> None:
            made.append(stops)
            super().__init__(stops)

    monkeypatch.setattr("weft.gateway.generation.pipeline.StopAutomaton", Counted)
    async with gateway(tmp_path, script) as mesh:
        body = {"prompt": ["x"] * 32, "max_tokens": 50, "stop": ["every", "nothing"]}
        answer = await mesh.json("Completions", body)
        assert {choice["text"] for choice in answer["choices"]} == {"A good answer, "}
    assert len(made) == 1
