"""Bases and bounds of the bodies of dialects.

As in `weft.gateway.api.openai.bodies`, `null` is the same as absent, types are strict, and lists
are bounded. Unlike there, a field that is not listed is refused by name, as the dialects' own
servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from weft.gateway.api.openai.bodies import Body, names_of
from weft.gateway.validate import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, unsupported

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
LENIENT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

T = TypeVar("T")
Few = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
Many = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Stops = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)]


def _leave_one_unknown(cls: type[BaseModel], value: object) -> object:
    """Leaves one of many unknown fields, since each would become an error."""
    if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
        return value
    names = names_of(cls)
    unknown = next(name for name in value if name not in names)
    return {name: value[name] for name in (*names, unknown) if name in value}


class DialectBody(Body):
    """Base of all bodies of dialects: unknown fields are refused."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: object) -> object:
        return _leave_one_unknown(cls, value)


class StrictPart(BaseModel):
    """Part of a body that decides what is generated: unknown fields are refused."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: object) -> object:
        return _leave_one_unknown(cls, value)


class PastPart(BaseModel):
    """Part of an earlier conversation that a client sends back: unknown fields are ignored."""

    model_config = LENIENT


def refuse(body: BaseModel, fields: dict[str, str], prefix: str = "") -> None:
    """Refuses fields that are not supported. An empty or false value asks for nothing.

    Args:
        body: The body to check.
        fields: What each refused field asks for, by its name.
        prefix: Prefix of the names in errors.

    Raises:
        InvalidRequest: One of the fields is given.
    """
    for name, what in fields.items():
        value: Any = getattr(body, name)
        if value or (value is not None and not isinstance(value, (bool, list, dict, str))):
            raise unsupported(f"{prefix}{name}", what)
