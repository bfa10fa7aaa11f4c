"""Constraints at the gateway: every client's name for one reaches the worker as the same thing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import WeftError
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import common_pb2, decode_pb2, dialects_pb2_grpc, gateway_pb2

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"été": {"type": "integer"}}, "required": ["été"]}
REFUSED = "at #/properties/a: no"


@pytest.fixture
async def mesh(tmp_path) -> AsyncIterator[Harness]:  # type: ignore[no-untyped-def]
    tokens = byte_level_bpe().encode("an answer").ids

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.sampling.constraint.regex != "bad":
            return Script(tokens=[tokens])
        error = common_pb2.ErrorDetail(
            code="INVALID_REQUEST", stage="compile", message=REFUSED, param="constraint"
        )
        code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        failed = decode_pb2.SessionEvent.Failed(error=error, grpc_code=code)
        return Script(tokens=[tokens], fail=failed, fail_after=0)

    async with gateway(tmp_path, script) as harness:
        yield harness


def constraint(**kind: Any) -> common_pb2.Constraint:
    return common_pb2.Constraint(**kind)


CHOICE = common_pb2.Constraint.Choice(choices=["a", "b"])
OBJECT = {"type": "object", "additionalProperties": True}
CASES: list[tuple[dict[str, Any], common_pb2.Constraint | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, constraint(json_schema=json.dumps(OBJECT))),
    *(
        (
            {"response_format": {"type": "json_object", "schema": given}},
            constraint(json_schema=json.dumps({**given, "type": "object"})),
        )
        for given in ({}, {"anyOf": [{"type": "null"}, OBJECT]}, {"type": ["null", "object"]})
    ),
    *(
        (
            {"response_format": {"type": "json_object", "schema": given}},
            constraint(json_schema=json.dumps(given, ensure_ascii=False)),
        )
        for given in (
            {"allOf": [{}, OBJECT]},
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"oneOf": [SCHEMA, OBJECT]}}},
            {"anyOf": [OBJECT, {"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [OBJECT]}}},
        )
    ),
    *(
        (
            {"response_format": {"type": "json_object", "schema": {**rest, "$ref": "#/$defs/a"}}},
            constraint(
                json_schema=json.dumps({**rest, "type": "object", "allOf": [{"$ref": "#/$defs/a"}]})
            ),
        )
        for rest in (
            {"type": "object", "$defs": {"a": {"type": "array"}}},
            {"$defs": {"a": {"anyOf": [OBJECT, {"$ref": "#/$defs/a"}]}}},
        )
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "season", "strict": True, "schema": SCHEMA},
            }
        },
        constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    ({"guided_json": SCHEMA}, constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False))),
    ({"guided_json": '{"type": "null"}'}, constraint(json_schema='{"type": "null"}')),
    ({"guided_regex": "a+"}, constraint(regex="a+")),
    ({"guided_grammar": 'root ::= "a"'}, constraint(ebnf='root ::= "a"')),
    ({"guided_choice": ["a", "b"]}, constraint(choice=CHOICE)),
    ({"structured_outputs": {"choice": ["a", "b"]}}, constraint(choice=CHOICE)),
    ({"structured_outputs": {"regex": "a+"}}, constraint(regex="a+")),
    *(
        (
            {**given, "response_format": {"type": "json_object"}},
            constraint(json_schema=json.dumps(OBJECT), whitespace_pattern=pattern),
        )
        for given, pattern in (
            ({"guided_whitespace_pattern": r"[ \n]*"}, r"[ \n]*"),
            ({"structured_outputs": {"whitespace_pattern": ""}}, ""),
            ({"structured_outputs": {"disable_any_whitespace": True}}, ""),
        )
    ),
    ({"guided_whitespace_pattern": " "}, None),
    ({"structured_outputs": {"grammar": "x"}}, constraint(ebnf="x")),
    *(
        (
            {"response_format": {"type": "structural_tag", **tags}},
            constraint(structural_tag=json.dumps(tags)),
        )
        for tags in (
            {"format": {"type": "const_string", "value": "a"}},
            {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]},
        )
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, constraint(structural_tag="{}")),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, constraint(structural_tag='{"a": 1}')),
    (
        {"structured_outputs": {"json": '{"type": "null"}'}},
        constraint(json_schema='{"type": "null"}'),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), CASES)
async def test_constraints_reach_the_worker(
    mesh: Harness, fields: dict[str, Any], expected: common_pb2.Constraint | None
) -> None:
    await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER, **fields})
    await mesh.json("Completions", {"model": MODEL, "prompt": "hi", **fields})
    for submit in mesh.workers[0].submits:
        sampling = submit.sampling
        assert (sampling.constraint if sampling.HasField("constraint") else None) == expected


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [
        ({"disable_any_whitespace": True}, ""),
        ({"constrained_json_whitespace_pattern": r"\n?"}, r"\n?"),
    ],
)
async def test_the_gateways_whitespace_holds_where_requests_give_none(
    tmp_path: Path, setting: dict[str, Any], pattern: str
) -> None:
    tokens = byte_level_bpe().encode("an answer").ids
    async with gateway(tmp_path, lambda *_: Script(tokens=[tokens]), **setting) as mesh:
        given = {"response_format": {"type": "json_object"}}
        own = {"guided_whitespace_pattern": " "}
        for fields in (given, given | own):
            await mesh.json("ChatCompletions", {"model": MODEL, "messages": USER, **fields})
            await mesh.json("Completions", {"model": MODEL, "prompt": "hi", **fields})
        sent = [one.sampling.constraint.whitespace_pattern for one in mesh.workers[0].submits]
        assert sent == [pattern, pattern, " ", " "]


async def test_the_typed_face_passes_constraints_on(mesh: Harness) -> None:
    for given in (
        constraint(choice=CHOICE),
        constraint(ebnf="root ::= [a]"),
        constraint(json_schema="{}", whitespace_pattern=r"\n?"),
    ):
        sampling = common_pb2.SamplingParams(constraint=given)
        request = gateway_pb2.CompleteRequest(text="hi", sampling=sampling)
        _ = [response async for response in mesh.typed.Complete(request)]
        assert mesh.workers[0].submits[-1].sampling.constraint == given


async def test_all_workers_hear_that_there_are_constraints(tmp_path: Path) -> None:
    """So that one of them is ready to go on when another is lost."""
    tokens = byte_level_bpe().encode("an answer").ids
    async with gateway(tmp_path, lambda *_: Script(tokens=[tokens]), num_decode=2) as mesh:
        nonces = [worker.num_pings for worker in mesh.workers]
        await mesh.json("Completions", {"model": MODEL, "prompt": "hi"})
        await mesh.wait(
            lambda: all(w.num_pings > n + 1 for w, n in zip(mesh.workers, nonces, strict=True))
        )
        assert not any(worker.expects_constraints for worker in mesh.workers)
        await mesh.json("Completions", {"model": MODEL, "prompt": "hi", "guided_regex": "a+"})
        assert sum(len(worker.submits) for worker in mesh.workers) == 2
        await mesh.wait(lambda: all(worker.expects_constraints for worker in mesh.workers))


async def refusal(call: Any) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_refusal_names_the_clients_field(mesh: Harness, stream: bool) -> None:
    body = {"messages": USER, "stream": stream, "structured_outputs": {"regex": "bad"}}
    error = await refusal(mesh.post("ChatCompletions", body))
    assert (error.grpc_code, error.http_status) == ("INVALID_ARGUMENT", 400)
    assert error.param == "structured_outputs.regex"
    assert error.message == f"structured_outputs.regex: {REFUSED}"
    assert mesh.workers[0].submits[-1].attempt == 1


async def test_the_typed_face_tells_its_own_field(mesh: Harness) -> None:
    async def ask(given: common_pb2.Constraint) -> None:
        sampling = common_pb2.SamplingParams(constraint=given)
        async for _ in mesh.typed.Complete(
            gateway_pb2.CompleteRequest(text="hi", sampling=sampling)
        ):
            pass

    for given in (constraint(regex="bad"), constraint(), constraint(json_schema="")):
        error = await refusal(ask(given))
        assert error.grpc_code == "INVALID_ARGUMENT"
        assert error.param == "sampling.constraint"


ANNOTATED = {
    "type": "object",
    "properties": {
        "_format": {"type": "string", "_format": "date", "format": "cuid2", "pattern": "^c"},
        "b/c": {"type": "array", "items": {"enum": [{"no": "keyword"}]}, "uniqeItems": True},
    },
    "requires": ["b/c"],
    "x-order": ["b/c"],
    "default": {"nor": "this"},
}
UNKNOWN = (
    "`requires` at #/requires constrains nothing (is `required` meant?)",
    "`_format` at #/properties/_format/_format constrains nothing (is `format` meant?)",
    "`format: cuid2` at #/properties/_format/format constrains nothing",
    "`uniqeItems` at #/properties/b~1c/uniqeItems constrains nothing (is `uniqueItems` meant?)",
)
TAGS = {"structures": [{"begin": "<f>", "schema": ANNOTATED, "end": "</f>"}], "triggers": ["<f>"]}
ANNOTATED_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "guided_json", {"guided_json": ANNOTATED}),
    ("chat", "structured_outputs.json", {"structured_outputs": {"json": ANNOTATED}}),
    (
        "chat",
        "structured_outputs.structural_tag",
        {"structured_outputs": {"structural_tag": TAGS}},
    ),
    (
        "chat",
        "response_format.json_schema.schema",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": ANNOTATED},
            }
        },
    ),
    ("ollama", "format", {"format": ANNOTATED}),
    (
        "anthropic",
        "output_config.format.schema",
        {"output_config": {"format": {"type": "json_schema", "schema": ANNOTATED}}},
    ),
    (
        "responses",
        "text.format.schema",
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": ANNOTATED}}},
    ),
]


@pytest.mark.parametrize(("dialect", "field", "fields"), ANNOTATED_FIELDS)
async def test_words_of_a_schema_that_are_no_keywords_are_warnings(
    mesh: Harness, dialect: str, field: str, fields: dict[str, Any]
) -> None:
    stub, method, body = {
        "chat": (mesh.openai, "ChatCompletions", {"messages": USER}),
        "ollama": (dialects_pb2_grpc.OllamaServiceStub(mesh.channel), "Chat", {"messages": USER}),
        "anthropic": (
            dialects_pb2_grpc.AnthropicServiceStub(mesh.channel),
            "CreateMessage",
            {"messages": USER, "max_tokens": 9},
        ),
        "responses": (
            dialects_pb2_grpc.ResponsesServiceStub(mesh.channel),
            "CreateResponse",
            {"input": "hi"},
        ),
    }[dialect]
    data = json.dumps({"model": MODEL, **body, **fields}).encode()
    call = getattr(stub, method)(HttpBody(content_type="application/json", data=data))
    header = dict(await call.initial_metadata())
    _ = [message async for message in call]
    assert header["x-weft-warnings"] == "; ".join(f"{field}: {what}" for what in UNKNOWN)


async def test_the_typed_face_warns_of_words_that_are_no_keywords(mesh: Harness) -> None:
    given = constraint(json_schema=json.dumps({"type": "null", "minimun": 3}))
    sampling = common_pb2.SamplingParams(constraint=given)
    call = mesh.typed.Complete(gateway_pb2.CompleteRequest(text="hi", sampling=sampling))
    header = dict(await call.initial_metadata())
    _ = [response async for response in call]
    what = "`minimun` at #/minimun constrains nothing (is `minimum` meant?)"
    assert header["x-weft-warnings"] == f"sampling.constraint: {what}"


async def test_a_schema_of_keywords_alone_gets_no_warnings(mesh: Harness) -> None:
    call = mesh.openai.ChatCompletions(
        HttpBody(data=json.dumps({"messages": USER, "guided_json": SCHEMA}).encode())
    )
    assert "x-weft-warnings" not in dict(await call.initial_metadata())
    _ = [message async for message in call]


async def test_warnings_of_a_tools_schema_name_the_tool(mesh: Harness) -> None:
    tools = [{"name": "a"}, {"name": "b", "parameters": {"minimun": 3}}]
    body = {
        "messages": USER,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": tool} for tool in tools],
    }
    call = mesh.openai.ChatCompletions(HttpBody(data=json.dumps(body).encode()))
    header = dict(await call.initial_metadata())
    _ = [message async for message in call]
    what = "`minimun` at #/minimun constrains nothing (is `minimum` meant?)"
    assert header["x-weft-warnings"] == f"tools[1].function.parameters: {what}"
