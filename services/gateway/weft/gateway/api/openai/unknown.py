"""Refuses fields that neither this server nor any other is known to have.

Most of them are misspelt. Without a refusal, `temprature: 0` would be answered at the model's own
temperature. Fields of messages are not judged: clients send back what other servers have answered.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from weft.contract.errors import InvalidRequest
from weft.gateway.api.openai.bodies import Body, names_of
from weft.gateway.api.openai.foreign import objects_at
from weft.gateway.validate import invalid

_ALIKE = 0.7
"""Similarity, 0 to 1, from which a field is suggested in place of an unknown one."""


def refuse_unknown(cls: type[Body], value: Mapping[str, Any]) -> None:
    """Refuses the first unknown field that is not null.

    Args:
        cls: The model of the body.
        value: JSON that is valid under it.

    Raises:
        InvalidRequest: There is an unknown field; `param` is its path.
    """
    _check(cls, cls.of_others, value, "")
    for part in cls.parts:
        for where, level in objects_at(value, part.path):
            _check(part.model, part.of_others, level, where)


def _check(
    cls: type[BaseModel], others: frozenset[str], level: Mapping[str, Any], where: str
) -> None:
    own = names_of(cls)
    for name, given in level.items():
        if given is not None and name not in own and name not in others:
            raise _error(name, own, where)


def _error(name: str, own: frozenset[str], where: str) -> InvalidRequest:
    alike = difflib.get_close_matches(name[:64], own, n=1, cutoff=_ALIKE)
    advice = f"did you mean {where}{alike[0]}?" if alike else "leave it out"
    return invalid(f"{where}{name[:80]}", f"this server knows no such field; {advice}")
