"""Bounds of fields in the OpenAPI document, apart from those of request parameters.

Bodies state the bounds of their parameters themselves (`weft.gateway.api.parameters`). The server
enforces all of them with its own messages; a test compares the two. Bounds that depend on the
model, on other fields or on bytes are in the fields' descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from weft.contract.request import MAX_SESSION_ID_BYTES, PARAMETERS
from weft.gateway.settings import MAX_PROMPTS

Keywords = dict[str, Any]
Bounds = Mapping[str, Mapping[str, Keywords]]
_CLIENT_ID = r"^[A-Za-z0-9._:-]{0,64}$"
_FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


def _nothing(*values: object) -> Keywords:
    """Keywords for a field that is not supported: only values that ask for nothing."""
    return {"enum": [None, *values]}


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_GENERATION: Mapping[str, Keywords] = {
    "request_id": {"pattern": _CLIENT_ID},
    "rid": {"pattern": _CLIENT_ID},
    "guided_regex": {"minLength": 1},
    "guided_grammar": {"minLength": 1},
    "guided_choice": {"minItems": 1, "items": {"type": "string", "minLength": 1}},
}
BOUNDS: Mapping[str, Mapping[str, Keywords]] = {
    "ChatBody": {
        **_GENERATION,
        "messages": {"minItems": 1},
        "echo": _nothing(False),
        "add_special_tokens": _nothing(False),
        "functions": _nothing("none", []),
        "function_call": _nothing("none", []),
        "modalities": {"items": {"const": "text"}},
    },
    "CompletionBody": {
        **_GENERATION,
        "prompt": {
            "anyOf": [
                _TEXT,
                _TOKENS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKENS},
            ]
        },
    },
    "TokenizeBody": {"messages": {"minItems": 1}},
    "DetokenizeBody": {"tokens": {"items": {"type": "integer", "minimum": 0}}},
    "EndSessionBody": {
        "session_id": {"minLength": 1, "maxLength": MAX_SESSION_ID_BYTES},
        "cache_salt": {"minLength": 1, "maxLength": int(PARAMETERS["cache_salt"].high)},
    },
    "ContentPart": {"type": {"const": "text"}},
    "FunctionBody": {"name": {"pattern": _FUNCTION_NAME}},
    "ChosenFunction": {"name": {"pattern": _FUNCTION_NAME}},
    "Message": {"function_call": _nothing()},
}
"""Keywords of JSON schema by body and field, which are added to those of its type."""


def _where(name: str, value: object, then: Keywords) -> Keywords:
    """Keywords that need a further field if one has a value; `...`: any value but null."""
    of_value = {"not": {"type": "null"}} if value is ... else {"const": value}
    return {"if": {"required": [name], "properties": {name: of_value}}, "then": then}


def _given(name: str, *types: str) -> Keywords:
    return {"required": [name], "properties": {name: {"type": list(types)}}}


def _needs(name: str, value: object) -> Keywords:
    return {"required": [name], "properties": {name: {"const": value}}}


_NAMED = {
    "required": ["session_id"],
    "properties": {"session_id": {"type": "string", "minLength": 1}},
}
_SHOWN = {
    "if": {
        "required": ["top_logprobs"],
        "properties": {"top_logprobs": {"type": "integer", "minimum": 1}},
    },
    "then": _needs("logprobs", True),
}
_SCORED = {"properties": {"n": {"enum": [1, None]}, "stream": {"enum": [False, None]}}}
TOGETHER: Mapping[str, list[Keywords]] = {
    "ChatBody": [
        _where("stream_options", ..., _needs("stream", True)),
        _where("prompt_logprobs", ..., _SCORED),
        _where("end_session", True, _NAMED),
        _SHOWN,
    ],
    "CompletionBody": [
        _where("stream_options", ..., _needs("stream", True)),
        _where("prompt_logprobs", ..., _SCORED),
        _where("end_session", True, _NAMED),
    ],
    "TokenizeBody": [
        {"oneOf": [_given("prompt", "string"), _given("messages", "array")]},
    ],
    "Message": [
        {
            "if": {"not": {"properties": {"role": {"const": "assistant"}}}},
            "then": _given("content", "string", "array"),
        }
    ],
    "ContentPart": [
        _where("type", "text", {"required": ["text"], "properties": {"text": {"type": "string"}}})
    ],
    "ResponseFormat": [
        _where(
            "type",
            "json_schema",
            {"required": ["json_schema"], "properties": {"json_schema": {"type": "object"}}},
        )
    ],
}
"""Conditions between fields of a body."""


def state_bounds(schemas: Mapping[str, Any], *more: Bounds) -> None:
    """Adds the bounds of this module and `more` to pydantic's schemas of bodies, in place."""
    for model, fields in chain(BOUNDS.items(), *(one.items() for one in more)):
        for name, keywords in fields.items():
            _add(schemas[model]["properties"][name], keywords)
    for model, rules in TOGETHER.items():
        schemas[model].setdefault("allOf", []).extend(rules)


def _add(field: Keywords, keywords: Keywords) -> None:
    alternatives = field.get("anyOf")
    if alternatives is None or keywords.keys() & {"enum", "anyOf"}:
        field.update(keywords)
        return
    for one in alternatives:
        of_type = {name: value for name, value in keywords.items() if _concerns(name, one)}
        if "items" in of_type and "items" in one:
            of_type["items"] = {**of_type["items"], **one["items"]}
        one.update(of_type)


_KINDS = {
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minItems": ("array",),
    "items": ("array",),
    "const": ("string",),
}


def _concerns(keyword: str, alternative: Keywords) -> bool:
    return alternative.get("type") in _KINDS[keyword]
