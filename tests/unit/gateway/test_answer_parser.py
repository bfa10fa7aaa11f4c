"""Answers taken apart: the same whatever pieces the text comes in, and nothing of it lost."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from weft.gateway.text.answer import AnswerParser, NamedCallParser, TextParser, joined
from weft.gateway.text.answer.formats import (
    CALLS_ONLY,
    FORMATS,
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    QWEN3,
    QWEN3_CODER,
    find_reasoning,
    find_tool_format,
)
from weft.gateway.text.answer.harmony import HarmonyParser

HARD = {"a": 'x</tool_call>"}{][', "b": [1, {"c": None}], "é": "\\", "": {"deep": [[["{"]]]}}
ARGUMENTS = json.dumps(HARD, ensure_ascii=False)
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
LLAMA = '{"name": "g.h-1", "parameters": {"q": 1}}'


@dataclass
class Parsed:
    """What became of a text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    has_called: bool = False


def parse(text: str, cuts: list[int], **options: Any) -> Parsed:
    parser = TextParser(**options)
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    parts = [parser.push(piece) for piece in pieces[:-1]]
    parts.append(parser.push(pieces[-1], is_last=True))
    calls = [call for part in parts for call in part.calls]
    assert [one.index for one in joined(calls)] == list(range(len(joined(calls))))
    # The first part of a call, and no other one, has its id and its name.
    assert all(bool(call.id) == bool(call.name) for call in calls)
    assert sum(bool(call.id) for call in calls) == len(joined(calls))
    return Parsed(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple((call.name, call.arguments) for call in joined(calls)),
        parser.has_called,
    )


def called(*calls: tuple[str, str], content: str = "", reasoning: str = "") -> Parsed:
    return Parsed(content, reasoning, calls, has_called=True)


def cut(*calls: tuple[str, str]) -> Parsed:
    return Parsed(calls=calls)


F = ("f", ARGUMENTS)
SCHEMAS = [
    {
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "b": {"anyOf": [{"type": "boolean"}, {"enum": [1]}]},
                    "o": {"type": "object"},
                    "n": {"type": ["string", "null"]},
                    "w": {"type": "number"},
                    "r": {"$ref": "#/$defs/days"},
                    "c": {"$ref": "#/properties/c"},
                },
                "$defs": {"days": {"type": "integer"}},
            },
        }
    },
    {"function": {"name": "g"}},
]
CASES: list[tuple[dict[str, Any], str, Parsed | None]] = [
    ({"tools": HERMES}, f"<tool_call>\n{CALL}\n</tool_call>", called(F)),
    (
        {"tools": HERMES},
        f'Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"arguments": {{"k": 1}}, '
        '"name": "g"}</tool_call>\n',
        called(F, ("g", '{"k": 1}'), content="Let me see."),
    ),
    ({"tools": HERMES}, '<tool_call>{"name": "f"}</tool_call>', called(("f", "{}"))),
    (
        {"tools": HERMES},
        '<tool_call>{"name": "f", "arguments": "{\\"k\\": 2}"}</tool_call>',
        called(("f", '{"k": 2}')),
    ),
    ({"tools": HERMES}, f"<tool_call>{CALL}", called(F)),
    ({"tools": HERMES, "max_calls": 1}, f"<tool_call>{CALL}</tool_call>" * 2, called(F)),
    # As smaller models write them.
    (
        {"tools": HERMES},
        'Hi <tool_call>{"name":"f","arguments":{"a":1}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call> bye',
        called(("f", '{"a":1}'), ("g", "{}"), content="Hibye"),
    ),
    ({"tools": HERMES}, f"<tool_call>[{CALL},\n{CALL}]</tool_call>", called(F, F)),
    (
        {"tools": HERMES},
        '<tool_call>{"arguments": {"a": "1\n2"}, "name": "f"}</tool_call>',
        called(("f", '{"a": "1\\n2"}')),
    ),
    (
        {"tools": HERMES},
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "\\ud83d"}</tool_call>',
        called(("\ufffd", '{"a": "\ufffd"}')),
    ),
    (
        {"tools": MISTRAL},
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}]',
        called(("f", "{}")),
    ),
    (
        {"tools": MISTRAL},
        f"Hm. [TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g.h-1[CALL_ID]a1B2c3D4e[ARGS] {{}}",
        called(F, ("g.h-1", "{}"), content="Hm."),
    ),
    ({"tools": MISTRAL}, f"[TOOL_CALLS] f[ARGS]\n{ARGUMENTS}\n", called(F)),
    ({"tools": MISTRAL, "max_calls": 1}, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}" * 2, called(F)),
    ({"tools": MISTRAL}, '[TOOL_CALLS]f[ARGS]{"a": 1', cut(("f", '{"a": 1'))),
    ({"tools": MISTRAL}, "[TOOL_CALLS]f[ARGS]", None),
    ({"tools": MISTRAL}, "[TOOL_CALLS]f[ARGS] no", None),
    ({"tools": MISTRAL}, "[TOOL_CALLS]f", None),
    ({"tools": MISTRAL}, "[TOOL_CALLS]no call [ARGS]{}", None),
    ({"tools": MISTRAL}, "[TOOL_CALLS]" + "f" * 400 + "[ARGS]{}", None),
    # Qwen3-Coder's.
    (
        {"tools": QWEN3_CODER, "schemas": SCHEMAS},
        "I look.\n\n<tool_call>\n<function=f>\n<parameter=s>\nTrue\n\n</parameter>\n"
        "<parameter=i>\n 7\n</parameter>\n<parameter=b>\nFalse\n</parameter>\n"
        '<parameter=o>\n{"a": [1, "}</x>"]}\n</parameter>\n<parameter=n>\nnull\n</parameter>\n'
        "<parameter=w>\nnot a number\n</parameter>\n<parameter=r>5</parameter>\n"
        "<parameter=c>\n6\n</parameter>\n<parameter=unknown>\n12\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        called(
            (
                "f",
                '{"s": "True\\n", "i": 7, "b": false, "o": {"a": [1, "}</x>"]}, "n": null, '
                '"w": "not a number", "r": 5, "c": "6", "unknown": "12"}',
            ),
            ("g", "{}"),
            content="I look.",
        ),
    ),
    (
        {"tools": QWEN3_CODER, "schemas": SCHEMAS},
        "<tool_call><function=f><parameter=i>1<parameter=s>a</function></tool_call> bye",
        called(("f", '{"i": 1, "s": "a"}'), content="bye"),
    ),
    ({"tools": QWEN3_CODER}, f"<tool_call>\n{CALL}\n</tool_call>", called(F)),
    ({"tools": QWEN3_CODER}, "<tool_call><function=></function></tool_call> x", None),
    (
        {"tools": QWEN3_CODER},
        "a <tool_call><function=f><parameter=s>1",
        Parsed("a", calls=(("f", '{"s": "1'),)),
    ),
    ({"tools": QWEN3_CODER}, "a <tool_call><func", None),
    # Cut off by a limit of tokens.
    ({"tools": HERMES}, '<tool_call>{"name": "f", "arguments": {"a": 1', cut(("f", '{"a": 1'))),
    ({"tools": HERMES}, '<tool_call>{"name": "f", "arguments": {}', cut(("f", "{}"))),
    ({"tools": CALLS_ONLY, "is_demanded": True}, '[{"name": "f', Parsed()),
    ({"tools": HERMES}, '<tool_call>{"name": "f"', Parsed('<tool_call>{"name": "f"')),
    # No calls.
    ({"tools": HERMES}, "a \n<tool_call> no </tool_call> b", None),
    ({"tools": HERMES}, 'a <tool_call>{"x": 1}</tool_call> b <tool', None),
    ({"tools": HERMES}, 'a <tool_call>{"name": "", "arguments": {}}</tool_call> bye', None),
    ({"tools": HERMES}, '<tool_call>{"name": 1, "arguments": {}}', None),
    ({"tools": HERMES}, '<tool_call>{"name": "f", "arguments": [1]}', None),
    ({"tools": HERMES}, "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000, None),
    ({"tools": HERMES}, " blanks at both ends \n", None),
    ({"tools": LLAMA3_JSON}, '{"foo": 1} and more', None),
    ({"tools": LLAMA3_JSON}, f" Hello {LLAMA}", None),
    ({"tools": LLAMA3_JSON}, "", None),
    ({"tools": MISTRAL}, "plain [TOOL", None),
    ({"tools": None}, f"<think>x</think><tool_call>{CALL}</tool_call>", None),
    ({"tools": MISTRAL}, f"[TOOL_CALLS] [{CALL}, {CALL}]", called(F, F)),
    ({"tools": MISTRAL}, f"So: [TOOL_CALLS][{CALL}]", called(F, content="So:")),
    ({"tools": LLAMA3_JSON}, f"{LLAMA}; {LLAMA}", called(*[("g.h-1", '{"q": 1}')] * 2)),
    ({"tools": LLAMA3_JSON}, f"<|python_tag|>{LLAMA}", called(("g.h-1", '{"q": 1}'))),
    ({"tools": CALLS_ONLY}, f" [{CALL},\n {CALL}]", called(F, F)),
    (
        {"tools": HERMES, "reasoning": QWEN3},
        f"\n<think>\n I hmm <tool_call>\n\n</think>\n\n<tool_call>{CALL}</tool_call>",
        called(F, reasoning="I hmm <tool_call>"),
    ),
    (
        {"tools": None, "reasoning": QWEN3},
        "<think>\n\n</think>\n\nHello </think>",
        Parsed("Hello </think>"),
    ),
    ({"tools": None, "reasoning": QWEN3}, "Hello <think>x</think>", None),
    ({"tools": None, "reasoning": QWEN3}, "<thin", None),
    (
        {"tools": None, "reasoning": QWEN3, "begins_reasoning": True},
        "so </thin\n</think>\n\nfour",
        Parsed("four", "so </thin"),
    ),
    # Of a text that the prompt began.
    ({"tools": None, "reasoning": QWEN3, "is_continued": True}, "\n <think>4</think>", None),
    (
        {"tools": None, "reasoning": QWEN3, "is_continued": True, "begins_reasoning": True},
        " is 4\n</think>\nFour",
        Parsed("Four", " is 4"),
    ),
    (
        {"tools": None, "reasoning": QWEN3},
        "<think>cut off ",
        Parsed("", "cut off "),
    ),
]


@pytest.mark.parametrize(("options", "text", "expected"), CASES, ids=range(len(CASES)))
def test_texts_are_taken_apart_wherever_they_are_cut(
    options: dict[str, Any], text: str, expected: Parsed | None
) -> None:
    expected = Parsed(text) if expected is None else expected
    assert parse(text, [], **options) == expected
    if len(text) < 1000:
        assert parse(text, list(range(len(text) + 1)), **options) == expected
    for _ in range(30):
        cuts = [random.randint(0, len(text)) for _ in range(random.randint(1, 12))]
        assert parse(text, cuts, **options) == expected, cuts


def test_arguments_come_as_they_are_written() -> None:
    parser = TextParser(HERMES)
    given = []
    for piece in ("<tool_call>{", '"name": "f", "arguments"', ': {"a', '": "b', '"}', "}"):
        part = parser.push(piece)
        assert part.content == ""
        given.append("".join(call.arguments for call in part.calls))
    assert given == ["", "", '{"a', '": "b', '"}', ""]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "' + "a" * 30_000,
        "a" + "\n" * 30_000,
        f"<tool_call>{CALL}" + "\n" * 30_000,
        "\n" * 30_000,
        "<" * 30_000,
        "<tool_call>" * 3_000,
        '<tool_call>{"name"' * 2_000,
        "<tool_call>" + '{"a":' * 6_000,
        "<tool_call>" * 1_000 + "<function=f><parameter=a>1</parameter></function>",
        "<tool_call><function=f></function>" * 1_000,
        "<tool_call><function=f>" + "<parameter=" * 2_500 + "</function>",
        "<tool_call><function=f><parameter=a>" + "<" * 30_000,
        "<tool_call><function=f>" + "<parameter=a>" * 2_500,
        "<function=f>" * 2_500,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 2_500,
        '<tool_call>{"name": "f", "arguments": ' + "</tool_call" * 2_500,
        "<|tool_calls_section_begin|>" * 1_000 + "<|tool_call_end|>" * 1_000,
        "[TOOL_CALLS]" + "a" * 30_000,
        "[TOOL_CALLS]" * 3_000,
        "[TOOL_CALLS]a[ARGS]" * 2_000,
        "<minimax:tool_call><invoke name=" * 1_000,
        "<tool_call>f<arg_key>" + "a</arg_key>" * 2_500 + "</tool_call>",
        "<|tool_call>call:f{" + "a:{" * 10_000 + "<tool_call|>",
        "<|channel|>" * 3_000,
        "<|channel|>analysis<|message|>" * 1_500,
        "<|channel|>" + "to=functions.f " * 2_000,
        "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 2_000,
    ],
    ids=range(27),
)
@pytest.mark.timeout(60)
def test_little_of_a_long_text_is_held(text: str) -> None:
    """What is held is looked at again with each piece, so the work grows with a text's length, not
    with its square. By all formats that find a mark of theirs in it.
    """
    for tools in {id(one): one for one in FORMATS.values()}.values():
        if tools.tokens and not any(mark in text for mark in (*tools.tokens, "aaaa", "\n\n")):
            continue
        parser: AnswerParser = TextParser(tools, reasoning=QWEN3)
        if tools is HARMONY:
            parser = HarmonyParser(shows_calls=True)
        for at in range(0, len(text), 2):
            parser.push(text[at : at + 2])
            assert len(parser._held) < 1000  # type: ignore[attr-defined]


def test_text_is_shown_as_soon_as_it_can_be_no_tag() -> None:
    parser = TextParser(HERMES, reasoning=QWEN3)
    shown = [parser.push(piece).content for piece in ("<", "th", "ird> a <to", "ol_bar ", "b")]
    assert shown == ["", "", "<third> a", " <tool_bar", " b"]


def test_the_arguments_of_one_function() -> None:
    parser = NamedCallParser("f", 9)
    (first,) = parser.push('{"a"').calls
    assert parser.push("").calls == []
    (second,) = parser.push(": 1}", is_last=True).calls
    assert (first.name, len(first.id), second.name, second.id) == ("f", 9, "", "")
    assert first.arguments + second.arguments == '{"a": 1}'
    assert not parser.has_called


def test_templates_tell_how_a_model_writes() -> None:
    assert find_tool_format("... <tool_call>\n{{ ... }}") is HERMES
    assert find_tool_format("<tool_call>\n<function=f>\n<parameter=p>") is QWEN3_CODER
    assert find_tool_format("{{ '[TOOL_CALLS] [' }}") is MISTRAL
    assert find_tool_format("{%- if message.role == 'ipython' %}") is LLAMA3_JSON
    assert find_tool_format("{{ message.content }}") is HERMES
    assert find_reasoning("{% set content = content.split('</think>')[-1] %}") is QWEN3
    assert not find_reasoning("{{ message.content }}")
