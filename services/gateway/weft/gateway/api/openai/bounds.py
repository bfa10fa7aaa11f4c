"""Bounds of fields as the OpenAPI document states them.

`weft.gateway.validate` enforces them for both faces with its own messages; a test compares the two.
Bounds that depend on the model, on other fields or on bytes are in the fields' descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from weft.contract.request import (
    MAX_BIAS,
    MAX_PRIORITY,
    MAX_SESSION_ID_BYTES,
    MAX_TOP_LOGPROBS,
)
from weft.gateway.api.sampling import sampling_bounds
from weft.gateway.request import MAX_TARGET_S, MIN_TARGET_S
from weft.gateway.settings import MAX_PROMPTS
from weft.gateway.validate import (
    MAX_LOGIT_BIAS,
    MAX_ROUTING_KEY_BYTES,
    MAX_SALT_BYTES,
    MAX_STOP_BYTES,
    MAX_TOKENS,
)

Keywords = dict[str, Any]
Bounds = Mapping[str, Mapping[str, Keywords]]
_CLIENT_ID = r"^[A-Za-z0-9._:-]{0,64}$"
_FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


def _range(low: float, high: float) -> Keywords:
    return {"minimum": low, "maximum": high}


def _nothing(*values: object) -> Keywords:
    """Keywords for a field that is not supported: only values that ask for nothing."""
    return {"enum": [None, *values]}


_TARGET = _range(MIN_TARGET_S * 1e3, MAX_TARGET_S * 1e3)
_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_GENERATION: Mapping[str, Keywords] = {
    **sampling_bounds("openai"),
    "max_tokens": _range(1, MAX_TOKENS),
    "stop": {
        "minLength": 1,
        "maxLength": MAX_STOP_BYTES,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
    },
    "stop_regex": {
        "minLength": 1,
        "maxLength": MAX_STOP_BYTES,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES},
    },
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _range(-MAX_BIAS, MAX_BIAS),
    },
    "min_tokens": _range(0, MAX_TOKENS),
    "stop_token_ids": {"items": {"type": "integer", "minimum": 0}},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_BYTES},
    "priority": _range(-MAX_PRIORITY, MAX_PRIORITY),
    "routing_key": {"maxLength": MAX_ROUTING_KEY_BYTES},
    "request_id": {"pattern": _CLIENT_ID},
    "rid": {"pattern": _CLIENT_ID},
    "session_id": {"maxLength": MAX_SESSION_ID_BYTES},
    "ttft_target_ms": _TARGET,
    "itl_target_ms": _TARGET,
    "timeout": {"exclusiveMinimum": 0},
    "ttft_timeout": {"exclusiveMinimum": 0},
    "prompt_logprobs": _range(0, MAX_TOP_LOGPROBS),
    "best_of": sampling_bounds("openai")["n"],
    "guided_regex": {"minLength": 1},
    "guided_grammar": {"minLength": 1},
    "guided_choice": {"minItems": 1, "items": {"type": "string", "minLength": 1}},
}
BOUNDS: Mapping[str, Mapping[str, Keywords]] = {
    "ChatBody": {
        **_GENERATION,
        "messages": {"minItems": 1},
        "max_completion_tokens": _range(1, MAX_TOKENS),
        "top_logprobs": _range(0, MAX_TOP_LOGPROBS),
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
        "logprobs": _range(0, MAX_TOP_LOGPROBS),
    },
    "TokenizeBody": {"messages": {"minItems": 1}},
    "DetokenizeBody": {"tokens": {"items": {"type": "integer", "minimum": 0}}},
    "EndSessionBody": {
        "session_id": {"minLength": 1, "maxLength": MAX_SESSION_ID_BYTES},
        "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_BYTES},
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
    """Adds the bounds to the schemas of bodies, in place.

    Args:
        schemas: Pydantic's schemas by name.
        more: Bounds beside those of this module.
    """
    for model, fields in chain(BOUNDS.items(), *(one.items() for one in more)):
        for name, keywords in fields.items():
            _add(schemas[model]["properties"][name], keywords)
    for model, rules in TOGETHER.items():
        schemas[model].setdefault("allOf", []).extend(rules)


def _add(field: Keywords, keywords: Keywords) -> None:
    """Adds keywords to a field, and to each alternative that it has."""
    alternatives = field.get("anyOf")
    if alternatives is None or keywords.keys() & {"enum", "anyOf"}:
        field.update(keywords)
        return
    for one in alternatives:
        of_type = {name: value for name, value in keywords.items() if _concerns(name, one)}
        if "items" in of_type and "items" in one:
            of_type["items"] = {**of_type["items"], **one["items"]}
        if "additionalProperties" in of_type and isinstance(one.get("additionalProperties"), dict):
            of_type["additionalProperties"] = {
                **of_type["additionalProperties"],
                **one["additionalProperties"],
            }
        one.update(of_type)


_KINDS = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
    "additionalProperties": ("object",),
    "const": ("string",),
}


def _concerns(keyword: str, alternative: Keywords) -> bool:
    return alternative.get("type") in _KINDS[keyword]
