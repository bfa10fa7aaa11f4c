"""Calls of tools whose parameters are tags, as Qwen3-Coder, GLM and MiniMax write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from weft.gateway.text.answer.call_reader import loads
from weft.gateway.text.answer.syntaxes import Collected, Tools

_MAX_DEPTH = 6
"""Most references and alternatives that are followed to a type."""


class TagSyntax(Collected):
    """A call of a name and a tag for each parameter.

    Values are texts. The value of a parameter that is no string by the tool's schema is read as
    JSON if it is valid JSON. So a call is returned once it is complete.

    Args:
        opener: See `Collected`.
        closer: See `Collected`.
        name: Regular expression of how a call begins, with a group `name`.
        parameter: Regular expression of a parameter, with groups `key` and `value`, and maybe
            `string`: "true" or "false", which then decides instead of the schema.
        leaves_closer: See `Collected`.
    """

    def __init__(
        self, *, opener: str, closer: str, name: str, parameter: str, leaves_closer: bool = False
    ) -> None:
        begin, one = re.compile(name), re.compile(parameter, re.DOTALL)
        super().__init__(opener, closer, partial(_parse, begin, one), leaves_closer)


def _parse(
    begin: re.Pattern[str], parameter: re.Pattern[str], text: str, tools: Tools
) -> tuple[str, Mapping[str, Any]]:
    found = begin.match(text)
    name = "" if found is None else found["name"].strip()
    if found is None or not name:
        raise ValueError("no name")
    schemas, whole = _parameters_of(tools, name)
    arguments = {}
    for one in parameter.finditer(text, found.end()):
        groups = one.groupdict()
        key, told = groups["key"].strip(), groups.get("string")
        if told is not None:
            of_schema = {"string"} if told == "true" else {"object"}
        else:
            of_schema = _types(schemas.get(key), whole)
        arguments[key] = _value(groups["value"], of_schema)
    return name, arguments


def _parameters_of(tools: Tools, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Schemas of a function's parameters, and the schema that they are in."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            whole = function.get("parameters") or {}
            schemas = whole.get("properties")
            if isinstance(schemas, Mapping):
                return schemas, whole
    return {}, {}


def _types(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """Types of a schema and its alternatives; each reference is followed once."""
    found: set[str] = set()
    followed: set[str] = set()
    level = [schema]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if not isinstance(one, Mapping):
                continue
            given = one.get("type")
            given = given if isinstance(given, list) else [given]
            found |= {kind for kind in given if isinstance(kind, str)}
            for name in ("anyOf", "oneOf"):
                branches = one.get(name)
                below += branches if isinstance(branches, list) else ()
            reference = one.get("$ref")
            if not isinstance(reference, str) or reference in followed:
                continue
            followed.add(reference)
            if reference.startswith("#/"):
                there: Any = whole
                for step in reference[2:].split("/"):
                    there = there.get(step) if isinstance(there, Mapping) else None
                below.append(there)
        level = below
    return found


def _value(text: str, types: set[str]) -> Any:
    """A parameter's value: a text unless its types say otherwise, without the line breaks next to
    its tags.
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
        return loads(bare.lower() if bare in ("True", "False") else bare)
    except ValueError:
        return text
