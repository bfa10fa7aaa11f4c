"""Sampling parameters in the bodies of dialects, from the one table `PARAMETERS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model
from weft.contract.request import PARAMETERS, Parameter

B = TypeVar("B", bound=BaseModel)


def with_sampling(base: type[B], dialect: str, whole: Any = int) -> type[B]:
    """A body with the sampling parameters of a dialect, all of them optional.

    Args:
        base: The body's base.
        dialect: A name of `Parameter.names`.
        whole: Type of whole numbers.
    """
    fields: dict[str, Any] = {
        name: ((whole if one.is_whole else float) | None, Field(None, description=one.description))
        for one in PARAMETERS.values()
        if (name := one.name_in(dialect))
    }
    return create_model(f"{base.__name__}WithSampling", __base__=base, **fields)


def given_numbers(body: object, dialect: str) -> dict[str, float]:
    """The sampling parameters that a body gives, by their names in `PARAMETERS`."""
    given: dict[str, float] = {}
    for name, one in PARAMETERS.items():
        own = one.name_in(dialect)
        value: float | None = getattr(body, own) if own else None
        if value is not None:
            value = one.aliases.get(value, value)
        if value is not None:
            given[name] = value
    return given


def sampling_bounds(dialect: str) -> Mapping[str, dict[str, Any]]:
    """Keywords of JSON schema for the parameters of a dialect, by its names."""
    return {name: _bounds(one) for one in PARAMETERS.values() if (name := one.name_in(dialect))}


def _bounds(one: Parameter) -> dict[str, Any]:
    least = "exclusiveMinimum" if one.excludes_low else "minimum"
    return {least: min([one.low, *one.aliases]), "maximum": one.high}
