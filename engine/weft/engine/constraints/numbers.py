"""Numbers in JSON schemas: brought into the form that the grammar compiler enforces exactly.

The compiler writes bounds with at most six decimals, leaves out a `multipleOf` beside bounds or
above 1024, and takes whole numbers of more than 64 bits for floating-point ones.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

Json = Any
"""A parsed JSON value of any type."""

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords of numbers."""
_MAX_LISTED = 4096
"""Most multiples between two bounds, which are listed one by one."""
_MAX_MULTIPLE = 256
"""A larger one takes seconds to compile."""
_DECIMALS = 10**6
_LEAST, _MOST = -(2**63), 2**63 - 1


def prepare_numbers(schema: dict[str, Json], types: list[str], where: str) -> dict[str, Json]:
    """Rewrites the keywords of numbers in a schema of some types.

    Args:
        schema: May be changed.
        types: Names of the types.
        where: Its place, for messages.

    Returns:
        The schema, or another one that stands for it.

    Raises:
        ValueError: No number is allowed, or what is asked for cannot be enforced.
    """
    if not set(NUMERIC) & schema.keys() or not {"integer", "number"} & set(types):
        return schema
    _check_order(schema, where)
    values = _integers(schema, where) if "number" not in types else _reals(schema, where)
    if values is None:
        return schema
    rest = [name for name in types if name not in ("integer", "number")]
    listed: dict[str, Json] = {"enum": values}
    others = {name: value for name, value in schema.items() if name not in NUMERIC}
    definitions: dict[str, Json] = {
        name: others.pop(name) for name in ("$defs", "definitions") if name in others
    }
    if rest:
        return {"anyOf": [listed, {**others, "type": rest}], **definitions}
    return listed | definitions


def check_listed(values: list[Json], where: str) -> None:
    """Raises ValueError where listed values have whole numbers of more than 64 bits."""
    for value in values:
        if isinstance(value, dict):
            check_listed([*value.values()], where)
        elif isinstance(value, list):
            check_listed(value, where)
        elif isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise ValueError(f"at {where}: {value} has more than 64 bits, which is not supported")


def _check_order(schema: dict[str, Json], where: str) -> None:
    """Makes drafts' older, boolean `exclusive` bounds numbers."""
    for kind in ("Minimum", "Maximum"):
        name, exclusive = kind.lower(), f"exclusive{kind}"
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and name in schema:
            schema[exclusive] = schema.pop(name)
    for name in NUMERIC:
        if isinstance(schema.get(name), float) and not math.isfinite(schema[name]):
            raise ValueError(f"at {where}.{name}: a finite number is expected")


def _integers(schema: dict[str, Json], where: str) -> list[int] | None:
    """Makes bounds whole and inclusive; all allowed numbers where they are to be listed."""
    lows, highs = [], []
    if "minimum" in schema:
        lows.append(math.ceil(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema.pop("exclusiveMinimum")) + 1)
    if "maximum" in schema:
        highs.append(math.floor(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema.pop("exclusiveMaximum")) - 1)
    for name, bounds in (("minimum", [max(lows)] if lows else []),
                         ("maximum", [min(highs)] if highs else [])):  # fmt: skip
        for bound in bounds:
            if not _LEAST <= bound <= _MOST:
                raise ValueError(f"at {where}.{name}: {bound} has more than 64 bits")
            schema[name] = bound
    if lows and highs and schema["minimum"] > schema["maximum"]:
        raise ValueError(f"at {where}: no whole number lies within the bounds")
    if "multipleOf" not in schema:
        return None
    return _multiples(schema, where)


def _multiples(schema: dict[str, Json], where: str) -> list[int] | None:
    step = schema["multipleOf"]
    if step != int(step):
        raise ValueError(f"at {where}.multipleOf: only whole numbers are supported")
    step = schema["multipleOf"] = int(step)
    if "minimum" not in schema and "maximum" not in schema:
        if step > _MAX_MULTIPLE:
            message = f"{step} is supported beside minimum and maximum alone"
            raise ValueError(f"at {where}.multipleOf: {message}")
        return None
    if "minimum" not in schema or "maximum" not in schema:
        message = "is supported without bounds, or with minimum and maximum"
        raise ValueError(f"at {where}.multipleOf: {message}")
    first = -(-schema["minimum"] // step) * step
    count = max(0, (schema["maximum"] - first) // step + 1)
    if not count:
        raise ValueError(f"at {where}: no multiple of {step} lies within the bounds")
    if count > _MAX_LISTED:
        message = (
            f"{count:,} multiples lie within the bounds, at most {_MAX_LISTED:,} are supported"
        )
        raise ValueError(f"at {where}.multipleOf: {message}")
    return [first + number * step for number in range(count)]


def _reals(schema: dict[str, Json], where: str) -> list[Json] | None:
    """Checks that a number of few decimals lies within the bounds; one that is bound from both
    sides is listed.
    """
    if "multipleOf" in schema:
        raise ValueError(f"at {where}.multipleOf: is supported for integers only")
    least = _strictest(schema, "minimum", "exclusiveMinimum", 1)
    most = _strictest(schema, "maximum", "exclusiveMaximum", -1)
    if least is None or most is None:
        return None
    (low, is_open), (high, is_below) = least, most
    if low > high or (low == high and (is_open or is_below)):
        raise ValueError(f"at {where}: no number lies within the bounds")
    if low == high:
        return [schema["minimum"]]
    first = math.floor(low * _DECIMALS) + 1 if is_open else math.ceil(low * _DECIMALS)
    last = math.ceil(high * _DECIMALS) - 1 if is_below else math.floor(high * _DECIMALS)
    if first > last:
        message = "no number of up to six decimals lies within the bounds; give them in other units"
        raise ValueError(f"at {where}: {message}")
    return None


def _strictest(
    schema: dict[str, Json], inclusive: str, exclusive: str, sign: int
) -> tuple[Fraction, bool] | None:
    """Leaves the stricter of two bounds, below (`sign` 1) or above (-1) which nothing is allowed.

    Returns:
        Its value, and whether that is excluded; None: there is no bound.
    """
    bounds = {name: schema.pop(name) for name in (inclusive, exclusive) if name in schema}
    if not bounds:
        return None
    value, is_open, name = max(
        (sign * _exact(bound), name == exclusive, name) for name, bound in bounds.items()
    )
    schema[name] = bounds[name]
    return sign * value, is_open


def _exact(number: float) -> Fraction:
    """A number as it is written."""
    return Fraction(str(number))
