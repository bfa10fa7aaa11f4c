"""The constraint under which an answer consists of the calls that a request demands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.contract.errors import WeftError
from weft.contract.request import MAX_CONSTRAINT_BYTES, Constraint
from weft.contract.schema_keywords import unknown_parts
from weft.gateway.text.answer.call_reader import parse_json
from weft.gateway.text.answer.formats import ToolFormat
from weft.gateway.text.answer.syntaxes import JsonObject
from weft.gateway.validate import invalid
from weft.gateway.warnings import warn

ALL_TOOLS = "tools"
"""The field that an error of a constraint on all tools names, if no single tool is at fault."""
_IN_ARGUMENTS = re.compile(r"([$#])(?:\.\$defs\.|\['\$defs'\]\['|/\$defs/)arguments-(\d+)(?:'\])?")
"""Places within a tool's arguments, as errors of schemas write them: paths of two forms, and
references.
"""
_IN_ANSWER = re.compile(r"#/format/elements/0(?:/json_schema|/pattern|/grammar)?(?=[/:])")
"""Places within an answer that is not calls."""
ANY_OBJECT = {"type": "object", "additionalProperties": True}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names, which may be any, to schemas."""
_OF_VALUES = ("const", "enum")
_MAX_ITEMS = 128
"""Most alternatives of one format of structural tags."""
_OF_READERS = ("title", "description", "examples", "default", "$comment")
"""Keywords that enforce nothing, and would only make the constraint larger."""
_OF_TAGS = ("schema", "json_schema")
"""Names under which structural tags have schemas."""
_OF_TYPES = ("properties", "$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords of a schema without `type` which show that it is one of objects, or that its type is not
known here.
"""


def demanded_calls(tools: Sequence[Mapping[str, Any]], most: int | None) -> Constraint:
    """The constraint of a list of one or more calls, in the format
    `weft.gateway.text.answer.formats.CALLS_ONLY`. `tools` may be called, in OpenAI's form, at most
    `most` times; None: any number.
    """
    return _constraint(_calls(tools, most))


def calls_or_answer(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    answer: Constraint,
    most: int | None,
    param: str,
) -> Constraint:
    """The constraint of an answer that either follows a constraint of its own or is calls as the
    model writes them, for models whose calls begin with no special token.

    Models whose calls begin with such a token use `Constraint.alternatives` instead.

    Args:
        form: How the model writes calls.
        tools: The tools that may be called, in OpenAI's form.
        answer: The constraint of an answer without calls.
        most: Most calls; None: any number.
        param: The field that gave `answer`.

    Raises:
        InvalidRequest: The answer's constraint cannot be an alternative to calls.
    """
    own = _as_format(answer, param)
    for is_free in (False, True):
        calls = _own_calls(form, tools, most, is_free=is_free)
        text = json.dumps({"format": {"type": "or", "elements": [own, calls]}}, ensure_ascii=False)
        if len(text.encode()) <= MAX_CONSTRAINT_BYTES:
            break
    return Constraint(kind="structural_tag", text=text, whitespace=answer.whitespace)


def _as_format(answer: Constraint, param: str) -> Mapping[str, Any]:
    if answer.kind == "regex":
        return {"type": "regex", "pattern": answer.text}
    if answer.kind == "choice":
        values = [{"type": "const_string", "value": choice} for choice in answer.choices]
        lists = [values[at : at + _MAX_ITEMS] for at in range(0, len(values), _MAX_ITEMS)]
        return _or([_or(one) for one in lists])
    if answer.kind == "json_schema":
        try:
            return {"type": "json_schema", "json_schema": parse_json(answer.text)}
        except ValueError as error:
            raise invalid(param, f"is not JSON: {error}") from None
    raise invalid(
        param,
        "beside tools, must be JSON, a regular expression or choices with this model, whose calls "
        "no token tells from an answer; or set tool_choice to none",
    )


def _own_calls(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], most: int | None, *, is_free: bool
) -> Mapping[str, Any]:
    """JSON if the format has nothing else; otherwise any text after the mark that begins calls."""
    if not form.openers:
        schema = _calls(tools, None, form.arguments)
        one = _json({**schema["items"], "$defs": schema["$defs"]}, is_free=is_free)
        return _joined(one, {"type": "regex", "pattern": "[ \n]?;[ \n]?"}, most)
    openers = [{"type": "const_string", "value": opener} for opener in form.openers]
    if any(not isinstance(syntax, JsonObject) for syntax in form.syntaxes):
        return _sequence(_or(openers), {"type": "any_text"})
    schema = _calls(tools, most, form.arguments)
    schema = {"anyOf": [schema["items"], schema], "$defs": schema.pop("$defs")}
    blanks = {"type": "regex", "pattern": "[ \n]{0,2}"}
    closer = {"type": "const_string", "value": form.closer}
    one = _sequence(_or(openers), blanks, _json(schema, is_free=is_free), blanks, closer)
    return _joined(one, blanks, most)


def _joined(
    call: Mapping[str, Any], between: Mapping[str, Any], most: int | None
) -> Mapping[str, Any]:
    if most == 1:
        return call
    more = {"type": "repeat", "min": 0, "max": -1 if most is None else most - 1}
    return _sequence(call, {**more, "content": _sequence(between, call)})


def _json(schema: Mapping[str, Any], *, is_free: bool) -> Mapping[str, Any]:
    """Arguments are any objects where their schemas cannot be enforced."""
    names = [*schema["$defs"]]
    if is_free:
        schema = {**schema, "$defs": dict.fromkeys(names, ANY_OBJECT)}
    return {"type": "json_schema", "json_schema": schema, "lenient_defs": names}


def _sequence(*elements: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "sequence", "elements": elements}


def _or(elements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _calls(
    tools: Sequence[Mapping[str, Any]], most: int | None, arguments_name: str = "arguments"
) -> dict[str, Any]:
    branches, arguments = [], {}
    for number, tool in enumerate(tools):
        function, place = tool["function"], f"arguments-{number}"
        # The arguments' schemas are separate definitions, since the compiler follows no
        # references through a list.
        arguments[place] = _arguments(function, f"#/$defs/{place}")
        branches.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    arguments_name: {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", arguments_name],
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
    """Makes a worker's refusal of a constraint name the client's field, which gave it, and the
    place within it.
    """
    if place := _IN_ARGUMENTS.search(error.message):
        param = parameters_of(int(place[2]))
        error.message = _IN_ARGUMENTS.sub(r"\1", error.message)
    error.message = _IN_ANSWER.sub("#", error.message)
    error.blame(param)


def warn_of_unknown(constraint: Constraint, param: str) -> None:
    """Warns the caller of words that constrain nothing in a constraint's schemas. `param` is the
    field that gave the constraint.
    """
    for schema in _schemas_of(constraint):
        for part in unknown_parts(schema):
            tool = _IN_ARGUMENTS.search(part.at)
            field = param if tool is None else parameters_of(int(tool[2]))
            place = _IN_ARGUMENTS.sub(r"\1", part.at)
            what = f"`{part.name}` at {place} constrains nothing"
            if part.meant:
                what += f" (is `{part.meant}` meant?)"
            warn(field, what)


def _schemas_of(constraint: Constraint) -> Iterator[Any]:
    """Yields none of a constraint that workers will refuse because it is not JSON."""
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
    schema = _moved(parameters or ANY_OBJECT, place)
    if "type" in schema or any(name in schema for name in _OF_TYPES):
        return schema
    return {**ANY_OBJECT, **schema}


def _constraint(schema: Mapping[str, Any]) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def _moved(schema: Any, place: str) -> Any:
    """The schema as a part of another one, at `place` there: references into itself stay valid, and
    descriptions and examples are left out.
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
