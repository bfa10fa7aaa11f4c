"""The constraint under which an answer is the calls that a request demands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.contract.errors import WeftError
from weft.contract.request import Constraint
from weft.contract.schema_keywords import unknown_parts
from weft.gateway.text.answer.call_reader import parse_json
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

ALL_TOOLS = "tools"
"""The field that an error of a constraint on all tools names, if no single tool is at fault."""
_IN_ARGUMENTS = re.compile(r"([$#])(?:\.\$defs\.|\['\$defs'\]\['|/\$defs/)arguments-(\d+)(?:'\])?")
"""Places within a tool's arguments, as errors of schemas write them: paths of two forms, and
references.
"""
_ANSWER = "answer-beside-calls"
_IN_ANSWER = re.compile(r"([$#])(?:\.\$defs\.|\['\$defs'\]\['|/\$defs/)answer-beside-calls(?:'\])?")
"""Places within the answer's schema beside calls."""
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name, and so may have any name."""
_OF_VALUES = ("const", "enum")
_OF_READERS = ("title", "description", "examples", "default", "$comment")
"""Keywords that enforce nothing, and would only make the constraint larger."""
_OF_TAGS = ("schema", "json_schema")
"""Names under which structural tags have schemas."""
_OF_TYPES = ("properties", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords that show that a schema without `type` is one of objects, or that its type is not known
here.
"""


def demanded_calls(tools: Sequence[Mapping[str, Any]], most: int | None) -> Constraint:
    """The constraint of a list of one or more calls, in the format
    `weft.gateway.text.answer.formats.CALLS_ONLY`.

    Args:
        tools: The tools that may be called, in OpenAI's form.
        most: Most calls; None: any number.
    """
    return _constraint(_calls(tools, most))


def calls_or_answer(
    tools: Sequence[Mapping[str, Any]], answer: Constraint, most: int | None, param: str
) -> Constraint:
    """The constraint of a list of calls or an object of an answer's schema, for models whose calls
    begin with no special token.

    Models whose calls begin with such a token use `Constraint.alternatives` instead.

    Args:
        tools: See `demanded_calls`.
        answer: The constraint of an answer without calls.
        most: See `demanded_calls`.
        param: The field that gave `answer`.

    Raises:
        InvalidRequest: The answer need not be an object, so that it could be mistaken for a list.
    """
    schema: Any = None
    if answer.kind == "json_schema":
        try:
            schema = parse_json(answer.text)
        except ValueError as error:
            raise invalid(param, f"is not JSON: {error}") from None
    if not isinstance(schema, dict) or not _is_of_objects(schema):
        raise invalid(
            param,
            "beside tools, must be a JSON schema of type object with this model, whose calls no "
            "token tells from an answer; or set tool_choice to none",
        )
    calls = _calls(tools, most)
    places = {**calls.pop("$defs"), _ANSWER: _moved(schema, f"#/$defs/{_ANSWER}")}
    return _constraint({"anyOf": [{"$ref": f"#/$defs/{_ANSWER}"}, calls], "$defs": places})


def _is_of_objects(schema: Mapping[str, Any]) -> bool:
    """Whether only objects are valid under a schema, as far as its first level shows."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and "type" not in schema:
        there: Any = schema
        for step in reference[2:].split("/"):
            there = there.get(step) if isinstance(there, Mapping) else None
        return isinstance(there, Mapping) and there.get("type") == "object"
    return schema.get("type") == "object"


def _calls(tools: Sequence[Mapping[str, Any]], most: int | None) -> dict[str, Any]:
    """The schema of a list of calls."""
    branches, arguments = [], {}
    for number, tool in enumerate(tools):
        function, place = tool["function"], f"arguments-{number}"
        # The arguments' schemas are definitions of their own, since the compiler follows no
        # references through a list.
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
    return schema


def demanded_arguments(tool: Mapping[str, Any]) -> Constraint:
    """The constraint of one function's arguments."""
    return _constraint(_arguments(tool["function"], "#"))


def parameters_of(number: int) -> str:
    """Name of the field with the schema of a tool's arguments."""
    return f"tools[{number}].function.parameters"


def blame_constraint(error: WeftError, param: str) -> None:
    """Makes a worker's refusal of a constraint name the client's field, and the place within it.

    Args:
        error: The worker's error.
        param: The field that gave the constraint.
    """
    if place := _IN_ARGUMENTS.search(error.message):
        param = parameters_of(int(place[2]))
        error.message = _IN_ARGUMENTS.sub(r"\1", error.message)
    error.message = _IN_ANSWER.sub(r"\1", error.message)
    error.blame(param)


def warn_of_unknown(constraint: Constraint, param: str) -> None:
    """Names the words of a constraint's schemas that constrain nothing, as warnings of the call.

    Args:
        constraint: Any.
        param: The field that gave the constraint.
    """
    for schema in _schemas_of(constraint):
        for part in unknown_parts(schema):
            place = _IN_ANSWER.sub(r"\1", part.at)
            tool = _IN_ARGUMENTS.search(place)
            field = param if tool is None else parameters_of(int(tool[2]))
            place = _IN_ARGUMENTS.sub(r"\1", place)
            what = f"`{part.name}` at {place} constrains nothing"
            if part.meant:
                what += f" (is `{part.meant}` meant?)"
            warn(field, what)


def _schemas_of(constraint: Constraint) -> Iterator[Any]:
    """The schemas in a constraint; none of one that workers will refuse because it is no JSON."""
    if constraint.kind not in ("json_schema", "structural_tag"):
        return
    try:
        given = parse_json(constraint.text)
    except (ValueError, RecursionError):
        return
    if constraint.kind == "json_schema":
        yield given
        return
    left = [given]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield from (part[name] for name in _OF_TAGS if name in part)
            left += [value for name, value in part.items() if name not in _OF_TAGS]
        elif isinstance(part, list):
            left += part


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
    """The schema with references into itself that hold once it stands at `place`, without
    descriptions and examples.
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
