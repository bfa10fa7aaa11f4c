"""Reasoning, constraints and tools together: what workers must enforce, and what clients get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken
from weft.common.rpc.errors import from_rpc_error
from weft.contract.request import Constraint
from weft.testing.engine.constraint_texts import SOURCE, accepts
from weft.testing.models.tiny_tokenizers import byte_level_bpe
from weft.testing.services.answering_mesh import Mesh
from weft.testing.services.gateway_harness import MODEL, gateway
from weft.v1 import common_pb2, gateway_pb2

USER = [{"role": "user", "content": "Weather in Köln?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Köln", "days": 2}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
ANSWER = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
OPENED = "{{ messages[-1].content }}<think>{# </think> <tool_call> #}"
OPENS_ITSELF = (
    "{{ messages[-1].content }}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{# <tool_call> #}"
)
HARMONY = "{{ messages[-1].content }}<|start|>assistant{# <|channel|> <|call|> #}"
AMBIGUOUS_NUMBERS = "{{ messages[-1].content }}<think>{# </think> #}"
"""Of a model whose marks are no tokens."""
PLAIN = "{{ messages[-1].content }}"
LLAMA = "{{ messages[-1].content }}ipython"
TAGS = "{{ messages[-1].content }}{# <tool_call> <parameter= #}"
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|start|>", "<|channel|>"),
    *("<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
FINAL = "<|channel|>final <|constrain|>json<|message|>"


@pytest.fixture
async def mesh(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """A mesh of a model whose marks are special tokens, with the template of the test."""
    mesh = Mesh(USER)
    folder = tmp_path / MODEL
    folder.mkdir()
    (folder / "chat_template.jinja").write_text(request.param)
    tokenizer = byte_level_bpe()
    if request.param not in (PLAIN, AMBIGUOUS_NUMBERS, LLAMA, TAGS):
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    async with gateway(
        tmp_path, mesh.script, max_context_tokens=4096, tokenizer=tokenizer
    ) as mesh.harness:
        yield mesh


def templates(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", names, indirect=True)


def token(mesh: Mesh, text: str) -> int:
    found = mesh.harness.tokenizer.token_to_id(text)
    assert found is not None
    return int(found)


def call(arguments: str = ARGUMENTS, name: str = "get_weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@templates(OPENED)
async def test_the_model_thinks_before_it_is_constrained(mesh: Mesh) -> None:
    end = token(mesh, "</think>")
    mesh.text = 'Hm, {"a": 1}?</think>{"sunny": true}'
    message, reason = await mesh.whole(response_format=FORMAT)
    assert (message["reasoning"], message["content"]) == ('Hm, {"a": 1}?', '{"sunny": true}')
    assert message["reasoning_content"] == message["reasoning"]
    assert reason == "stop"
    assert json.loads(mesh.constraint.json_schema) == ANSWER
    assert mesh.constraint.reasoning == common_pb2.Constraint.Reasoning(end=[end])
    for choice in ("required", NAMED):
        mesh.text = f"Hm.</think>{f'[{CALL}]' if choice == 'required' else ARGUMENTS}"
        message, _ = await mesh.whole(tools=TOOLS, tool_choice=choice)
        assert (message["reasoning"], message["tool_calls"]) == ("Hm.", [call()])
        assert list(mesh.constraint.reasoning.end) == [end]
    mesh.text = "Hm.</think>yes"
    message, _ = await mesh.whole(guided_choice=["yes", "no"])
    assert (message["reasoning"], message["content"]) == ("Hm.", "yes")
    texts = await mesh.harness.json(
        "Completions", {"prompt": "a", "guided_choice": ["yes", "no"], "max_tokens": 100}
    )
    assert "reasoning" not in texts["choices"][0]
    assert not mesh.constraint.HasField("reasoning")


@templates(OPENS_ITSELF)
async def test_a_model_that_opens_its_reasoning_may_do_so(mesh: Mesh) -> None:
    begin, end = token(mesh, "<think>"), token(mesh, "</think>")
    for text, reasoning in (
        ('<think>Hm.</think>{"sunny": true}', "Hm."),
        ('{"sunny": true}', None),
    ):
        mesh.text = text
        message, _ = await mesh.whole(response_format=FORMAT)
        assert (message["content"], message.get("reasoning")) == ('{"sunny": true}', reasoning)
        assert mesh.constraint.reasoning == common_pb2.Constraint.Reasoning(begin=begin, end=[end])
    # Where the prompt has ended it there is none.
    off = {"enable_thinking": False}
    message, _ = await mesh.whole(response_format=FORMAT, chat_template_kwargs=off)
    assert not mesh.constraint.HasField("reasoning")


@templates(AMBIGUOUS_NUMBERS, PLAIN)
async def test_without_a_token_for_its_end_there_is_no_reasoning(mesh: Mesh) -> None:
    """The worker could not tell where the constraint begins."""
    mesh.text = '{"sunny": true}'
    message, _ = await mesh.whole(response_format=FORMAT)
    assert message["content"] == mesh.text
    assert not mesh.constraint.HasField("reasoning")
    # And so stop strings count in all of it.
    message, _ = await mesh.whole(response_format=FORMAT, stop=["sun"])
    assert message["content"] == '{"'


@templates(OPENED)
async def test_reasoning_is_left_out_of_the_answer(mesh: Mesh) -> None:
    mesh.text = "Hm, so.</think>It rains."
    message, reason = await mesh.whole(include_reasoning=False)
    assert message["content"] == "It rains."
    assert message["reasoning"] is message["reasoning_content"] is None
    assert reason == "stop"
    bodies = [{"messages": USER, "include_reasoning": value} for value in (False, True)]
    answers = [await mesh.harness.json("ChatCompletions", body) for body in bodies]
    assert answers[0]["usage"] == answers[1]["usage"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.harness.post("Completions", {"prompt": "a", "include_reasoning": False})
    assert from_rpc_error(caught.value).param == "include_reasoning"


@templates(OPENED)
async def test_stop_strings_act_behind_the_reasoning(mesh: Mesh) -> None:
    mesh.text = "It is STOP here.</think>It rains. STOP It snows."
    message, reason = await mesh.whole(stop=["STOP"])
    assert (message["reasoning"], message["content"]) == ("It is STOP here.", "It rains. ")
    assert reason == "stop"
    mesh.text = "No end STOP"
    message, _ = await mesh.whole(stop=["STOP", "</think>"])
    assert message["reasoning"] == "No end STOP"
    texts = await mesh.harness.json(
        "Completions", {"prompt": "a", "stop": "STOP", "max_tokens": 100}
    )
    assert texts["choices"][0]["text"] == "No end "


@templates(OPENED)
async def test_stop_expressions_act_behind_the_reasoning(mesh: Mesh) -> None:
    mesh.text = "It is STOP here.</think>It rains. STOP It snows."
    message, reason = await mesh.whole(stop_regex="S.OP")
    assert (message["reasoning"], message["content"]) == ("It is STOP here.", "It rains. ")
    assert reason == "stop"
    message, _ = await mesh.whole(stop_regex="S.OP", stop="rains")
    assert (message["reasoning"], message["content"]) == ("It is STOP here.", "It ")


@templates(OPENED, OPENS_ITSELF)
async def test_either_calls_or_an_answer_of_a_schema(mesh: Mesh) -> None:
    """Where calls begin with a token of their own, it lifts the constraint."""
    is_opened = (await mesh.whole())[0] and mesh.prompt.endswith("<think>")
    thoughts = "Hm.</think>" if is_opened else ""
    mesh.text = f"{thoughts}<tool_call>\n{CALL}\n</tool_call>"
    message, reason = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert (message["content"], message["tool_calls"]) == (None, [call()])
    assert reason == "tool_calls"
    assert list(mesh.constraint.alternatives) == [token(mesh, "<tool_call>")]
    assert json.loads(mesh.constraint.json_schema) == ANSWER
    # An answer with such a text has no call.
    answer = json.dumps({"sunny": True, "x": f"<tool_call>{CALL}</tool_call>"})
    mesh.text = f"{thoughts}{answer}"
    message, reason = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert (message["content"], reason) == (answer, "stop")
    assert "tool_calls" not in message
    # Any constraint will do.
    mesh.text = f"{thoughts}yes"
    message, _ = await mesh.whole(tools=TOOLS, guided_choice=["yes", "no"])
    assert message["content"] == "yes"
    # Where calls are demanded the format has nothing to say.
    mesh.text = f"{thoughts}[{CALL}]"
    message, _ = await mesh.whole(tools=TOOLS, tool_choice="required", response_format=FORMAT)
    assert message["tool_calls"] == [call()]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await mesh.whole(tools=TOOLS, tool_choice="required", guided_choice=["yes", "no"])
    assert from_rpc_error(raised.value).param == "guided_choice"


def may_be(mesh: Mesh, text: str) -> bool:
    """Whether the last request's constraint allows a text."""
    given = Constraint(kind="structural_tag", text=mesh.constraint.structural_tag)
    return accepts(SOURCE.compile(given), text)


HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA_CALL = CALL.replace("arguments", "parameters")


@templates(PLAIN, LLAMA)
async def test_either_calls_or_an_answer_without_tokens(mesh: Mesh) -> None:
    """The mark of a call is plain text, or the call is JSON as the answer is."""
    await mesh.whole()
    called = LLAMA_CALL if mesh.prompt.endswith("?ipython") else HERMES_CALL
    answer = {"$ref": "#/$defs/a", "$defs": {"a": ANSWER}}
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": answer}}
    sunny = '{"sunny": true}'
    for fields, own in (
        ({"response_format": FORMAT}, sunny),
        ({"response_format": given}, sunny),
        ({"response_format": {"type": "json_object"}}, '{"name": "x", "parameters": {}}'),
        ({"response_format": {"type": "json_object"}}, '{"parameters": {}, "to": ["x"]}'),
        ({"guided_json": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]"),
        ({"guided_choice": ["yes", *map(str, range(300))]}, "299"),
        ({"guided_regex": "[a-z]+"}, "cloudy"),
    ):
        mesh.text = called
        message, reason = await mesh.whole(tools=TOOLS, **fields)
        assert (message["content"], message["tool_calls"]) == (None, [call()])
        assert reason == "tool_calls"
        stop = called.replace("get_weather", "stop").replace(ARGUMENTS, "{}")
        assert all(may_be(mesh, text) for text in (called, stop, own))
        assert not any(may_be(mesh, wrong) for wrong in ("", "Hm.", f" {own}", f"{own} {called}"))
        # What is wrong with a call may be right as the answer.
        is_any = called == LLAMA_CALL and "json_object" in str(fields)
        assert may_be(mesh, called.replace('"Köln"', "1")) == is_any
        mesh.text = own
        message, reason = await mesh.whole(tools=TOOLS, **fields)
        assert (message["content"], reason) == (own, "stop")
        assert "tool_calls" not in message
    # As many calls as the request allows.
    calls = f"{called}; {called}" if called == LLAMA_CALL else f"{called}\n{called}"
    mesh.text = calls
    message, _ = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert message["tool_calls"] == [call()] * 2
    assert may_be(mesh, calls)
    await mesh.whole(tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)
    assert may_be(mesh, called)
    assert not may_be(mesh, calls)
    # An answer with a tool's name, but without arguments.
    if called == LLAMA_CALL:
        mesh.text = '{"name": "get_weather", "sunny": true}'
        message, reason = await mesh.whole(tools=TOOLS, response_format={"type": "json_object"})
        assert (message["content"], reason) == (mesh.text, "stop")
    for wrong in ({"guided_json": "{"}, {"guided_grammar": 'root ::= "a"'}):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await mesh.whole(tools=TOOLS, **wrong)
        error = from_rpc_error(raised.value)
        assert (error.http_status, error.param) == (400, next(iter(wrong)))
    # Without tools, or with those that are not to be called, it is alone.
    await mesh.whole(tools=TOOLS, tool_choice="none", guided_choice=["a"])
    assert list(mesh.constraint.choice.choices) == ["a"]


@templates(PLAIN)
async def test_what_cannot_be_enforced_of_arguments_is_left_free_beside_an_answer(
    mesh: Mesh,
) -> None:
    """As without `response_format`: one tool's odd schema is no reason to refuse."""
    odd = {"type": "object", "properties": {"x": {"$dynamicRef": "#y"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    mesh.text = '{"sunny": true}'
    message, _ = await mesh.whole(tools=[*TOOLS, tool], response_format=FORMAT)
    assert message["content"] == mesh.text
    for text in (HERMES_CALL, HERMES_CALL.replace("get_weather", "odd"), mesh.text):
        assert may_be(mesh, text), text
    for before, after in (('"Köln"', "1"), ("get_weather", "other")):
        assert not may_be(mesh, HERMES_CALL.replace(before, after))


@templates(TAGS)
async def test_calls_of_tags_begin_with_their_mark_beside_an_answer(mesh: Mesh) -> None:
    mesh.text = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    message, reason = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert (message["tool_calls"], reason) == ([call("{}", "stop")], "tool_calls")
    assert all(may_be(mesh, text) for text in (mesh.text, '{"sunny": true}'))
    assert not any(may_be(mesh, text) for text in ("", "Hm.", "<tool", '{"sunny": 1}'))


@templates(HARMONY)
async def test_channels(mesh: Mesh) -> None:
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    called = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    mesh.text = f"{thoughts}<|channel|>final<|message|>It rains."
    message, _ = await mesh.whole()
    assert (message["reasoning"], message["content"]) == ("Hm.", "It rains.")
    mesh.text = f"{thoughts}{called}{ARGUMENTS}"
    message, reason = await mesh.whole(tools=TOOLS)
    assert (message["reasoning"], message["tool_calls"]) == ("Hm.", [call()])
    assert (message["content"], reason) == (None, "tool_calls")
    # The answer's channel is constrained, and no other one.
    expected = common_pb2.Constraint.Reasoning(
        end=[token(mesh, "<|channel|>"), *mesh.harness.ids("final")],
        until=token(mesh, "<|message|>"),
    )
    message, reason = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert (message["tool_calls"], reason) == ([call()], "tool_calls")
    assert mesh.constraint.reasoning == expected
    assert not mesh.constraint.alternatives
    mesh.text = f'{thoughts}{FINAL}{{"sunny": true}}'
    message, reason = await mesh.whole(tools=TOOLS, response_format=FORMAT)
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"sunny": true}')
    mesh.text = f"{thoughts}{FINAL}[{CALL}]"
    message, reason = await mesh.whole(tools=TOOLS, tool_choice="required")
    assert (message["tool_calls"], reason) == ([call()], "tool_calls")
    mesh.text = f"{thoughts}{FINAL}{ARGUMENTS}"
    message, _ = await mesh.whole(tools=TOOLS, tool_choice=NAMED)
    assert (message["tool_calls"], message["content"]) == ([call()], None)
    mesh.text = f"{thoughts}<|channel|>final<|message|>It rains. Hm. It snows."
    message, _ = await mesh.whole(stop=["Hm."])
    assert (message["reasoning"], message["content"]) == ("Hm.", "It rains. ")


@templates(OPENED)
async def test_the_typed_face_has_tools_beside_a_constraint(mesh: Mesh) -> None:
    mesh.text = f"Hm.</think><tool_call>{CALL}</tool_call>"
    request = gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="x")],
        tools=[gateway_pb2.Tool(name="get_weather")],
    )
    request.sampling.constraint.json_schema = json.dumps(ANSWER)
    (response,) = [one async for one in mesh.harness.typed.Chat(request)]
    (choice,) = response.choices
    assert (choice.reasoning, choice.text) == ("Hm.", "")
    assert [one.name for one in choice.tool_calls] == ["get_weather"]
    request.sampling.constraint.alternatives.append(1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        _ = [one async for one in mesh.harness.typed.Chat(request)]
    assert from_rpc_error(raised.value).param == "sampling.constraint.alternatives"


@templates(OPENED)
async def test_a_replayed_request_tells_its_marks_itself(mesh: Mesh) -> None:
    """A request log has them, and the prompt as tokens."""
    request = gateway_pb2.CompleteRequest(text="x")
    request.sampling.constraint.CopyFrom(
        common_pb2.Constraint(
            regex="[0-9]",
            reasoning=common_pb2.Constraint.Reasoning(begin=3, end=[4, 5], until=6),
            alternatives=[7],
        )
    )
    mesh.text = "y"
    assert [one async for one in mesh.harness.typed.Complete(request)]
    assert mesh.constraint == request.sampling.constraint
    for wrong in (
        common_pb2.Constraint(regex="a", alternatives=[1] * 17),
        common_pb2.Constraint(regex="a", alternatives=[1 << 30]),
        common_pb2.Constraint(regex="a", reasoning=common_pb2.Constraint.Reasoning()),
        common_pb2.Constraint(regex="a", reasoning=common_pb2.Constraint.Reasoning(end=[1 << 30])),
    ):
        request.sampling.constraint.CopyFrom(wrong)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [one async for one in mesh.harness.typed.Complete(request)]
        error = from_rpc_error(raised.value)
        assert error.http_status == 400
        assert error.param.startswith("sampling.constraint.")


@templates("{{ messages | tojson }}")
async def test_past_reasoning_and_refusals_reach_the_template(mesh: Mesh) -> None:
    mesh.text = "x"

    async def shown(message: dict[str, Any]) -> dict[str, Any]:
        await mesh.harness.json("ChatCompletions", {"messages": [*USER, message, *USER]})
        found: dict[str, Any] = json.loads(mesh.prompt)[1]
        return found

    for name in ("reasoning", "reasoning_content"):
        found = await shown({"role": "assistant", "content": "a", name: "Hm."})
        assert (found["reasoning"], found["reasoning_content"]) == ("Hm.", "Hm.")
    assert (await shown({"role": "assistant", "refusal": "No."}))["content"] == "No."
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]
    assert (await shown({"role": "assistant", "content": parts}))["content"] == "a\nNo."
    assert (await shown({"role": "assistant", "content": "a", "refusal": None}))["content"] == "a"


@templates(
    "{{ tools | length }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}{% endfor %}{% endfor %}"
)
async def test_a_template_that_joins_arguments_gets_them_as_text(mesh: Mesh) -> None:
    mesh.text = "x"
    past = {"role": "assistant", "tool_calls": [{"id": "1", **call()}]}
    await mesh.harness.json("ChatCompletions", {"messages": [*USER, past], "tools": TOOLS})
    assert mesh.prompt == f"2get_weather<｜tool▁sep｜>{ARGUMENTS}"


@templates("{% for m in messages %}{{ m.thinking }}|{% endfor %}{{ tools | length }}")
async def test_a_template_that_says_thinking_gets_the_reasoning_so(mesh: Mesh) -> None:
    mesh.text = "x"
    past = {"role": "assistant", "reasoning": "Hm."}
    calls = {"tool_calls": [{"id": "1", **call()}]}
    messages = [{**past, "content": "a"}, {**past, **calls}, {**past, **calls, "content": "a"}]
    await mesh.harness.json("ChatCompletions", {"messages": messages, "tools": TOOLS})
    assert mesh.prompt == "Hm.|Hm.||2"


@templates(
    "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}"
    "{% endfor %}{% endfor %}."
)
async def test_any_past_arguments_can_be_iterated(mesh: Mesh) -> None:
    mesh.text = "x"
    for arguments, shown in (
        ('{"a": 1, "b": "c', 'a=1;b="c";.'),
        ('{"a": 1}{"b": 2}', "a=1;b=2;."),
        ("[1, 2]", "arguments=[1, 2];."),
        ("null", "."),
        ("", "."),
        (None, "."),
        ("{", "."),
        ("x", 'arguments="x";.'),
        ("[" * 50_000, None),
        ('{"a":' * 50_000, None),
    ):
        past = {"role": "assistant", "tool_calls": [{"id": "1", **call()}]}
        past["tool_calls"][0]["function"]["arguments"] = arguments  # type: ignore[index]
        body = {"messages": [*USER, past], "max_tokens": 1}
        if shown is None:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await mesh.harness.json("ChatCompletions", body)
            assert from_rpc_error(raised.value).reason == "CONTEXT_LENGTH_EXCEEDED"
        else:
            await mesh.harness.json("ChatCompletions", body)
            assert mesh.prompt == shown


@templates("{{ tools | tojson }}{# <tool_call> #}")
async def test_only_allowed_tools_may_be_called(mesh: Mesh) -> None:
    def allowed(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}

    mesh.text = f"<tool_call>{CALL}</tool_call>"
    message, _ = await mesh.whole(tools=TOOLS, tool_choice=allowed("auto"))
    assert message["tool_calls"] == [call()]
    assert json.loads(mesh.prompt) == TOOLS[:1]
    mesh.text = f"[{CALL}]"
    message, reason = await mesh.whole(tools=TOOLS, tool_choice=allowed("required"))
    assert (message["tool_calls"], reason) == ([call()], "tool_calls")
    validator = Draft202012Validator(json.loads(mesh.constraint.json_schema))
    assert validator.is_valid(json.loads(mesh.text))
    assert not validator.is_valid([{"name": "stop", "arguments": {}}])


@templates(OPENED)
async def test_a_call_without_arguments_has_an_empty_object(mesh: Mesh) -> None:
    for written in ('{"name": "stop"}', '{"name": "stop", "arguments": null}'):
        mesh.text = f"</think><tool_call>{written}</tool_call>"
        message, _ = await mesh.whole(tools=TOOLS)
        assert message["tool_calls"] == [call("{}", "stop")]


@templates(AMBIGUOUS_NUMBERS)
async def test_chunks_of_tokens_without_text_have_an_empty_content(mesh: Mesh) -> None:
    """The token that ends a text has log-probabilities; clients expect a text in every chunk."""
    mesh.text = "Thought.</think>Sunny."
    events = await mesh.harness.events("ChatCompletions", {"messages": USER, "logprobs": True})
    choices = [choice for event in events for choice in event["choices"]]
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) > len("Sunny.") / 2
    for choice in choices[:-1]:
        assert choice["delta"].keys() & {"content", "reasoning"}
    assert choices[-1]["delta"] == {}
