"""Tools and reasoning: what the model is shown, what its owner must enforce, what clients get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator
from openai.lib.streaming._deltas import accumulate_delta
from weft.common.rpc.errors import from_rpc_error
from weft.engine.features.constraints.schema import prepare_schema
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.answering_mesh import Mesh
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

USER = [{"role": "user", "content": "Weather in Köln?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "$defs": {"days": {"type": "integer"}},
}
WEATHER = {"name": "get_weather", "description": "Tells it.", "parameters": PARAMETERS}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "stop"}},
]
ARGUMENTS = '{"city": "Köln", "days": 2}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {{ c.id }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id or '' }}\n{% endfor %}assistant:"
)
THINKING = "{{ messages[-1].content }}<think>{# ...</think> #}"


@pytest.fixture
async def mesh(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    mesh = Mesh(USER)
    folder = tmp_path / MODEL
    folder.mkdir()
    template = getattr(request, "param", TEMPLATE)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    async with gateway(tmp_path, mesh.script, max_context_tokens=4096) as mesh.harness:
        yield mesh


def call(arguments: Any = ARGUMENTS, name: str = "get_weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


async def test_calls_are_told_from_text(mesh: Mesh) -> None:
    mesh.text = f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
    message, reason = await mesh.whole(tools=TOOLS)
    assert message["content"] == "I look."
    assert message["tool_calls"] == [call()] * 2
    assert reason == "tool_calls"
    message, reason = await mesh.whole(tools=TOOLS, parallel_tool_calls=False)
    assert message["tool_calls"] == [call()]
    mesh.text = f"<tool_call>{CALL}</tool_call>"
    message, _ = await mesh.whole(tools=TOOLS, logprobs=True)
    assert (message["content"], message["tool_calls"]) == (None, [call()])
    mesh.text = "It rains."
    assert (await mesh.whole(tools=TOOLS))[0] == {
        "role": "assistant",
        "content": "It rains.",
        "refusal": None,
        "reasoning": None,
        "reasoning_content": None,
    }


async def test_the_first_delta_of_calls_has_no_content(mesh: Mesh) -> None:
    """As OpenAI's: null where an answer goes on without a text, in its first call's delta alone."""
    mesh.text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    body = {"messages": USER, "tools": TOOLS}
    events = await mesh.harness.events("ChatCompletions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta for delta in deltas if "tool_calls" in delta]
    assert calls[0]["content"] is None
    assert not any("content" in delta for delta in calls[1:])
    assert not any(delta.get("content") for delta in deltas)
    state: dict[object, object] = {}
    for delta in deltas:
        state = accumulate_delta(state, delta)
    assert not state["content"]
    assert isinstance(found := state["tool_calls"], list)
    assert [one["function"]["arguments"] for one in found] == [ARGUMENTS] * 2


async def test_ids_of_what_a_parser_takes_out_are_shown_all_the_same(mesh: Mesh) -> None:
    mesh.text = f"I look.\n<tool_call>\n{CALL}\n</tool_call>"
    body = {"messages": USER, "tools": TOOLS, "return_token_ids": True}
    ids = [*mesh.harness.ids(mesh.text), mesh.harness.end]
    answer = await mesh.harness.json("ChatCompletions", body)
    assert answer["choices"][0]["token_ids"] == ids
    events = await mesh.harness.events("ChatCompletions", body)
    assert [one for e in events for one in e["choices"][0].get("token_ids", [])] == ids


async def test_the_template_is_shown_tools_calls_and_results(mesh: Mesh) -> None:
    mesh.text = "Sunny."
    history = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "call_1", **call()}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    await mesh.harness.json("ChatCompletions", {"messages": history, "tools": TOOLS})
    shown = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in TOOLS)
    assert mesh.prompt == (
        f"tools:{shown}user: Weather in Köln?\n"
        f"assistant: <tool_call>get_weather {ARGUMENTS} call_1</tool_call>\n"
        "tool: suncall_1\nassistant:"
    )
    await mesh.harness.json(
        "ChatCompletions", {"messages": USER, "tools": TOOLS, "tool_choice": "none"}
    )
    assert mesh.prompt == "user: Weather in Köln?\nassistant:"
    body = {"messages": USER, "tools": TOOLS}
    tokens = (await mesh.harness.json("TokenizeText", body))["tokens"]
    await mesh.harness.json("ChatCompletions", body)
    assert tokens == list(mesh.harness.workers[0].submits[-1].prompt.ids)


async def test_a_template_for_tools_is_used_for_them(tmp_path: Path) -> None:
    folder = tmp_path / MODEL
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "chat_template.jinja").write_text("plain")
    path = folder / "additional_chat_templates" / "tool_use.jinja"
    path.write_text("for {{ tools | length }}: [TOOL_CALLS]")
    text = f"[TOOL_CALLS][{CALL}]"
    ids = byte_level_bpe().encode(text).ids
    async with gateway(tmp_path, lambda *_: Script(tokens=[ids])) as harness:
        body = {"messages": USER, "tools": TOOLS}
        message = (await harness.json("ChatCompletions", body))["choices"][0]["message"]
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == [ARGUMENTS]
        await harness.json("ChatCompletions", {"messages": USER})
        asked = [list(submit.prompt.ids) for submit in harness.workers[0].submits]
        assert [harness.tokenizer.decode(one) for one in asked] == ["for 2: [TOOL_CALLS]", "plain"]


@pytest.mark.parametrize("mesh", [""], indirect=True)
async def test_a_template_without_tools_gets_them_as_text(mesh: Mesh) -> None:
    mesh.text = f"<tool_call>{CALL}</tool_call>"
    history = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "Hm.", "tool_calls": [call(), call("", "stop")]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": [{"type": "text", "text": "stopped"}]},
    ]
    message, _ = await mesh.whole(messages=history, tools=TOOLS)
    assert message["tool_calls"] == [call()]
    prompt = mesh.prompt
    assert prompt.count("<|im_start|>system") == 1
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in prompt
    assert f"Hm.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n" in prompt
    assert (
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nstopped\n</tool_response><|im_end|>"
    ) in prompt


async def test_what_clients_send_back_reaches_the_template(mesh: Mesh) -> None:
    """Also calls that were cut off, or have halves of characters."""
    mesh.text = "x"
    for arguments, shown in (
        ('{"a": 1', '{"a": 1}'),
        ('{"a": "b', '{"a": "b"}'),
        ("[1]", '{"arguments": [1]}'),
        ('{"a": 1}{"b": {"c": [2', '{"a": 1, "b": {"c": [2]}}'),
        ('{"a": "\\ud83d"}', '{"a": "\ufffd"}'),
        ("not JSON", '{"arguments": "not JSON"}'),
        ("null", "{}"),
        ("", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ([1], '{"arguments": [1]}'),
    ):
        history = [*USER, {"role": "assistant", "tool_calls": [{"id": "1", **call(arguments)}]}]
        body = {"messages": history, "function_call": "none", "functions": []}
        await mesh.harness.json("ChatCompletions", body)
        assert f"<tool_call>get_weather {shown} 1</tool_call>" in mesh.prompt
    developer = [{"role": "developer", "content": "RULES"}, *USER]
    await mesh.harness.json("ChatCompletions", {"messages": developer})
    assert mesh.prompt.startswith("system: RULES")


@pytest.mark.parametrize("mesh", [f"{TEMPLATE}{{# <parameter= #}}"], indirect=True)
async def test_calls_of_tags_have_the_types_of_the_tools_schema(mesh: Mesh) -> None:
    mesh.text = (
        "Let me look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    message, reason = await mesh.whole(tools=TOOLS)
    assert message["content"] == "Let me look."
    assert message["tool_calls"] == [call('{"city": "12", "days": 2}')]
    assert reason == "tool_calls"
    # What is no schema disturbs nobody.
    odd = {"properties": {"city": {"type": [{}, 5], "anyOf": 7}, "days": 3}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": odd}}]
    message, _ = await mesh.whole(tools=tools)
    assert message["tool_calls"] == [call('{"city": "12", "days": "2"}')]


async def test_demanded_arguments_are_objects(mesh: Mesh) -> None:
    mesh.text = f"[{CALL}]"
    described = {"description": "x" * 500, "properties": {"title": {"type": "string"}}}
    for given, expected in (
        ({}, {"type": "object", "additionalProperties": True}),
        ({"$defs": {}}, {"type": "object", "additionalProperties": True, "$defs": {}}),
        (described, {"properties": {"title": {"type": "string"}}}),
    ):
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": given}}
        await mesh.harness.json(
            "ChatCompletions", {"messages": USER, "tools": [tool], "tool_choice": NAMED}
        )
        assert json.loads(mesh.constraint.json_schema) == expected


async def test_demanded_calls_are_enforced(mesh: Mesh) -> None:
    mesh.text = f"[{CALL}, {CALL}]"
    message, reason = await mesh.whole(tools=TOOLS, tool_choice="required")
    assert (message["content"], message["tool_calls"]) == (None, [call()] * 2)
    assert reason == "tool_calls"
    validator = Draft202012Validator(json.loads(mesh.constraint.json_schema))
    assert validator.is_valid(json.loads(mesh.text))
    # Without `parameters` it takes none.
    assert validator.is_valid([{"name": "stop", "arguments": {}}])
    for wrong in (
        [],
        [{"name": "other", "arguments": {}}],
        [{"name": "get_weather", "arguments": {}}],
        [{"name": "get_weather", "arguments": {"city": "Köln", "days": "two"}}],
        [{"name": "stop"}],
        [{"name": "stop", "arguments": {"any": 1}}],
    ):
        assert not validator.is_valid(wrong), wrong
    await mesh.whole(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    validator = Draft202012Validator(json.loads(mesh.constraint.json_schema))
    assert not validator.is_valid(json.loads(mesh.text))
    mesh.text = ARGUMENTS
    message, reason = await mesh.whole(tools=TOOLS, tool_choice=NAMED)
    assert (message["tool_calls"], reason) == ([call()], "stop")
    assert json.loads(mesh.constraint.json_schema) == PARAMETERS


async def test_a_call_may_be_cut_by_its_limit(mesh: Mesh) -> None:
    mesh.text, mesh.is_cut = f"<tool_call>{CALL[:-8]}", True
    tokens = len(mesh.harness.ids(mesh.text))
    message, reason = await mesh.whole(tools=TOOLS, max_tokens=tokens)
    assert message["tool_calls"] == [call(ARGUMENTS[:-7])]
    assert reason == "length"
    # Nobody is told to call what a stop string cut off.
    mesh.text, mesh.is_cut = f"<tool_call>{CALL}</tool_call>", False
    message, reason = await mesh.whole(tools=TOOLS, stop=["days"])
    assert message["tool_calls"] == [call('{"city": "Köln", "')]
    assert reason == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "null"}}}
            ],
            "tool_choice": "required",
        },
        "tools[0].function.parameters.type",
    ),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [NAMED, {**NAMED, "function": {"name": "x"}}],
                },
            },
        },
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
    (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[1].tool_calls[0].function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "guided_grammar": "a"}, "guided_grammar"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [*USER, {"role": "tool"}]}, "messages[1].content"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=range(len(BAD)))
async def test_bad_tools_are_refused(mesh: Mesh, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await mesh.harness.json("ChatCompletions", {"messages": USER, **fields})
    error = from_rpc_error(raised.value)
    assert error.http_status == 400
    assert error.param == param
    assert not mesh.harness.workers[0].submits


def refusing(message: str) -> Script:
    """The script of a worker that cannot compile a constraint."""
    detail = common_pb2.ErrorDetail(
        code="INVALID_REQUEST", stage="compile", message=message, param="constraint"
    )
    code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    failed = decode_pb2.SessionEvent.Failed(error=detail, grpc_code=code)
    return Script(tokens=[[1]], fail=failed, fail_after=0)


async def test_what_is_wrong_with_a_schema_is_told_of_its_tool(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        with pytest.raises(ValueError, match=r"^at #") as raised:
            prepare_schema(submit.sampling.constraint.json_schema)
        return refusing(str(raised.value))

    cases = (
        ({"$dynamicRef": "#a"}, "at #/properties/l/$dynamicRef: "),
        ({"type": 5}, "at #/properties/l/type: "),
        ({"$ref": "#/$defs/x"}, "at #/properties/l/$ref: '#/$defs/x' "),
    )
    async with gateway(tmp_path, script, max_context_tokens=2048) as harness:
        for schema, place in cases:
            parameters = {"type": "object", "properties": {"l": schema}}
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            named = {"type": "function", "function": {"name": "f"}}
            for choice in ("required", named):
                body = {"messages": USER, "tools": [*TOOLS, tool], "tool_choice": choice}
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await harness.json("ChatCompletions", body)
                error = from_rpc_error(raised.value)
                assert (error.param, error.http_status) == ("tools[2].function.parameters", 400)
                assert error.message.startswith(f"tools[2].function.parameters: {place}")
                assert "arguments-" not in error.message


async def test_what_is_wrong_with_all_tools_together_is_told_of_them(tmp_path: Path) -> None:
    script = refusing("too large")
    async with gateway(tmp_path, lambda *_: script, max_context_tokens=2048) as harness:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await harness.json("ChatCompletions", body)
        error = from_rpc_error(raised.value)
        assert (error.param, error.message) == ("tools", "tools: too large")


@pytest.mark.parametrize("mesh", [THINKING], indirect=True)
async def test_reasoning_stands_apart(mesh: Mesh) -> None:
    mesh.text = "It is far.\n</think>\n\nBy train."
    message, reason = await mesh.whole()
    assert (message["reasoning_content"], message["content"]) == ("It is far.", "By train.")
    assert reason == "stop"
    # What is constrained has no reasoning.
    mesh.text = '{"a": "</think>"}'
    message, _ = await mesh.whole(response_format={"type": "json_object"})
    assert message["content"] == mesh.text
    assert message["reasoning_content"] is None
    mesh.text = " is 4.\n"
    last = {"role": "assistant", "content": "Two and two"}
    message, _ = await mesh.whole(messages=[*USER, last], continue_final_message=True)
    assert message["content"] == mesh.text
    texts = await mesh.harness.json("Completions", {"prompt": "a<think>", "max_tokens": 100})
    assert texts["choices"][0]["text"] == mesh.text


@pytest.mark.parametrize(
    "mesh", ["{{ enable_thinking is defined }}{{ reasoning_effort }}"], indirect=True
)
async def test_templates_are_told_how_much_to_reason(mesh: Mesh) -> None:
    mesh.text = "x"
    for effort, told in (("low", "Falselow"), ("none", "Truenone"), (None, "False")):
        await mesh.harness.json("ChatCompletions", {"messages": USER, "reasoning_effort": effort})
        assert mesh.prompt == told


async def test_reasoning_can_be_left_in_the_text(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "chat_template.jinja").write_text(THINKING)
    ids = byte_level_bpe().encode("a</think>b").ids
    async with gateway(
        tmp_path, lambda *_: Script(tokens=[ids]), reasoning_parser="none"
    ) as harness:
        answer = await harness.json("ChatCompletions", {"messages": USER})
        assert answer["choices"][0]["message"]["content"] == "a</think>b"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_typed_face_calls_tools(mesh: Mesh, is_streamed: bool) -> None:
    mesh.text = f"Well. <tool_call>{CALL}</tool_call>"
    tools = [
        gateway_pb2.Tool(
            name="get_weather", description="Tells it.", parameters=json.dumps(PARAMETERS)
        ),
        gateway_pb2.Tool(name="stop"),
    ]
    past = gateway_pb2.ToolCall(id="call_1", name="get_weather", arguments=ARGUMENTS)
    messages = [
        gateway_pb2.ChatMessage(role="user", content="Weather in Köln?"),
        gateway_pb2.ChatMessage(role="assistant", tool_calls=[past]),
        gateway_pb2.ChatMessage(role="tool", content="sun", tool_call_id="call_1"),
    ]
    request = gateway_pb2.ChatRequest(messages=messages, tools=tools, stream=is_streamed)

    async def answer() -> tuple[str, str, str, int]:
        choices = [
            choice
            async for response in mesh.harness.typed.Chat(request)
            for choice in response.choices
        ]
        calls = [one for choice in choices for one in choice.tool_calls]
        assert [bool(one.id) for one in calls] == [bool(one.name) for one in calls]
        return (
            "".join(choice.text for choice in choices),
            "".join(one.name for one in calls),
            "".join(one.arguments for one in calls),
            choices[-1].finish_reason,
        )

    calls = common_pb2.FINISH_REASON_TOOL_CALLS
    assert await answer() == ("Well.", "get_weather", ARGUMENTS, calls)
    shown = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in TOOLS)
    assert mesh.prompt.startswith(f"tools:{shown}user: Weather in Köln?\nassistant: <tool_call>")
    request.tool_choice.mode = gateway_pb2.TOOL_MODE_REQUIRED
    mesh.text = f"[{CALL}]"
    assert await answer() == ("", "get_weather", ARGUMENTS, calls)
    assert "anyOf" in mesh.constraint.json_schema
    request.tool_choice.name = "get_weather"
    mesh.text = ARGUMENTS
    assert await answer() == ("", "get_weather", ARGUMENTS, common_pb2.FINISH_REASON_STOP)
    request.tools[1].parameters = "[]"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer()
    assert from_rpc_error(raised.value).param == "tools[1].parameters"
