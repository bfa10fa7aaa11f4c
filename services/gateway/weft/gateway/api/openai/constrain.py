"""Extracts the constraint of a body from OpenAI's field or one of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from weft.contract.request import Constraint, check_whitespace
from weft.gateway.api.openai.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from weft.gateway.text.answer.demand import ANY_OBJECT
from weft.gateway.validate import invalid, unsupported

_UNSUPPORTED = {
    "disable_additional_properties": "a schema says so itself, by additionalProperties",
}
"""Fields of `structured_outputs` that would change the output, by name."""
_OF_TAGS = ("format", "structures", "triggers")
"""Fields of `response_format` with type structural_tag."""
_MAX_DEPTH = 32
"""Most references and alternatives that are followed to find out whether they are objects."""


WHITESPACE = "guided_whitespace_pattern"
CONSTRAINING = frozenset(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("response_format", "structured_outputs", WHITESPACE),
    )
)
"""Fields of a body that may hold a constraint, or say how it is written."""


class GivenConstraint(NamedTuple):
    """A constraint and the field in which the client gave it."""

    param: str
    value: Constraint


def constraint_of(body: GenerationBody) -> GivenConstraint | None:
    """The constraint of a body; None if there is none. Raises InvalidRequest if there are several,
    or a field contradicts another.
    """
    given = [*_guided(body), *_response_format(body.response_format)]
    if body.structured_outputs is not None:
        given += _structured(body.structured_outputs)
    if len(given) > 1:
        raise invalid(given[1].param, f"contradicts {given[0].param}: give one constraint")
    return given[0] if given else None


def whitespace_of(body: GenerationBody) -> str | None:
    """The pattern of the blanks between two tokens of JSON; None: the body has none. Raises
    InvalidRequest if the pattern may match other texts than blanks, or fields contradict each
    other.
    """
    given: dict[str, str] = {}
    if body.guided_whitespace_pattern is not None:
        given[WHITESPACE] = body.guided_whitespace_pattern
    if body.structured_outputs is not None:
        given |= _patterns(body.structured_outputs)
    return _one_pattern(given)


def structured_constraint(given: StructuredOutputs) -> GivenConstraint | None:
    """The constraint of vLLM's field alone, with its blanks; errors as in `constraint_of`."""
    found, pattern = _structured(given), _one_pattern(_patterns(given))
    if len(found) > 1:
        raise invalid(found[1].param, f"contradicts {found[0].param}: give one constraint")
    if found and pattern is not None:
        return GivenConstraint(found[0].param, replace(found[0].value, whitespace=pattern))
    return found[0] if found else None


def _patterns(structured: StructuredOutputs) -> dict[str, str]:
    given: dict[str, str] = {}
    if structured.whitespace_pattern is not None:
        given["structured_outputs.whitespace_pattern"] = structured.whitespace_pattern
    if structured.disable_any_whitespace:
        given["structured_outputs.disable_any_whitespace"] = ""
    return given


def _one_pattern(given: Mapping[str, str]) -> str | None:
    for param, pattern in given.items():
        try:
            check_whitespace(pattern)
        except ValueError as error:
            raise invalid(param, str(error)) from None
    if len(set(given.values())) > 1:
        first, second = [*given][:2]
        raise invalid(second, f"contradicts {first}")
    return next(iter(given.values()), None)


def _response_format(given: ResponseFormat | None) -> Iterator[GivenConstraint]:
    if given is None:
        return
    if given.type != "json_schema" and given.json_schema is not None:
        raise invalid("response_format.json_schema", "is for type json_schema")
    tags = {name: getattr(given, name) for name in _OF_TAGS if getattr(given, name) is not None}
    if tags and given.type != "structural_tag":
        raise invalid(f"response_format.{next(iter(tags))}", "is for type structural_tag")
    if given.type == "structural_tag":
        if given.schema_ is not None:
            raise invalid("response_format.schema", "is for type json_object")
        if ("format" in tags) == ("structures" in tags or "triggers" in tags):
            raise invalid("response_format.format", "give it, or structures and triggers")
        yield _tags("response_format", tags)
        return
    if given.type == "text":
        if given.schema_ is not None:
            raise invalid("response_format.schema", "is for type json_object")
        return
    if given.type == "json_object":
        if given.schema_ is None:
            yield _schema("response_format", ANY_OBJECT)
        else:
            yield _schema("response_format.schema", _of_objects(given.schema_))
    elif given.schema_ is not None:
        raise invalid("response_format.schema", "is for type json_object; give json_schema.schema")
    elif given.json_schema is None:
        raise invalid("response_format.json_schema", "is needed with type json_schema")
    else:
        schema = given.json_schema.schema_
        param = "response_format.json_schema.schema"
        yield _schema(param, ANY_OBJECT if schema is None else schema)


def _of_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves out the schema's values that are no objects. A schema without such values stays as it
    is: a type next to a reference or alternatives would let their objects have members that they do
    not list.
    """
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = "allows no object; use type json_schema for other values"
        raise invalid("response_format.schema", message)
    if ("type" not in schema or "$ref" in schema) and _Objects(schema).are_all(schema):
        return schema
    if "$ref" not in schema:
        return {**schema, "type": "object"}
    # Drafts up to 7 ignore the keywords next to a reference.
    rest = {name: value for name, value in schema.items() if name != "$ref"}
    parts = rest.get("allOf")
    parts = [*(parts if isinstance(parts, list) else ()), {"$ref": schema["$ref"]}]
    return {**rest, "type": "object", "allOf": parts}


class _Objects:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, bool] = {}
        """For each reference that was followed, whether it allows objects alone. It is False while
        the reference is being followed, so that one that leads to itself ends there.
        """

    def are_all(self, schema: object, depth: int = 0) -> bool:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return False
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = False
                self._known[reference] = self.are_all(self._named(reference), depth + 1)
            return self._known[reference]
        if schema.get("type") == "object":
            return True
        for name, enough in (("allOf", any), ("anyOf", all), ("oneOf", all)):
            parts = schema.get(name)
            found = parts if isinstance(parts, list) else ()
            if found and enough(self.are_all(part, depth + 1) for part in found):
                return True
        return False

    def _named(self, reference: str) -> object:
        if not reference.startswith("#/"):
            return None
        found: Any = self._root
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _guided(body: GenerationBody) -> Iterator[GivenConstraint]:
    if body.guided_json is not None:
        yield _schema("guided_json", body.guided_json)
    if body.guided_regex is not None:
        yield GivenConstraint("guided_regex", Constraint(kind="regex", text=body.guided_regex))
    if body.guided_choice is not None:
        yield GivenConstraint(
            "guided_choice", Constraint(kind="choice", choices=tuple(body.guided_choice))
        )
    if body.guided_grammar is not None:
        yield GivenConstraint("guided_grammar", Constraint(kind="ebnf", text=body.guided_grammar))


def _structured(given: StructuredOutputs) -> list[GivenConstraint]:
    for name, what in _UNSUPPORTED.items():
        # An empty pattern allows no whitespace, and so is not the same as none.
        if getattr(given, name) not in (None, False):
            raise unsupported(f"structured_outputs.{name}", what)
    found = []
    if given.json_ is not None:
        found.append(_schema("structured_outputs.json", given.json_))
    if given.json_object:
        found.append(_schema("structured_outputs.json_object", ANY_OBJECT))
    if given.regex is not None:
        found.append(
            GivenConstraint("structured_outputs.regex", Constraint(kind="regex", text=given.regex))
        )
    if given.choice is not None:
        choice = Constraint(kind="choice", choices=tuple(given.choice))
        found.append(GivenConstraint("structured_outputs.choice", choice))
    if given.grammar is not None:
        grammar = Constraint(kind="ebnf", text=given.grammar)
        found.append(GivenConstraint("structured_outputs.grammar", grammar))
    if given.structural_tag is not None:
        found.append(_tags("structured_outputs.structural_tag", given.structural_tag))
    if not found and given.whitespace_pattern is None and not given.disable_any_whitespace:
        names = "json, regex, choice, grammar, json_object, structural_tag"
        raise invalid("structured_outputs", f"give one of {names}")
    return found


def _schema(param: str, schema: str | Mapping[str, Any]) -> GivenConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return GivenConstraint(param, Constraint(kind="json_schema", text=text))


def _tags(param: str, tags: str | Mapping[str, Any]) -> GivenConstraint:
    text = tags if isinstance(tags, str) else json.dumps(tags, ensure_ascii=False)
    return GivenConstraint(param, Constraint(kind="structural_tag", text=text))
