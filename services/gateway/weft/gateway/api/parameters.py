"""Request parameters in the bodies of dialects, from the one table `PARAMETERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError
from weft.contract.request import (
    PARAMETERS,
    CallParams,
    Parameter,
    SamplingParams,
    StopCriteria,
)
from weft.gateway.validate import invalid

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
_MAX_ID_DIGITS = 10
ALL = (SamplingParams, StopCriteria, CallParams)


def few_entries(most: int) -> BeforeValidator:
    """Limits the number of entries before they are validated: a mapping would collect an error for
    each.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long",
                "at most {max_length} entries",
                {"max_length": most, "actual_length": len(value)},
            )
        return value

    return BeforeValidator(check)


def _whole(value: object) -> object:
    """JSON Schema counts 5.0 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_items(value: object) -> object:
    if isinstance(value, list) and float in map(type, value):
        return [_whole(one) for one in value]
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Ids = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_whole_items)]


def with_parameters(
    base: type[B], dialect: str, whole: Any = int, of: tuple[type, ...] = ALL
) -> type[B]:
    """A body with the parameters of a dialect, all of them optional. `dialect` is a name of
    `Parameter.names`, `whole` the type of whole numbers.
    """
    made: dict[str, Any] = {
        name: (_type(one, whole) | None, parameter_field(one.name))
        for name, one in _names(dialect, of).items()
    }
    return create_model(f"{base.__name__}WithParameters", __base__=base, **made)


def parameter_field(name: str, description: str = "") -> Any:
    """A field of a body that gives a parameter in a way of its own. `name` is the parameter's in
    `PARAMETERS`, `description` replaces the parameter's own.
    """
    one = PARAMETERS[name]
    shown = description or one.description
    return Field(None, description=shown, json_schema_extra=bounds_of(one))


def _type(one: Parameter, whole: Any) -> Any:
    few: Any = Field(fail_fast=True, max_length=one.max_entries)
    types: dict[str, Any] = {
        "float": float,
        "int": whole,
        "bool": bool,
        "str": str,
        "tuple[str, ...]": str | Annotated[list[str], few],
        "tuple[int, ...]": Annotated[list[int], few, BeforeValidator(_whole_items)],
        "dict[int, float]": Annotated[dict[str, float], few_entries(one.max_entries)],
    }
    return types[one.type]


def bounds_of(one: Parameter) -> dict[str, Any]:
    """Keywords of JSON schema for a parameter; each concerns values of its own kind alone."""
    if one.type == "bool":
        return {}
    if one.choices:
        return {"enum": list(one.choices)}
    if one.type == "str":
        return {**({"minLength": int(one.low)} if one.low else {}), "maxLength": int(one.high)}
    if one.type == "tuple[str, ...]":
        size = {"minLength": int(one.low), "maxLength": int(one.high)}
        return {**size, "items": {"type": "string", **size}}
    if one.type == "tuple[int, ...]":
        return {"items": {"type": "integer", "minimum": 0}}
    if one.type == "dict[int, float]":
        return {
            "maxProperties": one.max_entries,
            "propertyNames": {"pattern": f"^[0-9]{{1,{_MAX_ID_DIGITS}}}$"},
            "additionalProperties": {"type": "number", "minimum": one.low, "maximum": one.high},
        }
    least = "exclusiveMinimum" if one.excludes_low else "minimum"
    most = {} if one.high == float("inf") else {"maximum": one.high}
    return {least: min([one.low, *one.aliases]), **most}


@cache
def _names(dialect: str, of: tuple[type, ...] = ALL) -> Mapping[str, Parameter]:
    wanted = [PARAMETERS[one.name] for cls in of for one in fields(cls) if one.name in PARAMETERS]
    return {name: one for one in wanted if (name := one.name_in(dialect))}


@cache
def client_names(dialect: str, prefix: str = "", of: tuple[type, ...] = ALL) -> Mapping[str, str]:
    """A dialect's names of parameters, by those of `PARAMETERS`, where they differ."""
    shown = {one.name: f"{prefix}{name}" for name, one in _names(dialect, of).items()}
    return {name: own for name, own in shown.items() if name != own}


def given_parameters(body: object, dialect: str, of: tuple[type, ...] = ALL) -> dict[str, Any]:
    """The parameters that a body gives, by their names in `PARAMETERS`. Raises InvalidRequest if a
    key of `logit_bias` is no token id.
    """
    given: dict[str, Any] = {}
    for own, one in _names(dialect, of).items():
        value = getattr(body, own)
        if value is not None and one.aliases:
            value = one.aliases.get(value, value)
        if value is not None:
            convert = _CONVERT.get(one.type)
            given[one.name] = value if convert is None else convert(own, value)
    return given


def settle_logprobs(given: dict[str, Any], needs: str, *, is_wanted: bool) -> None:
    """Settles `top_logprobs` of a dialect that asks for log-probabilities by another field, which
    must say `needs`; changes `given`. Raises InvalidRequest if alternatives are wanted without
    log-probabilities.
    """
    if is_wanted:
        given.setdefault("top_logprobs", 0)
    elif given.pop("top_logprobs", None):
        raise invalid("top_logprobs", f"needs {needs}")


def _texts(_: str, value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _by_token(name: str, given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > _MAX_ID_DIGITS:
            raise invalid(name, f"{key[:20]!r} is not a token id")
        bias[int(key)] = value
    return bias


_CONVERT: Mapping[str, Callable[[str, Any], Any]] = {
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": lambda _, ids: tuple(ids),
    "dict[int, float]": _by_token,
}
"""What becomes of the JSON of lists and mappings, by type."""


def given_in(message: Any, of: type) -> dict[str, Any]:
    """The parameters of a class that a protobuf message gives, by their names in `PARAMETERS`."""
    known, given = _names("grpc", (of,)), {}
    for field, value in message.ListFields():
        if (one := known.get(field.name)) is not None:
            if one.type.startswith("tuple"):
                value = tuple(value)
            given[one.name] = dict(value) if one.type.startswith("dict") else value
    return given
