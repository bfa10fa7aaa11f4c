"""Each format of tool calls and reasoning, as models write it: whole, and in any pieces."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from weft.contract.errors import InvalidRequest
from weft.contract.request import MAX_CONSTRAINT_BYTES, Constraint
from weft.engine.features.constraints.schema import prepare_schema
from weft.gateway.text.answer import AnswerParser, AnswerPart, TextParser, joined
from weft.gateway.text.answer.demand import blame_constraint, calls_or_answer
from weft.gateway.text.answer.formats import (
    CALLS_ONLY,
    DEEPSEEK_R1,
    FORMATS,
    GEMMA4_REASONING,
    HARMONY,
    HARMONY_REASONING,
    HERMES,
    MISTRAL_REASONING,
    QWEN3,
    REASONING_FORMATS,
    ReasoningFormat,
    ToolFormat,
    find_reasoning,
    find_tool_format,
)
from weft.gateway.text.answer.harmony import HarmonyParser
from weft.gateway.text.answer.reasoning_gate import ReasoningGate
from weft.testing.engine.constraint_texts import SOURCE, accepts

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
CITY = {"city": "Köln", "days": 2}
ONE = [("get_weather", CITY)]
TWO = [*ONE, ("stop", {})]

EXAMPLES: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "I look.",
        TWO,
    ),
    (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=stop>\n</function>\n</tool_call>",
        "I look.",
        TWO,
    ),
    (
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>stop\n</tool_call>",
        "I look.",
        TWO,
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>stop</tool_call>",
        "",
        TWO,
    ),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln'
        '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="stop">\n'
        "</invoke>\n</minimax:tool_call>",
        "I look.",
        TWO,
    ),
    (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        TWO,
    ),
    (
        "deepseek_v31",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Köln", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        TWO,
    ),
    (
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "I look.",
        TWO,
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Köln", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        TWO,
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}, '
        '{"name": "stop", "arguments": {}}]',
        "",
        TWO,
    ),
    (
        "mistral",
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]stop[ARGS]{}',
        "I look.",
        TWO,
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}, '
        '{"name": "stop", "arguments": {}}]',
        "",
        TWO,
    ),
    (
        "gemma4",
        'I look.<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>",
        "I look.",
        TWO,
    ),
    (
        "gemma4",
        '<|tool_call>call:f{a:[1,<|"|>x,}]<|"|>,{b:null}],<|"|>k:<|"|>:true,"j":"a\\"b",e:-1.5e2}'
        "<tool_call|>",
        "",
        [("f", {"a": [1, "x,}]", {"b": None}], "k:": True, "j": 'a"b', "e": -150.0})],
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}; '
        '{"name": "stop", "parameters": {}}',
        "",
        TWO,
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln", "days": 2}}',
        "",
        ONE,
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Köln", "days": 2}<|call|>'
        "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}<|call|>",
        "I look.",
        TWO,
    ),
    (
        "openai",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Köln", "days": 2}'
        "<|call|><|start|>assistant<|channel|>commentary to=functions.stop json<|message|>{}",
        "",
        TWO,
    ),
    # Without tags that models leave out.
    (
        "deepseek_v31",
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln", "days": 2} And so on.',
        "And so on.",
        ONE,
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Köln<parameter=days>2</function> So.",
        "So.",
        ONE,
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}} So.',
        "So.",
        ONE,
    ),
]


def make_parser(tools: ToolFormat | None, **options: Any) -> AnswerParser:
    if tools is not None and tools.is_harmony:
        return HarmonyParser(shows_calls=True)
    return TextParser(tools, schemas=SCHEMAS, **options)


def parse(parser: AnswerParser, text: str, cuts: list[int]) -> AnswerPart:
    """The whole answer of a text that comes in pieces."""
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    parts = [parser.push(piece) for piece in pieces[:-1]]
    parts.append(parser.push(pieces[-1], is_last=True))
    calls = [call for part in parts for call in part.calls]
    whole = joined(calls)
    assert [one.index for one in whole] == list(range(len(whole)))
    assert sum(bool(call.id) for call in calls) == len(whole)
    return AnswerPart(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        whole,
    )


def shown(part: AnswerPart) -> tuple[str, str, list[tuple[str, str]]]:
    return part.content, part.reasoning, [(one.name, one.arguments) for one in part.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), EXAMPLES, ids=[one[0] for one in EXAMPLES]
)
def test_what_models_write(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tools = FORMATS[name]
    whole = parse(make_parser(tools), text, [])
    assert whole.content == content
    assert [(one.name, json.loads(one.arguments)) for one in whole.calls] == calls
    by_characters = parse(make_parser(tools), text, list(range(1, len(text))))
    assert shown(by_characters) == shown(whole)


TYPED = [
    {
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "s": {"type": "string"},
                    "a": {"type": "array"},
                    "o": {"type": "object"},
                    "n": {"type": ["string", "null"]},
                }
            },
        }
    }
]
FAULTS: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>['u', True, None]</parameter>"
        "<parameter=o>{'k': (1, \"it's\")}</parameter></function></tool_call>",
        "",
        [("f", {"a": ["u", True, None], "o": {"k": [1, "it's"]}})],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>[None]</arg_value></tool_call>",
        "",
        [("f", {"a": [None]})],
    ),
    (
        "qwen3_coder",
        "I call.\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>",
        "I call.",
        [("f", {"s": "x"})],
    ),
    ("qwen3_coder", "I call. <function=f><parameter=s>x", "same", []),
    ("qwen3_coder", "Write <function=g></function> to call g.", "same", []),
    (
        "gemma4",
        "<|tool_call>call:f{s='it\\'s, {so}',a=[True, 'b'],'o':{k='v'}}<tool_call|>",
        "",
        [("f", {"s": "it's, {so}", "a": [True, "b"], "o": {"k": "v"}})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="s">x\n</parameter></invoke>'
        "</minimax:tool_call>",
        "",
        [("f", {"s": "x\n"})],
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>\nx\n</arg_value>\n</tool_call>",
        "",
        [("f", {"s": "\nx\n"})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
        '<｜DSML｜parameter name="s" string="true">x\n'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        "",
        [("f", {"s": "x\n"})],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">\n{"s": "x", "a": [1]}\n</｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "",
        [("f", {"s": "x", "a": [1]})],
    ),
    ("glm45", '<tool_call>f\n{"s": "x"}</tool_call>', "", [("f", {"s": "x"})]),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f">{"s": "x"}</invoke></minimax:tool_call>',
        "",
        [("f", {"s": "x"})],
    ),
    (
        "kimi_k2",
        "Hi <|tool_calls_section_begin|>so<|tool_calls_section_end|> it is",
        "Hi so it is",
        [],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"s": "x"}<|tool_call_end|><|tool_calls_section_end|>'
        "Done.<|tool_calls_section_end|> Bye.",
        "Done. Bye.",
        [("f", {"s": "x"})],
    ),
    ("llama3_json", '{"name": "Bob", "town": "Rome"}', "same", []),
    ("llama3_json", '{"name": "Bob", "parameters": {"s": "x"}} is Bob.', "same", []),
    ("llama3_json", '{"name": "f", "parameters": {"s": "x"}}', "", [("f", {"s": "x"})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"s": "x"\n</tool_call>\nAnd prose.',
        "And prose.",
        [("f", {"a": [1, {"s": "x"}]})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "x</tool_call> And "prose", it is.',
        'And "prose", it is.',
        [("f", {"s": "x"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "x</tool_call> y"}}</tool_call>',
        "",
        [("f", {"s": "x</tool_call> y"})],
    ),
    ("hermes", 'a <tool_call>{"name": "f", </tool_call> b', "same", []),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>Bye.",
        "Bye.",
        [("f", {"s": "x"})],
    ),
    (
        "granite",
        ' Hi \n <|tool_call|>[{"name": "f", "arguments": {}}] \n Bye. ',
        " Hi \n  \n Bye. ",
        [("f", {})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FAULTS, ids=range(len(FAULTS)))
def test_what_models_write_wrongly(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    for cuts in ([], list(range(1, len(text))), list(range(3, len(text), 3))):
        part = parse(TextParser(FORMATS[name], schemas=TYPED), text, cuts)
        assert part.content == (text if content == "same" else content)
        assert [(one.name, json.loads(one.arguments)) for one in part.calls] == calls


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n"),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">'),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="s" string="true">',
        ),
    ],
)
def test_arguments_in_tags_come_as_they_are_written(name: str, begin: str) -> None:
    parser = TextParser(FORMATS[name], schemas=TYPED)
    (head,) = joined(parser.push(begin).calls)
    assert (head.name, head.arguments) == ("f", '{"s": "')
    for text, shown_text in (
        ("once ", "once "),
        ('"upon"\t', '\\"upon\\"\\t'),
        ("a time", "a time"),
    ):
        (more,) = parser.push(text).calls
        assert more.arguments == shown_text


def test_kimi_gets_its_own_ids_again() -> None:
    _, text, _, _ = next(one for one in EXAMPLES if one[0] == "kimi_k2")
    calls = parse(make_parser(FORMATS["kimi_k2"]), text, []).calls
    assert [one.id for one in calls] == ["functions.get_weather:0", "functions.stop:1"]


def without_marks(tools: ToolFormat, text: str) -> str:
    """The text without the marks that its format hides."""
    marks = sorted(tools.tokens, key=len, reverse=True) if tools.hides_marks else []
    return re.sub("|".join(map(re.escape, marks)), "", text) if marks else text


@pytest.mark.parametrize("name", sorted({one[0] for one in EXAMPLES}))
def test_a_call_that_is_cut_is_content_or_has_the_arguments_so_far(name: str) -> None:
    """Wherever it is cut: what follows the name streams, all else is shown as it stands."""
    text, whole = next((one[1], one[3]) for one in EXAMPLES if one[0] == name)
    tools = FORMATS[name]
    for end in range(len(text)):
        part = parse(make_parser(tools), text[:end], [])
        for call, (function, arguments) in zip(part.calls, whole, strict=False):
            assert call.name == function
            written = json.dumps(arguments, ensure_ascii=False)
            assert written.startswith(call.arguments) or call.arguments == "{}"
        if not part.calls and not tools.is_harmony:
            assert part.content.rstrip() == without_marks(tools, text[:end]).rstrip()


REASONING: list[tuple[ReasoningFormat, bool, str, str, str]] = [
    (QWEN3, False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (QWEN3, True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (QWEN3, False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (QWEN3, False, "Yes, no tags.", "", "Yes, no tags."),
    (DEEPSEEK_R1, True, "<think>\nHm.\n</think>\nYes.", "Hm.", "Yes."),
    (MISTRAL_REASONING, False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (GEMMA4_REASONING, False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    (GEMMA4_REASONING, False, "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    (
        HARMONY_REASONING,
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
    ),
    (
        HARMONY_REASONING,
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final "
        "<|constrain|>json<|message|>Yes.<|return|>",
        "Hm.",
        "Yes.",
    ),
]


@pytest.mark.parametrize(
    ("form", "begins", "text", "reasoning", "content"), REASONING, ids=range(len(REASONING))
)
def test_reasoning(
    form: ReasoningFormat, begins: bool, text: str, reasoning: str, content: str
) -> None:
    for cuts in ([], list(range(1, len(text)))):
        parser: AnswerParser = HarmonyParser()
        if not form.is_harmony:
            parser = TextParser(None, reasoning=form, begins_reasoning=begins)
        part = parse(parser, text, cuts)
        assert (part.reasoning, part.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("form", "begins", "text", "reasoning", "content"), REASONING, ids=range(len(REASONING))
)
def test_stop_strings_count_behind_the_reasoning(
    form: ReasoningFormat, begins: bool, text: str, reasoning: str, content: str
) -> None:
    """The gate lets through all of the text, parted in front of the answer."""
    is_thinking = begins or text.lstrip().startswith(form.opener)
    for cuts in ([], list(range(1, len(text)))):
        gate, free, scanned = ReasoningGate(form, begins), "", ""
        bounds = [0, *cuts, len(text)]
        for begin, end in pairwise(bounds):
            before, behind = gate.push(text[begin:end], is_last=end == len(text))
            assert not (before and scanned)
            free, scanned = free + before, scanned + behind
        assert free + scanned == text
        assert scanned.lstrip().removesuffix("<|return|>") == content
        assert bool(free) == is_thinking


def test_odd_headers_of_harmony_are_shown() -> None:
    for text in (
        "plain",
        "<|channel|>",
        "<|channel|>final",
        "<|channel|><|channel|>x<|end|>",
        "<|start|>assistant<|channel|>commentary to=functions<|end|>",
        "<|message|>alone",
        "to=functions.f",
    ):
        part = parse(HarmonyParser(shows_calls=True), text, [])
        assert not part.calls
        kept = text.replace("<|end|>", "")
        assert part.content == kept
    built_in = "<|channel|>analysis to=browser.search<|message|>q<|call|>"
    assert parse(HarmonyParser(shows_calls=True), built_in, []).reasoning == "q"
    unnamed = "<|channel|>commentary to=functions...<|message|>{}<|call|>"
    part = parse(HarmonyParser(shows_calls=True), unnamed, [])
    assert (part.content, [one.name for one in part.calls]) in (("{}", []), ("", [".."]))
    without_tools = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parse(HarmonyParser(), without_tools, []).content == "{}"


def alphabet(tools: ToolFormat) -> list[str]:
    """Pieces of which texts of a format consist, and some of none."""
    examples = [text for name, text, _, _ in EXAMPLES if FORMATS[name] == tools]
    cut = [text[random.randrange(len(text)) :][: random.randint(1, 30)] for text in examples]
    return [
        *(*tools.tokens, *cut, "<think>", "</think>", "{", "}", "[", "]", ",", ";", '"', "\\", ":"),
        *("get_weather", "stop", "to=functions.f", "final", "analysis", "functions.f:0"),
        *(
            "{}",
            '{"a": 1}',
            '{"name": "f", "arguments": {"a": "</tool_call>"}}',
            "```json\n",
            "```",
        ),
        *("<function=f>", "</function>", "<parameter=a>", "</parameter>", '<invoke name="f">'),
        *("</invoke>", '<parameter name="a">', "call:f", "a:1", "1", " ", "\n", "x", "é", "🎉"),
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reasoning": QWEN3},
    {"reasoning": QWEN3, "begins_reasoning": True},
    {"is_answer_else": True},
]


@pytest.mark.parametrize(
    "num_texts",
    [2_000, pytest.param(200_000, marks=[pytest.mark.full, pytest.mark.timeout(7200)])],
)
@pytest.mark.parametrize(
    "tools",
    [*{id(one): one for one in FORMATS.values()}.values(), CALLS_ONLY],
    ids=lambda one: one.name,
)
def test_any_text_is_shown_or_parsed(tools: ToolFormat, num_texts: int) -> None:
    """Random texts of a format's own pieces: in any cuts the same, nothing raised, nothing lost."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random.seed(seed)
    for number in range(num_texts):
        if number % 20 == 0:
            pieces = alphabet(tools)
        text = "".join(random.choices(pieces, k=random.randint(1, 14)))
        options = random.choice(OPTIONS)
        whole = parse(make_parser(tools, **options), text, [])
        cuts = [random.randint(0, len(text)) for _ in range(random.randint(1, 9))]
        some = cuts if number % 4 else list(range(1, len(text)))
        part = parse(make_parser(tools, **options), text, some)
        assert shown(part) == shown(whole), (seed, text, some)
        for call in whole.calls:
            assert call.name
        is_last_open = not whole.calls or _is_json(whole.calls[-1].arguments)
        for call in whole.calls[:-1]:
            # What is streamed as it is written is found to be no JSON when it is too late.
            is_as_written = bool(call.arguments) and call.arguments in text
            assert _is_json(call.arguments) or is_as_written, (seed, text)
        assert is_last_open or tools is HARMONY or whole.calls[-1].arguments[0] == "{", (seed, text)
        if not whole.calls:
            told = "".join((whole.reasoning + whole.content).split())
            expected = text
            for mark in ("<think>", "</think>") if "reasoning" in options else ():
                expected = expected.replace(mark, "")
                told = told.replace(mark, "")
            if not tools.is_harmony:
                expected = without_marks(tools, "".join(expected.split()))
                assert without_marks(tools, told) == expected, (seed, text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except ValueError:
        return False
    return True


def test_no_word_is_lost_of_harmony() -> None:
    """Words between random marks: each is in the reasoning, the content or a call's arguments,
    but for those of well-formed headers.
    """
    seed = random.randrange(1 << 32)
    random.seed(seed)
    marks = [*HARMONY.marks, " to=functions.f", "analysis", "final", " "]
    for _ in range(500):
        text = "".join(
            f"w{number}w" if random.random() < 0.4 else random.choice(marks) for number in range(12)
        )
        part = parse(HarmonyParser(shows_calls=True), text, [])
        told = part.content + part.reasoning + "".join(one.arguments for one in part.calls)
        headers = "".join(found[1] for found in _HEADERS.finditer(text))
        for number in range(12):
            word = f"w{number}w"
            assert word not in text or word in told + headers, (seed, text)


_HEADERS = re.compile(
    r"(?=((?:<\|(?:start|channel)\|>| to=)[^<]*"
    r"(?:<\|(?:channel|constrain)\|>[^<]*){0,2}<\|message\|>))"
)
"""What may be a header, with the mark of the text behind it."""


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\n{{ x }}", "hermes", None),
        ("<think></think> <tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder", "qwen3"),
        ("</think><tool_call>{{ n }}\n<arg_key>", "glm45", "qwen3"),
        ("<minimax:tool_call> </think>", "minimax_m2", "qwen3"),
        ("<｜tool▁calls▁begin｜>function\n```json", "deepseek_v3", None),
        ("</think><｜tool▁calls▁begin｜>", "deepseek_v31", "qwen3"),
        ("<｜DSML｜function_calls></think>", "deepseek_v32", "qwen3"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("[THINK] [TOOL_CALLS]", "mistral", "mistral"),
        ("<|tool_call|>", "granite", None),
        ("<|channel>thought <|tool_call>call:", "gemma4", "gemma4"),
        ("<|channel|>analysis <|call|>", "openai", "openai_gptoss"),
        ("ipython", "llama3_json", None),
        ("{{ content }}", "hermes", None),
    ],
)
def test_templates_tell_the_formats(template: str, tools: str, reasoning: str | None) -> None:
    assert find_tool_format(template) is FORMATS[tools]
    expected = None if reasoning is None else REASONING_FORMATS[reasoning]
    assert find_reasoning(template) is expected


@pytest.mark.parametrize(
    "given",
    [
        {"$ref": "#/$defs/x"},
        {"type": "object", "properties": {"a": {"type": 5}}},
        {"properties": {"a": {"pattern": "("}}, "$defs": {"arguments-0": {}}},
    ],
)
def test_places_in_the_schema_of_an_answer_beside_calls_are_the_requests(given: Any) -> None:
    with pytest.raises(ValueError, match=r".") as alone:
        prepare_schema(json.dumps(given))
    answer = Constraint(kind="json_schema", text=json.dumps(given))
    with pytest.raises(ValueError, match=r".") as beside:
        SOURCE.compile(calls_or_answer(HERMES, SCHEMAS, answer, 1, "response_format"))
    error = InvalidRequest(str(beside.value), stage="compile", param="constraint")
    blame_constraint(error, "response_format")
    expected = ("response_format", f"response_format: {alone.value}")
    assert (error.param, error.message) == expected


def test_arguments_are_free_beside_an_answer_where_their_schemas_are_too_large() -> None:
    values = [f"{number:0>60}" for number in range(1500)]
    parameters = {"type": "object", "properties": {"x": {"enum": values}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = Constraint(kind="json_schema", text='{"type": "boolean"}')
    constraint = calls_or_answer(HERMES, [tool], answer, 1, "response_format")
    assert constraint.num_bytes <= MAX_CONSTRAINT_BYTES
    grammar = SOURCE.compile(constraint)
    assert accepts(grammar, '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    assert not accepts(grammar, '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>')
