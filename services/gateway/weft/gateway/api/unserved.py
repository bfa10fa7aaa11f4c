"""Parts of a request that this server does not serve: what each body declares of them, and what
becomes of them.

A part without which the model answers as well is left out, and the answer's warnings name it. A
part that would change what is generated is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from weft.gateway.validate import unsupported
from weft.gateway.warnings import warn

_ALIKE = 0.75
"""Similarity, 0 to 1, from which an unknown field counts as a misspelt known one."""


class Unserved(NamedTuple):
    """A field that is refused or left out, unless its value asks for nothing."""

    what: str
    """What it asks for, or the field that does the same here."""
    neutral: tuple[object, ...] = ()
    """Further values that ask for nothing."""
    asks_when_empty: bool = False
    """Whether false, 0 and empty values ask for something too; null never does."""
    is_left_out: bool = False
    """Whether the model can do without it."""

    def is_asked(self, value: object) -> bool:
        if value is None or value in self.neutral:
            return False
        return bool(value) or self.asks_when_empty

    def judge(self, where: str, value: object) -> None:
        """Leaves the field out with a warning, or refuses it with InvalidRequest, whose `param` is
        `where`, if its value asks for anything.
        """
        if not self.is_asked(value):
            return
        if not self.is_left_out:
            raise unsupported(where, self.what)
        leave_out(where, self.what)


class _Unused(NamedTuple):
    """Marks a field that has no effect on an answer."""


def leave_out(where: str, what: str) -> None:
    """Names a part in the answer's warnings."""
    warn(where, f"left out ({what})")


def refused(what: str, *neutral: object, asks_when_empty: bool = False) -> Any:
    """Declares a field of a body that would change what is generated, as an `Unserved` one."""
    return _marked(f"not supported: {what}", Unserved(what, neutral, asks_when_empty))


def left_out(what: str, *neutral: object, asks_when_empty: bool = False) -> Any:
    """Declares a field of a body that the model can do without, as an `Unserved` one."""
    unserved = Unserved(what, neutral, asks_when_empty, is_left_out=True)
    return _marked(f"left out with a warning: {what}", unserved)


def unused(what: str = "") -> Any:
    """Declares a field of a body without effect: a label, or a hint to another kind of server."""
    return _marked(f"accepted, without effect{': ' if what else ''}{what}", _Unused())


def _marked(description: str, mark: object) -> Any:
    field: Any = Field(None, description=description)
    field.metadata.append(mark)
    return field


@cache
def unserved_fields(cls: type[BaseModel]) -> tuple[tuple[str, str, Unserved], ...]:
    """The unserved fields that a body or a part declares: names in Python and in JSON."""
    return tuple(
        (name, field.alias or name, mark)
        for name, field in cls.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unserved)
    )


def has_effect(field: FieldInfo) -> bool:
    """Whether a body's field changes what is generated or shown."""
    marks = [mark for mark in field.metadata if isinstance(mark, Unserved | _Unused)]
    return not any(isinstance(mark, _Unused) or mark.is_left_out for mark in marks)


def misspelt(name: str, known: Collection[str]) -> str:
    """The known name that an unknown one surely means; empty: none."""
    plain = {one.replace("_", "").casefold(): one for one in known}
    bare = name[:64].replace("_", "").replace("-", "").casefold()
    if bare in plain:
        return plain[bare]
    alike = difflib.get_close_matches(name[:64], known, n=1, cutoff=_ALIKE)
    return alike[0] if alike else ""
