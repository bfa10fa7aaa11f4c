"""OpenAI's Responses API: the `openai` SDK, unmodified, through the Go edge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL

pytestmark = pytest.mark.needs("go")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Tells.", "parameters": SCHEMA}
]
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[DialectEdge]:
    async with dialect_edge(rest_binary, tmp_path) as made:
        yield made


def sdk(edge: DialectEdge, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
async def client(edge: DialectEdge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(edge) as made:
        yield made


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two of them."""
    kept = {**response, "id": "", "created_at": 0, "completed_at": 0, "usage": None}
    kept["output"] = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in kept["output"]
    ]
    return kept


async def both(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Response, list[Any]]:
    """The whole answer, which is what the stream ends with too, and the stream's events."""
    asked = {"model": MODEL, "input": "hi", **fields}
    whole = await client.responses.create(**asked)
    Response.model_validate(whole.to_dict(), strict=True)
    stream = await client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert bare(events[-1].response.to_dict()) == bare(whole.to_dict())
    for event in events:
        if event.type == "response.output_item.done":
            item = events[-1].response.output[event.output_index]
            assert item.to_dict() == event.item.to_dict()
    if whole.status == "completed":  # of others the SDK's helper raises
        shown = ""
        async with client.responses.stream(**asked) as helped:
            async for event in helped:
                if event.type == "response.output_text.done":
                    assert shown == event.text
                shown = getattr(event, "snapshot", "")
            final = await helped.get_final_response()
        assert final.output_text == whole.output_text
    return whole, events


async def test_a_text_whole_and_streamed(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    edge.text = "Weft antwortet: déjà vu 你好 🎉\u2028done"
    response, events = await both(client, instructions="Be kind.", metadata={"a": "b"})
    assert response.output_text == edge.text
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL)
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert edge.prompt == "system: Be kind.\nuser: hi\nassistant:"
    assert response.usage is not None
    assert response.usage.input_tokens == len(edge.mesh.workers[0].prompts[-1])
    assert response.usage.output_tokens == len(edge.mesh.ids(edge.text)) + 1
    assert response.usage.input_tokens_details.cached_tokens > 0
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == edge.text
    assert len(deltas) > 1


async def test_reasoning_and_calls_in_one_answer(
    edge: DialectEdge, client: openai.AsyncOpenAI
) -> None:
    edge.text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    response, events = await both(client, tools=TOOLS, reasoning={"effort": "high"})
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert reasoning.content[0].text.strip() == "hm"  # type: ignore[union-attr,index]
    assert message.content[0].text == "I look."  # type: ignore[union-attr,index]
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)  # type: ignore[union-attr]
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    seen = list(dict.fromkeys(event.type for event in events))
    assert [kind for kind in seen if "reasoning_text" in kind or "arguments" in kind] == [
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    # All of it is sent back, as clients do that store nothing.
    history: list[Any] = [{"role": "user", "content": "hi"}]
    history += [item.to_dict() for item in response.output]
    history.append({"type": "function_call_output", "call_id": "call_1", "output": "rain"})
    await client.responses.create(model=MODEL, input=history, tools=TOOLS, store=False)
    assert "assistant: (" in edge.prompt
    assert edge.prompt.endswith("</tool_call>\ntool: rain #call_1\nassistant:")
    assert edge.prompt.count("assistant:") == 2


async def test_a_tool_may_be_forced(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    edge.text = ARGUMENTS
    named = {"type": "function", "name": "get_weather"}
    response, _ = await both(client, tools=TOOLS, tool_choice=named)
    (call,) = response.output
    assert (call.type, call.arguments) == ("function_call", ARGUMENTS)
    edge.text = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    more = [*TOOLS, {"type": "function", "name": "other", "parameters": SCHEMA}]
    for tools, choice in ((TOOLS, "required"), (more, allowed)):
        response, _ = await both(client, tools=tools, tool_choice=choice)
        assert [item.type for item in response.output] == ["function_call"]
        assert "other" not in edge.prompt


async def test_a_form_of_the_text(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    edge.text = ARGUMENTS
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    response, _ = await both(client, text={"format": form})
    assert json.loads(response.output_text) == {"city": "Köln"}
    assert json.loads(edge.submit.sampling.constraint.json_schema) == SCHEMA
    await both(client, text={"format": {"type": "json_object"}})
    assert edge.submit.sampling.HasField("constraint")
    await both(client, text={"format": {"type": "text"}})
    assert not edge.submit.sampling.HasField("constraint")


async def test_a_limit_makes_it_incomplete(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    response, events = await both(client, max_output_tokens=2, temperature=0.5, top_p=0.25)
    assert (response.status, events[-1].type) == ("incomplete", "response.incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    sampling = edge.submit.sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.25)
    assert (response.temperature, response.top_p) == (0.5, 0.25)


async def test_logprobs(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    response, events = await both(client, include=["message.output_text.logprobs"], top_logprobs=1)
    (part,) = response.output[0].content  # type: ignore[union-attr]
    assert part.logprobs  # type: ignore[union-attr]
    shown = "".join(entry.token for entry in part.logprobs)  # type: ignore[union-attr]
    assert shown.startswith(edge.text)
    streamed = [entry for event in events if "delta" in event.type for entry in event.logprobs]
    assert len(streamed) == len(part.logprobs)  # type: ignore[union-attr,arg-type]


async def test_a_response_is_continued(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    edge.text = f"I look.\n{CALL}"
    first = await client.responses.create(
        model=MODEL, input="hi", tools=TOOLS, instructions="Not stored."
    )
    edge.text = "It rains."
    call = first.output[1]
    second = await client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],  # type: ignore[union-attr,typeddict-item]
    )
    called = f"I look.<tool_call>get_weather {ARGUMENTS} {call.call_id}</tool_call>"  # type: ignore[union-attr]
    history = f"user: hi\nassistant: {called}\ntool: rain #{call.call_id}\n"  # type: ignore[union-attr]
    assert edge.prompt == f"{history}assistant:"
    stream = await client.responses.create(
        model=MODEL, previous_response_id=second.id, input="thanks", stream=True
    )
    last = [event async for event in stream][-1]
    assert edge.prompt == f"{history}assistant: It rains.\nuser: thanks\nassistant:"
    for response in (first, second, last.response):  # type: ignore[union-attr]
        got = await client.responses.retrieve(response.id)
        assert got.to_dict() == response.to_dict()
    # An item of a stored response may be named instead of sent.
    reference: Any = {"type": "item_reference", "id": second.output[0].id}
    await client.responses.create(model=MODEL, input=[reference, {"role": "user", "content": "x"}])
    assert edge.prompt == "assistant: It rains.\nuser: x\nassistant:"
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    # Each response has its whole conversation.
    await client.responses.create(model=MODEL, previous_response_id=second.id, input="again")
    assert edge.prompt.startswith(history)


async def test_what_is_not_kept_is_a_404_that_says_why(
    edge: DialectEdge, client: openai.AsyncOpenAI
) -> None:
    unstored = await client.responses.create(model=MODEL, input="hi", store=False)
    assert unstored.store is False  # type: ignore[attr-defined]
    for id_, why in (
        (unstored.id, "was not stored"),
        ("resp_0badcafe-1", "another gateway"),
        ("nonsense", "was not stored"),
    ):
        with pytest.raises(openai.NotFoundError, match=why) as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id=id_)
        assert caught.value.param == "previous_response_id"
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(id_)


async def test_the_store_is_bounded(rest_binary: Path, tmp_path: Path) -> None:
    async with (
        dialect_edge(rest_binary, tmp_path, max_stored_responses=2) as edge,
        sdk(edge) as client,
    ):
        first, second = [await client.responses.create(model=MODEL, input="x") for _ in range(2)]
        await client.responses.retrieve(first.id)
        third = await client.responses.create(model=MODEL, input="x")
        for kept in (first, third):
            assert (await client.responses.retrieve(kept.id)).id == kept.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)


async def test_tenants_do_not_see_each_others_responses(rest_binary: Path, tmp_path: Path) -> None:
    made = [new_key(tenant) for tenant in ("one", "two")]
    write_keys(tmp_path / "keys.json", [entry for _, entry in made])
    async with (
        dialect_edge(rest_binary, tmp_path, api_keys_file=tmp_path / "keys.json") as edge,
        sdk(edge, made[0][0]) as one,
        sdk(edge, made[1][0]) as two,
    ):
        response = await one.responses.create(model=MODEL, input="secret")
        for call in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        item: Any = {"type": "item_reference", "id": response.output[0].id}
        for fields in ({"previous_response_id": response.id}, {"input": [item]}):
            with pytest.raises(openai.NotFoundError):
                await two.responses.create(**{"model": MODEL, "input": "x", **fields})
        assert (await one.responses.retrieve(response.id)).id == response.id


async def test_a_running_response_is_cancelled(
    edge: DialectEdge, client: openai.AsyncOpenAI
) -> None:
    edge.hang_after = 3
    stream = await client.responses.create(model=MODEL, input="hi", stream=True)
    first = await anext(stream)
    id_ = first.response.id  # type: ignore[union-attr]
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert (await client.responses.retrieve(id_)).status == "in_progress"
    cancel = asyncio.create_task(client.responses.cancel(id_))
    rest = [event async for event in stream]
    cancelled = await cancel
    assert cancelled.status == "cancelled"
    assert rest[-1].response.status == "cancelled"  # type: ignore[union-attr]
    assert (await client.responses.retrieve(id_)).status == "cancelled"
    assert (await client.responses.cancel(id_)).status == "cancelled"
    edge.hang_after = 10**9
    done = await client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="ended"):
        await client.responses.cancel(done.id)


async def test_a_failure_in_mid_stream_is_the_last_event(rest_binary: Path, tmp_path: Path) -> None:
    async with (
        dialect_edge(rest_binary, tmp_path, max_attempts=1, resume_timeout_s=0) as edge,
        sdk(edge) as client,
    ):
        edge.break_after = 3
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.status == "failed"
        assert events[-1].response.error is not None
        assert "lost" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"topP": 1}, "topP"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "x", "params": {}}]}, "tools[0].params"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools[0].type"),
        ({"tools": [*TOOLS, {"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "name": "x"}}, "tool_choice.type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ],
)
async def test_what_is_refused_is_named(
    edge: DialectEdge, fields: dict[str, Any], named: str
) -> None:
    answer = await edge.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == named
    assert error["message"].startswith(f"{named}:")
    assert error["type"] == "invalid_request_error"


HOSTED = [
    {"type": "namespace", "name": "n", "description": "d", "tools": []},
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "tool_of_next_year", "strict": [1], "name": 5},
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"client_metadata": {}}, ["client_metadata"]),
        ({"truncation": "auto"}, ["truncation"]),
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"include": ["secrets"]}, ["include[0]"]),
        ({"newest_of_fields": 1}, ["newest_of_fields"]),
        ({"reasoning": {"effort": "low", "newest": 1}}, ["reasoning.newest"]),
        ({"tools": [*HOSTED, *TOOLS]}, [f"tools[{number}]" for number in range(len(HOSTED))]),
        ({"tools": HOSTED, "tool_choice": "none"}, ["tools[0]"]),
        ({"tools": [{**TOOLS[0], "newest": 1}]}, ["tools[0].newest"]),
    ],
)
async def test_what_the_model_can_do_without_is_left_out(
    edge: DialectEdge, fields: dict[str, Any], named: list[str]
) -> None:
    """Agents send these unasked. The model is shown nothing of them."""
    shown = TOOLS if fields.get("tools", HOSTED) is not HOSTED else []
    await edge.post("/v1/responses", {"model": MODEL, "input": "hi", "tools": shown})
    prompt = edge.prompt
    answer = await edge.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    assert edge.prompt == prompt
    told = answer.headers["x-weft-warnings"]
    assert all(f"{one}: left out" in told for one in named), told
    assert [tool["name"] for tool in answer.json()["tools"]] == [one["name"] for one in shown]


async def test_more_tokens_than_there_is_room_for(
    edge: DialectEdge, client: openai.AsyncOpenAI
) -> None:
    edge.text, edge.is_cut, edge.chunk = "word " * 5000, True, 50
    response = await client.responses.create(model=MODEL, input="hi", max_output_tokens=64000)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.total_tokens == 4096
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.responses.create(model=MODEL, input="word " * 5000)
    assert too_long.value.code == "context_length_exceeded"
    assert "exceeds the context window of this model" in str(too_long.value)
    assert "maximum context length is 4096 tokens" in str(too_long.value)


async def test_images_of_tool_results_become_a_text(edge: DialectEdge) -> None:
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "x"}]
    given = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": output},
    ]
    answer = await edge.post("/v1/responses", {"model": MODEL, "input": given})
    assert answer.status_code == 200, answer.text
    assert "seen\n[The tool returned content of type input_image." in edge.prompt
    assert "input[2].output[1]: left out" in answer.headers["x-weft-warnings"]


async def test_input_items_are_listed(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "three"},
    ]
    second = await client.responses.create(model=MODEL, input=given, previous_response_id=first.id)
    pages = client.responses.input_items.list(second.id, limit=2, order="asc")
    items: list[Any] = [item async for item in pages]
    assert [item.type for item in items] == [
        "message",
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert items[0].content[0].text == "one"
    assert items[1].to_dict() == first.output[0].to_dict()
    assert items[2].content[0].text == "two"
    assert len({item.id for item in items}) == len(items)
    newest = [item.id async for item in client.responses.input_items.list(second.id)]
    assert newest == [item.id for item in reversed(items)]
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.responses.input_items.list(second.id, after="x")
    with pytest.raises(openai.BadRequestError, match="limit"):
        await client.responses.input_items.list(second.id, limit=101)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_x")


async def test_input_tokens_are_counted(edge: DialectEdge, client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "instructions": "Be kind."}
    counted = await client.responses.input_tokens.count(**asked, tools=TOOLS)
    response = await client.responses.create(**asked, tools=TOOLS)
    assert response.usage is not None
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == response.usage.input_tokens
    more = await client.responses.input_tokens.count(model=MODEL, input="more")
    again = await client.responses.input_tokens.count(
        model=MODEL, input="more", previous_response_id=response.id
    )
    assert again.input_tokens > more.input_tokens + response.usage.output_tokens


async def test_functions_of_a_namespace_are_called(
    edge: DialectEdge, client: openai.AsyncOpenAI
) -> None:
    """Agents name the tools of their own servers so; the agent itself runs them."""
    inner = [TOOLS[0], {"type": "custom", "name": "patch"}]
    space: Any = {"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": inner}
    edge.text = CALL.replace("get_weather", "sky.get_weather")
    response, _ = await both(client, tools=[space])
    assert '"name": "sky.get_weather"' in edge.prompt
    assert "Of the sky." in edge.prompt
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert (call.namespace, call.name, call.arguments) == ("sky", "get_weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    await client.responses.create(
        model=MODEL, input=[call.to_dict(), result], tools=[space], store=False
    )  # type: ignore[call-overload]
    assert "<tool_call>sky.get_weather" in edge.prompt
    forced = {"type": "function", "namespace": "sky", "name": "get_weather"}
    edge.text = ARGUMENTS
    response = await client.responses.create(
        model=MODEL, input="hi", tools=[space], tool_choice=forced
    )  # type: ignore[call-overload]
    assert response.output[0].to_dict()["namespace"] == "sky"
