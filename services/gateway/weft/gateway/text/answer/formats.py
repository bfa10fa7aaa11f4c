"""How models write tool calls and reasoning, recognised by their chat templates.

A format is an entry here: the marks that open and close calls, and the syntaxes of a call
(`weft.gateway.text.answer.syntaxes`). Names are vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.gateway.text.answer.gemma_call import parse_gemma
from weft.gateway.text.answer.syntaxes import Collected, JsonObject, NamedJson, Syntax
from weft.gateway.text.answer.tagged_call import TagSyntax

THINK, END_THINK = "<think>", "</think>"
_HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>"),
    *("<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Where calls are in a text, and how they are written.

    ```
    text OPENER separator CALL tail separator CALL tail CLOSER text
    ```
    """

    name: str
    openers: tuple[str, ...]
    """Marks that begin calls or lists of calls; empty: the text begins with a call, or has none."""
    syntaxes: tuple[Syntax, ...] = (JsonObject(),)
    """How a call may be written; the first one that fits reads it."""
    closer: str = ""
    """Mark that ends a call or a list of calls, and may be missing; empty: the call ends itself."""
    separators: tuple[str, ...] = ()
    """Texts, apart from blanks, that may come before a call."""
    tails: tuple[str, ...] = ()
    """Texts, apart from blanks, that may follow a call."""
    beginnings: tuple[str, ...] = ()
    """Beginnings of a text with calls, for formats without `openers`."""
    id_length: int = 24
    """Random characters of a call's id. An id of nine, which some chat templates check, has no
    prefix.
    """
    arguments: str = "arguments"
    """Name of the arguments in calls that are JSON objects."""
    is_harmony: bool = False
    """Calls are messages to functions (`weft.gateway.text.answer.harmony`)."""
    bare_openers: tuple[str, ...] = ()
    """Beginnings of calls that count without an opener too, if they are complete calls of a
    tool.
    """
    hides_marks: bool = False
    """Marks that belong to no call after all are left out; otherwise they are content."""
    keeps_blanks: bool = False
    """Blanks next to a call are content; otherwise they are left out."""
    marks: tuple[str, ...] = ()
    """Further texts that identify calls or their values, and may be special tokens."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All texts by which calls are recognised; special tokens among them must be shown."""
        own = (*self.openers, self.closer, *self.separators, *self.tails, *self.beginnings)
        return tuple(one for one in (*own, *self.marks) if one)

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that end a call whose own end is missing."""
        return tuple(one for one in (self.closer, *self.tails, *self.openers) if one)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Where the reasoning is that a text may begin with."""

    name: str
    opener: str
    """Mark that begins the reasoning, unless the prompt has it already."""
    closer: str
    """Mark that ends the reasoning."""
    end: str = ""
    """The answer begins after this mark and the next `until`; empty: after `closer`."""
    until: str = ""
    always_begins: bool = False
    """Whether the text begins with reasoning even without `opener`."""
    is_harmony: bool = False
    """Reasoning is a channel (`weft.gateway.text.answer.harmony`)."""

    @property
    def opening_token(self) -> str:
        """The part of `opener` that may be a single token."""
        return self.opener.removesuffix("thought")

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.opening_token, self.closer, *(_HARMONY_MARKS if self.is_harmony else ()))


_JOINTS, _TAILS = ("[", ","), ("]",)
"""Separators and tails of formats that may have lists of JSON objects."""
_NAME = r"(?P<name>[\w.-]{1,256})"

HERMES = ToolFormat(
    "hermes", ("<tool_call>",), closer="</tool_call>", separators=_JOINTS, tails=_TAILS
)
"""Hermes, Qwen2.5, Qwen3, Granite 4."""
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    ("<tool_call>",),
    (
        JsonObject(),
        TagSyntax(
            opener="<function=",
            closer="</function>",
            # A quote or blanks at the end of the name do not belong to it.
            name=r"<function=\s*+[\"']?+"
            r"(?P<name>(?:[^>\s\"']++|[\"'](?!\s*+>)|[^\S\n]++(?=[^>\s]))*+)[\"']?+\s*+>",
            parameter=r"<parameter=(?P<key>[^<>\n]{1,256})>",
            ends=("</parameter>", "<parameter="),
            has_line_breaks=True,
        ),
    ),
    closer="</tool_call>",
    bare_openers=("<function=",),
    separators=_JOINTS,
    tails=_TAILS,
)
"""Qwen3-Coder, Qwen3.5 and its successors, Nemotron 3."""
GLM45 = ToolFormat(
    "glm45",
    ("<tool_call>",),
    (
        JsonObject(),
        TagSyntax(
            opener="",
            closer="</tool_call>",
            leaves_closer=True,
            name=rf"{_NAME}\s*+",
            parameter=r"<arg_key>(?P<key>[^<]{1,256})</arg_key>\s{0,64}<arg_value>",
            ends=("</arg_value>", "<arg_key>"),
        ),
    ),
    closer="</tool_call>",
    marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""GLM-4.5 to GLM-5: with line breaks between the tags, or without."""
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    ("<minimax:tool_call>",),
    (
        TagSyntax(
            opener="<invoke",
            closer="</invoke>",
            name=r"<invoke\s+name=[\"']?(?P<name>[^\"'>\n]{1,256})[\"']?\s*>",
            parameter=r"<parameter\s{1,64}name=[\"']?(?P<key>[^\"'<>\n]{1,256})[\"']?\s{0,64}>",
            ends=("</parameter>", "<parameter name="),
        ),
    ),
    closer="</minimax:tool_call>",
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    (NamedJson(rf"(?:function)?\s*<｜tool▁sep｜>\s*{_NAME}\s*```(?:json)?\s*"),),
    closer="<｜tool▁calls▁end｜>",
    separators=("<｜tool▁call▁begin｜>",),
    tails=("```", "<｜tool▁call▁end｜>"),
    marks=("<｜tool▁sep｜>",),
)
"""DeepSeek V3 and R1: the name, then a block of JSON."""
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    DEEPSEEK_V3.openers,
    (NamedJson(rf"{_NAME}\s*<｜tool▁sep｜>\s*"),),
    closer=DEEPSEEK_V3.closer,
    separators=DEEPSEEK_V3.separators,
    tails=("<｜tool▁call▁end｜>",),
    marks=DEEPSEEK_V3.marks,
)
DEEPSEEK_V32 = ToolFormat(
    "deepseek_v32",
    ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    (
        TagSyntax(
            opener="<｜DSML｜invoke",
            closer="</｜DSML｜invoke>",
            name=r"<｜DSML｜invoke\s+name=\"(?P<name>[^\">\n]{1,256})\"\s*>",
            parameter=r"<｜DSML｜parameter\s{1,64}name=\"(?P<key>[^\"<>\n]{1,256})\""
            r"(?:\s{1,64}string=\"(?P<string>true|false)\")?\s{0,64}>",
            ends=("</｜DSML｜parameter>",),
        ),
    ),
    closer="</｜DSML｜function_calls>",
    tails=("</｜DSML｜tool_calls>",),
    marks=("｜DSML｜",),
)
"""DeepSeek V3.2."""
KIMI_K2 = ToolFormat(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    (
        NamedJson(
            r"(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,256}?)(?::\d{1,9})?)"
            r"\s*<\|tool_call_argument_begin\|>\s*"
        ),
    ),
    closer="<|tool_calls_section_end|>",
    separators=("<|tool_call_begin|>",),
    tails=("<|tool_call_end|>", "<|tool_call_section_end|>"),
    marks=("<|tool_call_argument_begin|>",),
    hides_marks=True,
)
"""Kimi K2. A call's id is the model's, `functions.NAME:NUMBER`, which it expects to see again."""
MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    (JsonObject(), NamedJson(rf"{_NAME}(?:\[CALL_ID\]\w{{0,64}})?\[ARGS\]\s*")),
    separators=_JOINTS,
    tails=_TAILS,
    id_length=9,
    marks=("[ARGS]", "[CALL_ID]"),
)
"""Mistral: lists of objects up to version 7 of its tokenizer, bare names from version 11 on."""
GRANITE = ToolFormat(
    "granite",
    ("<|tool_call|>", "<tool_call>"),
    closer="</tool_call>",
    separators=_JOINTS,
    tails=_TAILS,
    keeps_blanks=True,
)
"""Granite 3."""
GEMMA4 = ToolFormat(
    "gemma4",
    ("<|tool_call>",),
    (Collected("call:", "<tool_call|>", parse_gemma, leaves_closer=True),),
    closer="<tool_call|>",
    marks=('<|"|>',),
)
"""Gemma 4: an object with bare keys whose texts are between special marks."""
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    (),
    (JsonObject(names_decide=True),),
    separators=(";", "<|python_tag|>"),
    beginnings=("{", "<|python_tag|>"),
    arguments="parameters",
)
"""Llama 3.1 and later, its JSON calls."""
HARMONY = ToolFormat(
    "openai",
    (),
    is_harmony=True,
    marks=_HARMONY_MARKS,
)
"""gpt-oss."""
CALLS_ONLY = ToolFormat("calls", (), separators=_JOINTS, tails=_TAILS, beginnings=("{", "["))
"""A text that a constraint has made a list of calls."""

FORMATS: Mapping[str, ToolFormat] = {
    **{
        one.name: one
        for one in (
            *(HERMES, QWEN3_CODER, GLM45, MINIMAX_M2, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32),
            *(KIMI_K2, MISTRAL, GRANITE, GEMMA4, LLAMA3_JSON, HARMONY),
        )
    },
    "qwen3_xml": QWEN3_CODER,
    "glm47": GLM45,
}

_TEMPLATE_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    (r"<\|call\|>", HARMONY),
    (r"<\|tool_call>", GEMMA4),
    ("<minimax:tool_call>", MINIMAX_M2),
    (r"<\|tool_calls_section_begin\|>", KIMI_K2),
    ("｜DSML｜", DEEPSEEK_V32),
    (r"<｜tool▁calls▁begin｜>[\s\S]*```json", DEEPSEEK_V3),
    ("<｜tool▁calls▁begin｜>", DEEPSEEK_V31),
    ("<arg_key>", GLM45),
    (r"<tool_call>[\s\S]*<parameter=|<parameter=[\s\S]*<tool_call>", QWEN3_CODER),
    ("<tool_call>", HERMES),
    ("TOOL_CALLS", MISTRAL),
    (r"<\|tool_call\|>", GRANITE),
    ("ipython", LLAMA3_JSON),
)
"""Texts in chat templates that identify a format; the first one found decides."""

QWEN3 = ReasoningFormat("qwen3", THINK, END_THINK)
"""Think tags: most models. The prompt may have opened them."""
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", THINK, END_THINK, always_begins=True)
GLM45_REASONING = ReasoningFormat("glm45", THINK, END_THINK)
MINIMAX_M2_REASONING = ReasoningFormat("minimax_m2", THINK, END_THINK, always_begins=True)
MISTRAL_REASONING = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
GEMMA4_REASONING = ReasoningFormat("gemma4", "<|channel>thought", "<channel|>")
HARMONY_REASONING = ReasoningFormat(
    "openai_gptoss",
    "<|channel|>analysis",
    "<|end|>",
    end="<|channel|>final",
    until="<|message|>",
    is_harmony=True,
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **{
        one.name: one
        for one in (
            *(QWEN3, DEEPSEEK_R1, GLM45_REASONING, MINIMAX_M2_REASONING, MISTRAL_REASONING),
            *(GEMMA4_REASONING, HARMONY_REASONING),
        )
    },
    "think": QWEN3,
}


def find_tool_format(template: str) -> ToolFormat:
    """The format that a chat template teaches. Where it teaches none, Hermes', in which the gateway
    describes the tools itself (`weft.gateway.text.answer.describe`).
    """
    found = (form for mark, form in _TEMPLATE_MARKS if re.search(mark, template))
    return next(found, HERMES)


def find_reasoning(template: str) -> ReasoningFormat | None:
    """How models of this chat template write their reasoning; None: they write none."""
    marks = (
        ("<|channel|>", HARMONY_REASONING),
        ("<|channel>", GEMMA4_REASONING),
        (END_THINK, QWEN3),
        ("[THINK]", MISTRAL_REASONING),
    )
    return next((form for mark, form in marks if mark in template), None)
