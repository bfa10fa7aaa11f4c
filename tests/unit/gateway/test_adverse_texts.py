"""Texts written to cost much time or a deep stack. Where time would grow with the square of a text,
its size here would take minutes.
"""

from __future__ import annotations

import json
import random

import pytest
from weft.gateway.api.tools import past_call
from weft.gateway.text.answer import TextParser, joined
from weft.gateway.text.answer.call_reader import CallReader
from weft.gateway.text.answer.formats import HERMES, QWEN3, QWEN3_CODER
from weft.gateway.text.answer.harmony import HarmonyParser
from weft.gateway.text.answer.reasoning_gate import ReasoningGate


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "name", [" " * 100_000, "f" + " " * 100_000 + "g", '" ' * 50_000, '"' * 99_999]
)
def test_a_long_name_of_a_function(name: str) -> None:
    text = f"<tool_call><function={name}\n!</function></tool_call>"
    part = TextParser(QWEN3_CODER).push(text, is_last=True)
    assert (part.calls, part.content) == ([], text)


def test_types_that_references_lead_to_in_many_ways() -> None:
    """Each way alone would take minutes."""
    first, second = ({"anyOf": [{"$ref": f"#/d/{name}"}] * 20_000} for name in "ab")
    whole = {"properties": {"p": first}, "d": {"a": second, "b": {"type": ["null", "array"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": whole}}]
    text = "<tool_call><function=f><parameter=p>[1]</parameter></function></tool_call>"
    (call,) = TextParser(QWEN3_CODER, schemas=tools).push(text, is_last=True).calls
    assert json.loads(call.arguments) == {"p": [1]}


def test_names_between_blanks_and_quotes() -> None:
    rng = random.Random(4)
    for _ in range(300):
        name = "".join(rng.choices("fg \t'\"", k=rng.randrange(6)))
        blanks = ["".join(rng.choices(" \n\t", k=rng.randrange(3))) for _ in range(2)]
        name = name.strip(" \t'\"")
        quote = rng.choice(("", "'", '"'))
        text = f"<tool_call><function={blanks[0]}{quote}{name}{quote}{blanks[1]}></function>"
        calls = TextParser(QWEN3_CODER).push(text + "</tool_call>", is_last=True).calls
        assert [call.name for call in calls] == ([name] if name else [])


def test_an_endless_header_of_harmony() -> None:
    blanks = " " * 490
    text = f"<|start|>{blanks}!<|message|>x<|end|>" * 20
    parser = HarmonyParser(shows_calls=True)
    shown = [parser.push(character).content for character in text]
    assert blanks in "".join(shown)
    header = "<|start|>assistant<|channel|>  to=functions.f  json<|message|>{}<|call|>"
    (call,) = joined(HarmonyParser(shows_calls=True).push(header, is_last=True).calls)
    assert (call.name, call.arguments) == ("f", "{}")


def test_endless_blanks_before_the_reasoning() -> None:
    gate, blanks = ReasoningGate(QWEN3, begins_reasoning=False), " \n" * 500_000
    assert all(gate.push(blank) == ("", "") for blank in blanks)
    assert gate.push("<think>a</think>b") == (f"{blanks}<think>a</think>", "b")
    gate = ReasoningGate(QWEN3, begins_reasoning=False)
    assert [gate.push(piece) for piece in (" ", "<th", "x")] == [("", ""), ("", ""), ("", " <thx")]


def test_many_objects_as_the_arguments_of_a_past_call() -> None:
    text = "".join(f'{{"a{number}":1}} , ' for number in range(400_000))
    assert len(past_call("", "f", text)["function"]["arguments"]) == 400_000
    assert past_call("", "f", '{"a":1}\n,{"b":2}, ')["function"]["arguments"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("depth", [*range(900, 1000), 100_000])
def test_calls_that_are_nested_too_deeply_are_content(depth: int) -> None:
    for arguments in (f'{{"a":{deep(depth)}}}', json.dumps(f'{{"a":{deep(depth)}}}')):
        call = f'{{"arguments":{arguments},"name":"f"}}'
        text = f"<tool_call>{call}</tool_call>"
        part = TextParser(HERMES).push(text, is_last=True)
        assert bool(part.calls) != bool(part.content)
        if depth == 100_000:
            assert part.content == text
            with pytest.raises(ValueError, match="too deeply nested"):
                CallReader().push(call)


def test_past_arguments_that_are_nested_too_deeply_are_text() -> None:
    given = f'{{"a":{deep(100_000)}}}'
    assert past_call("", "f", given)["function"]["arguments"] == {"arguments": given}
