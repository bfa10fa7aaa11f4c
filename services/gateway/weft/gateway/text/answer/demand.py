"""The constraint under which an answer is the calls that a request demands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.engine.errors import WeftError
from weft.engine.request import Constraint

ALL_TOOLS = "tools"
"""The field that a constraint made of all tools is blamed on, where no tool is at fault alone."""
_IN_ARGUMENTS = re.compile(r"([$#])(?:\.\$defs\.|\['\$defs'\]\['|/\$defs/)arguments-(\d+)(?:'\])?")
"""Places within a tool's arguments, as errors of schemas write them: paths of two forms, and
references.
"""
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name, and so may have any name."""
_OF_VALUES = ("const", "enum")
_OF_READERS = ("title", "description", "examples", "default", "$comment")
"""Keywords that enforce nothing, and would count as a part of the constraint."""
_OF_TYPES = ("properties", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords by which a schema without `type` is one of objects, or is taken as it is."""


def demanded_calls(tools: Sequence[Mapping[str, Any]], most: int | None) -> Constraint:
    """A list of one or more calls, as `weft.gateway.text.answer.formats.CALLS_ONLY` has them.

    Args:
        tools: Those that may be called, of OpenAI's form.
        most: Most calls; None: any number.
    """
    branches, arguments = [], {}
    for number, tool in enumerate(tools):
        function, place = tool["function"], f"arguments-{number}"
        # Apart, for references into it: the grammar compiler follows none through a list.
        arguments[place] = _arguments(function, f"#/$defs/{place}")
        branches.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": branches},
        "$defs": arguments,
    }
    if most is not None:
        schema["maxItems"] = most
    return _constraint(schema)


def demanded_arguments(tool: Mapping[str, Any]) -> Constraint:
    """The arguments of one function."""
    return _constraint(_arguments(tool["function"], "#"))


def parameters_of(number: int) -> str:
    """The field of a tool that its arguments are enforced by."""
    return f"tools[{number}].function.parameters"


def blame_constraint(error: WeftError, param: str) -> None:
    """Names the field at fault, and the place within it, where a worker refused a constraint.

    Args:
        error: The worker's.
        param: The field that the constraint is of.
    """
    if param == ALL_TOOLS and (place := _IN_ARGUMENTS.search(error.message)):
        param = parameters_of(int(place[2]))
        error.message = _IN_ARGUMENTS.sub(r"\1", error.message)
    error.blame(param)


def _arguments(function: Mapping[str, Any], place: str) -> Any:
    parameters = function.get("parameters")
    if parameters is None:
        return _NO_ARGUMENTS
    schema = _moved(parameters or _ANY_OBJECT, place)
    if "type" in schema or any(name in schema for name in _OF_TYPES):
        return schema
    return {**_ANY_OBJECT, **schema}


def _constraint(schema: Mapping[str, Any]) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself are right once it stands at `place`, without what is
    for its readers.
    """
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _OF_READERS:
            continue
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = place + value[1:]
        elif name in _OF_NAMES and isinstance(value, dict):
            moved[name] = {key: _moved(one, place) for key, one in value.items()}
        elif name in _OF_VALUES:
            moved[name] = value
        else:
            moved[name] = _moved(value, place)
    return moved
