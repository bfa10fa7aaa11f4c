"""Tools as clients give them, for both faces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json
from weft.contract.request import Constraint
from weft.gateway.request import Calls
from weft.gateway.text.answer.call_reader import encodable, parse_json
from weft.gateway.text.answer.demand import (
    ALL_TOOLS,
    demanded_arguments,
    demanded_calls,
    parameters_of,
)
from weft.gateway.validate import MAX_TOOLS, check_range, invalid

_BEHIND = re.compile(r"[^ \t\r\n,]")
"""Text that follows an object of a past call's arguments."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Tool = Mapping[str, Any]


class ToolUse(NamedTuple):
    """The calls that an answer may contain, by the request's choice of tools."""

    calls: Calls | None
    """Calls that the answer may have; None: it has none."""
    constraint: Constraint | None
    """Constraint that makes the answer consist of calls; None: it need not."""
    param: str = ALL_TOOLS
    """The field that the constraint comes from."""


NO_TOOLS = ToolUse(None, None)


def check_tools(tools: Sequence[tuple[int, Tool]]) -> tuple[Tool, ...]:
    """Checks the names of tools in OpenAI's form, each with its place in the body. Raises
    InvalidRequest if there are too many tools, or a name is not valid or occurs twice.
    """
    check_range("tools", len(tools), 0, MAX_TOOLS, "tools")
    known: set[str] = set()
    for number, tool in tools:
        name, param = tool["function"]["name"], f"tools[{number}].function.name"
        if not _NAME.fullmatch(name):
            raise invalid(param, f"{name[:80]!r} is not 1 to 64 letters, digits, _, - or .")
        if name in known:
            raise invalid(param, f"two tools are called {name!r}")
        known.add(name)
    return tuple(tool for _, tool in tools)


def only_tools(tools: Sequence[Tool], names: Sequence[str]) -> tuple[Tool, ...]:
    """The tools that a choice allows; the model is shown no others. Raises InvalidRequest if there
    is no tool of such a name.
    """
    known = {tool["function"]["name"] for tool in tools}
    for number, name in enumerate(names):
        if name not in known:
            where = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise invalid(where, f"no tool is called {name[:80]!r}")
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def use_tools(
    tools: Sequence[Tool], choice: str, *, is_named: bool = False, most: int | None = None
) -> ToolUse:
    """The calls that an answer may have. Raises InvalidRequest if the choice needs tools that are
    not there.

    Args:
        tools: Tools that the model is shown; empty: none.
        choice: "none", "auto" or "required"; with `is_named` a function's name.
        most: Most calls; None: any number.
    """
    if is_named:
        for number, tool in enumerate(tools):
            if tool["function"]["name"] == choice:
                _check_parameters(number, tool)
                calls = Calls(name=choice, is_demanded=True)
                return ToolUse(calls, demanded_arguments(tool), parameters_of(number))
        raise invalid("tool_choice", f"no tool is called {choice[:80]!r}")
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "required, but there are no tools")
        for number, tool in enumerate(tools):
            _check_parameters(number, tool)
        return ToolUse(Calls(is_demanded=True, most=most), demanded_calls(tools, most))
    if choice == "none" or not tools:
        return NO_TOOLS
    return ToolUse(Calls(most=most), None)


def _check_parameters(number: int, tool: Tool) -> None:
    kind = (tool["function"].get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise invalid(f"{parameters_of(number)}.type", f'must be "object", not {str(kind)[:80]!r}')


def past_call(id_: str, name: str, arguments: object) -> dict[str, Any]:
    """A call of an earlier message in the form that chat templates take, with an object as
    `arguments`. An empty `id_` means none. Arguments other than a JSON object, or a text with one,
    are made an object, since a conversation must go on whatever a model wrote in it.
    """
    given_id = {"id": id_} if id_ else {}
    function = {"name": name, "arguments": _past_arguments(arguments)}
    return {**given_id, "type": "function", "function": function}


def _past_arguments(given: object) -> dict[str, Any]:
    """Of a text that was cut off it keeps the complete members. Several objects are merged, later
    members replacing earlier ones. Anything else becomes the single member `arguments`.
    """
    text = given if isinstance(given, str) else ""
    if isinstance(given, str):
        try:
            given = _read_past(text)
        except (ValueError, RecursionError):
            given = text
    if given is None or given == "":
        return {}
    found = given if isinstance(given, dict) else {"arguments": given}
    try:
        written = json.dumps(found, ensure_ascii=False)
        # Tokenizers refuse lone surrogates, which JSON's escapes can name.
        return found if written.isascii() else dict(json.loads(encodable(written)))
    except (ValueError, RecursionError):
        return {"arguments": encodable(text)}


def _read_past(text: str) -> object:
    """Merges several objects, and completes a value that was cut off. Raises ValueError if the text
    has no value, or more text after it.
    """
    text = text.strip()
    if not text:
        return None
    decoder, at = json.JSONDecoder(strict=False), 0
    objects: dict[str, Any] = {}
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            # The text was cut off, unless it is no JSON at all.
            value, end = from_json(text[at:].encode(), allow_partial="trailing-strings"), len(text)
        if not isinstance(value, dict):
            if at or end < len(text):
                raise ValueError("more than one value")
            return value
        objects |= value
        more = _BEHIND.search(text, end)
        at = len(text) if more is None else more.start()
    return objects


def json_object(text: str, param: str) -> dict[str, Any]:
    """The JSON object that a field contains as text. Raises InvalidRequest if it contains something
    else.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise invalid(param, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(param, "is not a JSON object")
    return value
