"""Bodies that are nearly what a pydantic model takes: fields of the right type, and others."""

from __future__ import annotations

import random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_TEXTS = (
    *("", "x", "hi", "tiny", "user", "assistant", "system", "tool", "text", "function", "auto"),
    *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
    *("tool_use", "tool_result", "thinking", "input_text", "output_text", "json", "\ud83c"),
    *("get_weather", '{"a": 1}', "\u2028", "🎉", "none", "required", "a" * 300),
)
_NUMBERS = (0, 1, 2, 3, 4, -1, 0.5, 7, 2**31, 2**63, 10**30, -0.0, 1e308)
_MAX_DEPTH = 5


def random_json(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(6 if depth < _MAX_DEPTH else 4)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(_TEXTS)
    if kind == 3:
        return rng.choice(_NUMBERS)
    if kind == 4:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(_TEXTS): random_json(rng, depth + 1) for _ in range(rng.randrange(3))}


def random_body(rng: random.Random, cls: type[BaseModel], depth: int = 0) -> dict[str, Any]:
    """An object with some of a model's fields, most of the right type."""
    body: dict[str, Any] = {}
    density = rng.choice((0.01, 0.05, 0.3))
    for name, field in cls.model_fields.items():
        is_wanted = field.is_required() or field.alias == "schema"
        if rng.random() < (0.97 if is_wanted else density):
            body[field.alias or name] = _value(rng, field.annotation, depth + 1)
    if rng.random() < 0.01:
        body[rng.choice(_TEXTS)] = random_json(rng)
    return body


def _value(rng: random.Random, kind: Any, depth: int) -> Any:
    if rng.random() < 0.015:
        return random_json(rng)
    origin = get_origin(kind)
    if origin is Annotated:
        return _value(rng, get_args(kind)[0], depth)
    if origin in (Union, UnionType):
        options = [one for one in get_args(kind) if one is not NoneType]
        return _value(rng, rng.choice(options), depth)
    if origin is Literal:
        return rng.choice(get_args(kind))
    if origin is list:
        return [_value(rng, get_args(kind)[0], depth + 1) for _ in range(rng.randrange(1, 4))]
    if kind is dict or origin is dict:
        return rng.choice(({}, {"type": "object"}, {"a": "b"}, random_json(rng)))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {} if depth > _MAX_DEPTH else random_body(rng, kind, depth)
    if kind is bool:
        return rng.random() < 0.3
    if kind is int:
        return rng.choice((1, 2, 3, 4, 0, -1, rng.choice(_NUMBERS)))
    if kind is float:
        return rng.choice((0.0, 0.5, 1.0, rng.choice(_NUMBERS)))
    if kind is str:
        return rng.choice(_TEXTS)
    return random_json(rng)
