"""Bases and bounds of the bodies of dialects.

As in `weft.gateway.api.openai.bodies`, `null` is the same as absent, types are strict, and lists
are bounded. Clients of these APIs send new fields with each release. Unlike there, a field that is
not listed is therefore left out with a warning, unless it looks like one that would change the
answer: a misspelt field, or one of another API that this server has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from weft.gateway.api.openai.bodies import Body, names_of
from weft.gateway.api.openai.foreign import UNSERVED
from weft.gateway.api.unserved import has_effect, leave_out, misspelt, unserved_fields
from weft.gateway.validate import MAX_MESSAGES, MAX_TOOLS, invalid

STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
LENIENT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

T = TypeVar("T")
Few = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]
Many = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MESSAGES)]


_MAX_UNKNOWN = 16
"""Unknown fields of one object that are judged and named; more are left out without a name."""


class DialectBody(Body):
    """Base of all bodies of dialects."""

    model_config = STRICT

    keeps_unknown: ClassVar[bool] = True

    def settle(self, *, ignores_unknown: bool = False) -> None:
        _settle(self, "", ignores_unknown=ignores_unknown)


class StrictPart(BaseModel):
    """Part of a body that decides what is generated."""

    model_config = STRICT

    refuses_unknown: ClassVar[bool] = False
    """Whether any unknown field is refused: most would be parameters of sampling."""


class PastPart(BaseModel):
    """Part of an earlier conversation that a client sends back: unknown fields are ignored."""

    model_config = LENIENT


def _settle(part: BaseModel, where: str, *, ignores_unknown: bool) -> None:
    for name, shown, unserved in unserved_fields(type(part)):
        unserved.judge(f"{where}{shown}", getattr(part, name))
    if extra := part.__pydantic_extra__:
        given = ((name, value) for name, value in extra.items() if value is not None)
        for number, (name, value) in enumerate(islice(given, _MAX_UNKNOWN + 1)):
            if number == _MAX_UNKNOWN:
                leave_out(where.removesuffix(".") or "body", "more fields that are not known")
            elif ignores_unknown:
                leave_out(f"{where}{name[:80]}", "this server knows no such field")
            else:
                _judge_unknown(part, name, value, where)
        extra.clear()
    for place, inner in _parts_of(part):
        _settle(inner, f"{where}{place}.", ignores_unknown=ignores_unknown)


def _parts_of(part: BaseModel) -> Iterator[tuple[str, StrictPart]]:
    for name, value in part.__dict__.items():
        if isinstance(value, StrictPart):
            yield name, value
        elif isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, StrictPart):
                    yield f"{name}[{number}]", one


def _judge_unknown(part: BaseModel, name: str, value: object, where: str) -> None:
    if not where and name in UNSERVED:
        UNSERVED[name].judge(name, value)
        return
    param, meant = f"{where}{name[:80]}", misspelt(name, names_of(type(part)))
    if meant:
        raise invalid(param, f"this server knows no such field; did you mean {where}{meant}?")
    if not where and name in _fields_of_other_bodies():
        raise invalid(param, "a field of another API of this server; leave it out")
    if isinstance(part, StrictPart) and part.refuses_unknown:
        raise invalid(param, "this server knows no such field; leave it out")
    leave_out(param, "this server knows no such field")


@cache
def _fields_of_other_bodies() -> frozenset[str]:
    bodies: list[type[Body]] = [Body]
    for cls in bodies:
        bodies += cls.__subclasses__()
    return frozenset(
        field.alias or name
        for cls in bodies
        for name, field in cls.model_fields.items()
        if has_effect(field)
    )
