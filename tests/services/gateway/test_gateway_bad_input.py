"""Bad requests: a clear answer that names the field, and nobody else is disturbed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import WeftError
from weft.decode.assembly import Assembly
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2, openai_pb2

USER = [{"role": "user", "content": "hi"}]
ANSWER = "A good answer, every time."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory) -> AsyncIterator[Harness]:  # type: ignore[no-untyped-def]
    tokens = byte_level_bpe().encode(ANSWER).ids

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[tokens])

    async with gateway(tmp_path_factory.mktemp("bad"), script, max_body_bytes=1 << 20) as harness:
        yield harness


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refused(mesh: Harness, method: str, body: object) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.post(method, body)
    return from_rpc_error(caught.value)


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"web_search_options": {}}, "web_search_options"),
    *(
        (
            {"response_format": {"type": kind, "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        )
        for kind in ("text", "json_object")
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 10**400}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 0.0009}, "repetition_penalty"),
    ({"stop": [f"s{i}" for i in range(1000)]}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "a lot"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"cache_salt": "s" * 129}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"session_id": "s" * 129}, "session_id"),
    ({"end_session": True}, "end_session"),
    ({"priority": 1_000_001}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    (
        {"messages": [*USER, {"role": "user", "content": [{"type": "text"}]}]},
        "messages[1].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"regex": "a+"}, "regex"),
    ({"ebnf": "root ::= 'a'"}, "ebnf"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"bad_words": ["no"]}, "bad_words"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"vllm_xargs": {"x": 1}}, "vllm_xargs"),
    ({"lora_path": "pirate"}, "lora_path"),
    ({"stop_regex": ["a*"]}, "stop_regex"),
    ({"no_stop_trim": True}, "no_stop_trim"),
    ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ({"echo": True}, "echo"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"guided_whitespace_pattern": "x*"}, "guided_whitespace_pattern"),
    ({"length_penalty": 1.5}, "length_penalty"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "n": 2}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
    ),
    *(
        ({"response_format": {"type": "json_object", "schema": schema}}, "response_format.schema")
        for schema in ({"type": "string"}, {"type": ["null"]}, {"type": "array", "items": {}})
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "format": {}, "triggers": ["a"]}},
        "response_format.format",
    ),
    ({"response_format": {"type": "text", "format": {}}}, "response_format.format"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 3}}, "structured_outputs.grammar"),
    *(
        ({"structured_outputs": {"regex": "a", name: value}}, f"structured_outputs.{name}")
        for name, value in (
            ("structural_tag", "{}"),
            ("whitespace_pattern", "( "),
            ("disable_additional_properties", True),
        )
    ),
    (
        {"structured_outputs": {"whitespace_pattern": " ", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"modalities": ["text", "audio"]}, "modalities"),
]


@pytest.mark.parametrize(("change", "param"), CHAT_CASES)
async def test_chat_fields(mesh: Harness, change: dict[str, Any], param: str) -> None:
    error = await refused(mesh, "ChatCompletions", {"model": MODEL, "messages": USER, **change})
    assert (error.grpc_code, error.http_status) == ("INVALID_ARGUMENT", 400)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


COMPLETION_CASES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"prompt": "a", name: value}, name)
        for name, value in {
            "max_completion_tokens": 5,
            "messages": USER,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        }.items()
    ),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**7]}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 114}, "n"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["x"] * 300}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 1, "n": 2}, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "n": 2}, "echo"),
    ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("body", "param"), COMPLETION_CASES)
async def test_completion_fields(mesh: Harness, body: dict[str, Any], param: str) -> None:
    error = await refused(mesh, "Completions", {"model": MODEL, **body})
    assert (error.http_status, (error.param or "").split("[")[0]) == (400, param)


BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'"text"', "object"),
    (b"null", "object"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
    (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": -Infinity}', "top_p"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}", "JSON"),
]


@pytest.mark.parametrize(("body", "named"), BODIES, ids=range(len(BODIES)))
async def test_bodies(mesh: Harness, body: bytes, named: str) -> None:
    error = await refused(mesh, "ChatCompletions", body)
    assert error.http_status == 400
    assert named in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("change", "bounds", "value"),
    [
        ({"max_tokens": 2**31}, "from 1 to 2147483647", "2147483648"),
        ({"max_completion_tokens": 0}, "from 1 to 2147483647", "0"),
        ({"seed": 2**64}, "from -9223372036854775808 to 18446744073709551615", str(2**64)),
        ({"repetition_penalty": 0.0005}, "from 0.001 to 100", "0.0005"),
        ({"temperature": -0.1}, "from 0 to 100", "-0.1"),
        ({"temperature": -1}, "from 0 to 100", "-1"),
        ({"top_p": 0}, "above 0 and at most 1", "0"),
        ({"n": 10**100}, "from 1 to 128", "1" + "0" * 39 + "..."),
    ],
)
async def test_bounds_are_shown_as_they_are(
    mesh: Harness, change: dict[str, Any], bounds: str, value: str
) -> None:
    error = await refused(mesh, "ChatCompletions", {"messages": USER, **change})
    assert error.message == f"{next(iter(change))}: must be {bounds}, not {value}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": None}, "messages: must be array, not null"),
        ({"temperature": True}, "temperature: must be number, not true"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role: is empty"),
    ],
)
async def test_values_are_shown_as_json_has_them(
    mesh: Harness, change: dict[str, Any], message: str
) -> None:
    error = await refused(mesh, "ChatCompletions", {"messages": USER, **change})
    assert error.message == message


@pytest.mark.parametrize("method", ["LoadLoraAdapter", "UnloadLoraAdapter"])
async def test_adapters_where_they_are_off_are_the_callers_mistake(
    mesh: Harness, method: str
) -> None:
    path = {"lora_path": "y"} if method == "LoadLoraAdapter" else {}
    error = await refused(mesh, method, {"lora_name": "x", **path})
    assert (error.http_status, error.reason) == (400, "ADAPTERS_OFF")
    assert "--adapter-root" in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 100, "top_p": 1, "min_p": 1, "top_k": 2**31 - 1, "n": 128},
        {"temperature": 0, "top_p": 1e-300, "min_p": 0, "top_k": -1, "n": 1},
        {"repetition_penalty": 0.001, "presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2},
        {"logit_bias": {"1": -100, "2": 100}, "seed": 2**64 - 1, "cache_salt": "s" * 128},
        {"seed": -(2**63), "logprobs": True, "top_logprobs": 20},
    ],
)
async def test_a_worker_takes_what_the_gateway_takes(mesh: Harness, change: dict[str, Any]) -> None:
    await mesh.json("ChatCompletions", {"messages": USER, "max_tokens": 1, **change})
    Assembly(mesh.workers[0].submits[-1]).submit(0)


async def test_tokenize_of_two_things_is_refused(mesh: Harness) -> None:
    error = await refused(mesh, "TokenizeText", {"prompt": "x", "messages": USER})
    assert error.http_status == 400
    assert "prompt" in error.message
    assert "messages" in error.message
    request = gateway_pb2.TokenizeRequest(
        text="x", messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.typed.Tokenize(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught.value).param == "text"


async def test_large_body(mesh: Harness) -> None:
    error = await refused(mesh, "ChatCompletions", {"messages": USER, "x": "y" * (10 << 20)})
    assert (error.http_status, error.reason) == (413, "REQUEST_TOO_LARGE")
    assert str(1 << 20) in error.message


async def test_context_length(mesh: Harness) -> None:
    for body in (
        {"prompt": [5] * 512},
        {"prompt": [5] * 500, "max_tokens": 13},
        {"prompt": "word " * 600},
        {"prompt": "x" * 500_000},
    ):
        error = await refused(mesh, "Completions", body)
        assert (error.reason, error.http_status) == ("CONTEXT_LENGTH_EXCEEDED", 400)
        assert "512" in error.message
    assert (
        "500"
        in (await refused(mesh, "Completions", {"prompt": [5] * 500, "max_tokens": 13})).message
    )
    # An answer that no prompt leaves room for is its own field's fault.
    for field, method in (
        ("max_tokens", "Completions"),
        ("max_tokens", "ChatCompletions"),
        ("max_completion_tokens", "ChatCompletions"),
    ):
        given = {"prompt": [5]} if method == "Completions" else {"messages": USER}
        error = await refused(mesh, method, {**given, field: 513})
        assert error.param == field
        assert f"lower {field}" in error.message
    fits = await mesh.json("Completions", {"prompt": [5] * 500, "max_tokens": 12})
    assert fits["choices"][0]["text"] == ANSWER[: len(fits["choices"][0]["text"])]


async def test_unknown_model(mesh: Harness) -> None:
    for method, body in (
        ("ChatCompletions", {"model": "gpt-9", "messages": USER}),
        ("Completions", {"model": "gpt-9", "prompt": "x"}),
        ("TokenizeText", {"model": "gpt-9", "prompt": "x"}),
    ):
        error = await refused(mesh, method, body)
        assert (error.http_status, error.reason) == (404, "MODEL_NOT_FOUND")
        assert "gpt-9" in error.message
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.openai.RetrieveModel(openai_pb2.RetrieveModelRequest(model="a/b"))
    assert from_rpc_error(caught.value).http_status == 404


Change = Callable[[gateway_pb2.ChatRequest], object]
TYPED_CASES: list[tuple[Change, str]] = [
    (lambda r: setattr(r.sampling, "temperature", math.nan), "temperature"),
    (lambda r: setattr(r.sampling, "top_p", math.inf), "top_p"),
    (lambda r: setattr(r.sampling, "min_p", -1.0), "min_p"),
    (lambda r: setattr(r.sampling, "n", 1000), "n"),
    (lambda r: setattr(r.sampling, "top_k", 2**32 - 1), "top_k"),
    (lambda r: r.sampling.logit_bias.update({1: math.nan}), "logit_bias"),
    (lambda r: setattr(r.sampling.beams, "width", 5), "sampling.beams"),
    (lambda r: setattr(r.sampling.time_tokens, "first", 5), "sampling.time_tokens"),
    (lambda r: r.stop.stop.extend(["s"] * 1000), "stop"),
    (lambda r: r.stop.stop_token_ids.append(10**6), "stop_token_ids"),
    (lambda r: setattr(r.stop, "max_tokens", 2**32 - 1), "max_tokens"),
    (lambda r: setattr(r.logprobs, "top_logprobs", 21), "top_logprobs"),
    (lambda r: r.timeout.FromSeconds(-1), "timeout"),
    (lambda r: r.ClearField("messages"), "messages"),
    (lambda r: r.messages.add(content="no role"), "messages[1].role"),
    (lambda r: r.messages.add(role="user", content="z" * (2 << 20)), "request"),
]


@pytest.mark.parametrize(("change", "param"), TYPED_CASES)
async def test_typed_fields(mesh: Harness, change: Change, param: str) -> None:
    request = gateway_pb2.ChatRequest(
        model=MODEL, messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
    )
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.typed.Chat(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught.value).param == param


async def test_typed_messages_that_are_no_messages(mesh: Harness) -> None:
    method = "/weft.v1.GatewayService/Chat"
    bad_text = gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="abcd")]
    ).SerializeToString()
    for body in (bad_text.replace(b"abcd", b"\xff\xfe\xfd\xfc"), b"\x0a\xff\xff"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.channel.unary_stream(method)(body).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.typed.Complete(gateway_pb2.CompleteRequest()).read()
    assert from_rpc_error(caught.value).param == "prompt"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.typed.Complete(
            gateway_pb2.CompleteRequest(token_ids=common_pb2.TokenIds(ids=[2**31]))
        ).read()
    assert from_rpc_error(caught.value).param == "prompt"


@pytest.mark.parametrize("method", ["ChatCompletions", "TokenizeText"])
@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "continue_final_message"]
)
async def test_variables_of_the_template_are_no_fields(
    mesh: Harness, method: str, name: str
) -> None:
    body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False, name: None}}
    await mesh.json(method, body)
    body = {"messages": USER, "chat_template_kwargs": {name: False}}
    error = await refused(mesh, method, body)
    assert (error.http_status, error.param) == (400, "chat_template_kwargs")
    assert f"`{name}`" in error.message


async def test_null_is_the_same_as_absent(mesh: Harness) -> None:
    text = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": None})
    assert await mesh.json("ChatCompletions", text.encode())


async def test_good_requests_beside_bad_ones(mesh: Harness) -> None:
    async def good() -> str:
        answer = await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER})
        return str(answer["choices"][0]["message"]["content"])

    bad = [refused(mesh, "ChatCompletions", body) for body, _ in BODIES]
    results = await asyncio.gather(*(good() for _ in range(8)), *bad)
    assert results[:8] == [ANSWER] * 8
