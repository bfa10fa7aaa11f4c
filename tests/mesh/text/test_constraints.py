"""Constrained output through a whole mesh, with the client that most programs use."""

from __future__ import annotations

import asyncio
import json
import random
import re
from string import ascii_lowercase
from typing import Any

import grpc
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from weft.chaos.tiny import EOS_TOKEN_ID
from weft.testing.engine.random_schemas import person
from weft.testing.meshes.mesh_kinds import on
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, Greedy, TinyMesh
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

# Prompts are shipped there, so that constrained requests begin with filled pages.
pytestmark = [pytest.mark.needs("go", "nixl"), pytest.mark.timeout(400), on("pairs")]
CLOSING = 12.0
NUM_TRIES = 50


def client(mesh: TinyMesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=240)


def messages(text: str) -> Any:
    return [{"role": "user", "content": f"{text} " * 20}]


def endings(mesh: TinyMesh) -> dict[str, float]:
    """A bias to what closes JSON: a model that writes at random hardly ever finds the end."""
    tokenizer = Tokenizer.from_file(str(mesh.model_dir / "tokenizer.json"))
    bias = {str(tokenizer.token_to_id(symbol)): CLOSING for symbol in '"}]'}
    return {**bias, str(tokenizer.token_to_id("<|im_end|>")): CLOSING}


class Pet(BaseModel):
    """What a client of the SDK asks for."""

    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)
    tags: list[str] = Field(max_length=2)


class Owner(BaseModel):
    """Refers to another type, as most arguments of real functions do."""

    name: str = Field(max_length=8)
    pets: list[Pet] = Field(max_length=1)


TOOLS: Any = [openai.pydantic_function_tool(Owner), openai.pydantic_function_tool(Pet)]
OF_NAME = {kind.__name__: kind for kind in (Owner, Pet)}


@pytest.mark.parametrize("name", ["", "Owner"])
async def test_demanded_calls_have_valid_names_and_arguments(mesh: TinyMesh, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    arguments: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Enter them."}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "logit_bias": endings(mesh),
    }
    async with client(mesh) as sdk:
        whole = await sdk.chat.completions.create(**arguments, n=4, seed=5)
        async with sdk.chat.completions.stream(**arguments, seed=6) as stream:
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        for one in answer.choices:
            assert one.finish_reason == ("stop" if name else "tool_calls")
            (call,) = one.message.tool_calls
            assert call.id
            assert not one.message.content
            assert call.function.name == (name or call.function.name)
            OF_NAME[call.function.name].model_validate_json(call.function.arguments)


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_function_without_parameters_is_called_without_arguments(
    mesh: TinyMesh, is_named: bool
) -> None:
    named: Any = {"type": "function", "function": {"name": "now"}}
    async with client(mesh) as sdk:
        answer = await sdk.chat.completions.create(
            model=MODEL,
            messages=messages("free"),
            tools=[named],
            tool_choice=named if is_named else "required",
            parallel_tool_calls=False,
            logit_bias=endings(mesh),  # type: ignore[arg-type]
        )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {}


async def test_the_sdk_parses_answers_into_its_types(mesh: TinyMesh) -> None:
    async with client(mesh) as sdk:
        free = sdk.chat.completions.create(
            model=MODEL, messages=messages("free"), max_tokens=200, temperature=0
        )
        asked = sdk.chat.completions.parse(
            model=MODEL, messages=messages("pet"), response_format=Pet, logit_bias=endings(mesh)
        )
        parsed, beside = await asyncio.gather(asked, free)
    assert isinstance(parsed.choices[0].message.parsed, Pet)
    assert parsed.choices[0].finish_reason == "stop"
    assert beside.usage is not None
    assert beside.usage.completion_tokens > 0


async def test_calls_or_an_answer_in_its_type(mesh: TinyMesh) -> None:
    """Tools beside a response format: of many random answers some are calls, and all are valid."""
    num_calls = num_answers = 0
    bias = endings(mesh)
    tokenizer = Tokenizer.from_file(str(mesh.model_dir / "tokenizer.json"))
    async with client(mesh) as sdk:
        for opener in "<{":
            first = str(tokenizer.token_to_id(opener))
            answer = await sdk.chat.completions.parse(
                model=MODEL,
                messages=messages("either"),
                tools=TOOLS,
                response_format=Pet,
                parallel_tool_calls=False,
                n=4,
                logit_bias={**bias, first: CLOSING},  # type: ignore[dict-item]
            )
            for choice in answer.choices:
                if choice.message.tool_calls:
                    (call,) = choice.message.tool_calls
                    OF_NAME[call.function.name].model_validate_json(call.function.arguments)
                    assert choice.finish_reason == "tool_calls"
                    num_calls += 1
                else:
                    assert isinstance(choice.message.parsed, Pet)
                    assert choice.finish_reason == "stop"
                    num_answers += 1
    assert num_calls
    assert num_answers


async def test_streams_and_samples_are_valid(mesh: TinyMesh) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": person()}}
    async with client(mesh) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=messages("people"),
            response_format=wanted,  # type: ignore[arg-type]
            logit_bias=endings(mesh),  # type: ignore[arg-type]
            n=3,
            stream=True,
        )
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    for text in texts:
        jsonschema.Draft202012Validator(person()).validate(json.loads(text))


async def test_any_json_object_and_vllms_names(mesh: TinyMesh) -> None:
    async def ask(**fields: Any) -> str:
        completion = await sdk.completions.create(
            model=MODEL,
            prompt="list them all: " * 20,
            max_tokens=400,
            logit_bias=endings(mesh),  # type: ignore[arg-type]
            extra_body=fields,
        )
        assert completion.choices[0].finish_reason == "stop"
        return completion.choices[0].text

    async with client(mesh) as sdk:
        found = await asyncio.gather(
            ask(response_format={"type": "json_object"}),
            ask(guided_regex="[0-9]{4}-[0-9]{2}"),
            ask(structured_outputs={"choice": ["one", "two"]}),
            ask(guided_grammar='root ::= "<" [a-c]{3} ">"'),
        )
    assert isinstance(json.loads(found[0]), dict)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", found[1])
    assert found[2] in ("one", "two")
    assert re.fullmatch("<[a-c]{3}>", found[3])


async def test_a_bad_schema_is_a_400_that_says_where(mesh: TinyMesh) -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    async with client(mesh) as sdk:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(
                    model=MODEL,
                    messages=messages("bad"),
                    response_format=wanted,  # type: ignore[call-overload]
                    stream=stream,
                )
            assert caught.value.param == "response_format.json_schema.schema"
            assert "at #/properties/a/$dynamicRef" in str(caught.value)


async def test_the_typed_api_gives_the_same_text(mesh: TinyMesh, greedy: Greedy) -> None:
    constraint = common_pb2.Constraint(regex="[a-z]{12}!")
    allowed = greedy.ids_of(ascii_lowercase + "!")
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for _ in range(NUM_TRIES):
            prompt = [random.randrange(3, VOCAB) for _ in range(60)]
            request = gateway_pb2.CompleteRequest(
                model=MODEL,
                token_ids=common_pb2.TokenIds(ids=prompt),
                sampling=common_pb2.SamplingParams(seed=4, constraint=constraint),
            )
            typed = [response async for response in stub.Complete(request)][-1].choices[0]
            # Behind the text only its end is allowed.
            drawn = list(typed.token_ids)[: -1 if typed.token_ids[-1] == EOS_TOKEN_ID else None]
            if greedy.is_clear_draw(prompt, drawn, temperature=1.0, seed=4, allowed=allowed):
                break
        else:
            raise AssertionError("the mesh draws other tokens than its definition has")
    async with client(mesh) as sdk:
        rest = await sdk.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=100,
            seed=4,
            extra_body={"guided_regex": "[a-z]{12}!"},
        )
    assert re.fullmatch("[a-z]{12}!", typed.text)
    assert rest.choices[0].text == typed.text
