"""How models write calls of tools and their reasoning, told from their chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Where calls are in a text. Each is a JSON object with `name`, and `arguments` or
    `parameters`; or, with `has_bare_names`, the name, `[ARGS]` and the arguments.
    """

    name: str
    opener: str
    """Begins a call, or a list of calls. Empty: the text begins with one, or has none."""
    closer: str = ""
    """Ends a call; empty: its object does."""
    separators: str = ""
    """Characters that may stand between calls, beside blanks."""
    hidden_opener: str = ""
    """May stand before the first call where there is no `opener`."""
    has_bare_names: bool = False
    """Each call then has an `opener` of its own."""
    has_tags: bool = False
    """Calls may be tags instead (`weft.gateway.text.answer.tagged_call`)."""
    id_length: int = 24
    """Characters of a call's id; nine, which some chat templates check, are all of it."""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", separators="[,]")
"""Hermes, Qwen2.5 and Qwen3."""
QWEN3_CODER = ToolFormat(
    "qwen3_coder", "<tool_call>", "</tool_call>", separators="[,]", has_tags=True
)
"""Qwen3-Coder."""
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", separators="[,]", has_bare_names=True, id_length=9)
"""Mistral: lists of objects up to version 7 of its tokenizer, bare names from version 11 on."""
LLAMA3_JSON = ToolFormat("llama3_json", "", separators=";", hidden_opener="<|python_tag|>")
"""Llama 3.1 and later, its JSON calls."""
CALLS_ONLY = ToolFormat("calls", "", separators="[,]", hidden_opener="[")
"""A text that a constraint made a list of calls."""

FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (HERMES, QWEN3_CODER, MISTRAL, LLAMA3_JSON)
}


def find_tool_format(template: str) -> ToolFormat:
    """The format that a chat template teaches; Hermes' where it teaches none, for then the gateway
    describes the tools itself (`weft.gateway.text.answer.describe`).
    """
    if HERMES.opener in template:
        return QWEN3_CODER if "<parameter=" in template else HERMES
    if "TOOL_CALLS" in template:
        return MISTRAL
    return LLAMA3_JSON if "ipython" in template else HERMES


def find_reasoning(template: str) -> bool:
    """Whether models of this chat template write their reasoning between think tags."""
    return END_THINK in template
