"""Reads a call of a tool whose parameters are tags, as Qwen3-Coder writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

OPENER, CLOSER = "<function=", "</function>"
_PARAMETER = re.compile(
    r"<parameter=([^>\n]{1,256})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
"""A parameter; its closing tag may be missing."""

_MAX_DEPTH = 6
"""Most references and alternatives that are followed to a type."""

Tools = Sequence[Mapping[str, Any]]
"""Tools that may be called, of OpenAI's form."""


class TaggedCallReader:
    """Reads one call: `<function=NAME>`, a `<parameter=NAME>VALUE</parameter>` each, `</function>`.

    Values are texts. Those of parameters that are no strings, by the tool's schema, are read as
    JSON where they are some. So a call is given once it is complete.

    Args:
        tools: The schemas.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.name = ""
        """Name of the function; empty: the call is not complete."""
        self.rest: str | None = None
        """Text behind the call; None: it has not ended."""
        self._pieces: list[str] = []
        self._end = ""
        """The last characters of the text before, in which the closing tag may have begun."""

    @property
    def text(self) -> str:
        """What was read."""
        return "".join(self._pieces)

    def push(self, text: str) -> str:
        """Takes more text, of which the first begins with the call; returns its arguments.

        Raises:
            ValueError: It has ended and has no name.
        """
        seen = self._end + text
        self._end = seen[1 - len(CLOSER) :]
        self._pieces.append(text)
        if CLOSER not in seen:
            return ""
        call, closer, rest = self.text.partition(CLOSER)
        self._pieces, self.rest = [call + closer], rest
        name, _, body = call.removeprefix(OPENER).partition(">")
        name = name.strip().strip("\"'")
        if not name or "\n" in name:
            raise ValueError("no name")
        types = _types_of(self._tools, name)
        arguments = {
            key.strip(): _value(value, types.get(key.strip()))
            for key, value in _PARAMETER.findall(body)
        }
        self.name = name
        return json.dumps(arguments, ensure_ascii=False)


def _types_of(tools: Tools, name: str) -> dict[str, set[str]]:
    """Types of a function's parameters that have some."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            whole = function.get("parameters") or {}
            schemas = whole.get("properties")
            if isinstance(schemas, Mapping):
                return {key: _types(one, whole, _MAX_DEPTH) for key, one in schemas.items()}
    return {}


def _types(schema: Any, whole: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    given = schema.get("type")
    found = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, whole, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        there: Any = whole
        for step in reference[2:].split("/"):
            there = there.get(step) if isinstance(there, Mapping) else None
        found |= _types(there, whole, depth - 1)
    return found


def _value(text: str, types: set[str] | None) -> Any:
    """A parameter's value: a text unless its types say otherwise, without the line breaks that
    stand beside its tags.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    bare = text.strip()
    if not types:
        return text
    if "null" in types and bare.lower() in ("null", "none"):
        return None
    if "string" in types:
        return text
    try:
        return json.loads(bare.lower() if bare in ("True", "False") else bare)
    except (ValueError, RecursionError):
        return text
