"""Rewrites the number keywords of JSON schemas, so that numbers have an end and obey the schema.

llguidance by itself allows endless digits, reads bounds as floating-point numbers, and lets zero
pass where `exclusiveMinimum` is 0. Inclusive bounds on both sides and a last decimal avoid this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

Json = Any

DECIMALS = 10
"""Most decimals of a number."""
LARGEST = 10**15
"""Largest number where the schema has no bound: every reader of JSON represents it exactly."""
_MOST = 2**63 - 1
"""Largest number that llguidance has a bound for."""
MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, without its decimals: a larger one takes long to compile."""
MAX_MERGED = 1_000
"""Largest `multipleOf`, in hundredths, where other schemas hold at the same place."""
MAX_LISTED = 1024
"""Most multiples between two bounds that are written out as a list."""
_BETWEEN = {"minimum": -LARGEST, "maximum": LARGEST}
FREE_NUMBERS: dict[str, Json] = {
    "integer": {"type": "integer", **_BETWEEN},
    "number": {"type": "number", **_BETWEEN, "multipleOf": 1 / 10**DECIMALS},
}
"""Numbers by type that no keyword bounds."""


def check_number(value: float) -> bool:
    """Whether a constant number has an exact JSON form."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63 and int(float(value)) == value
    return math.isfinite(value)


def prepare_number(
    schema: Mapping[str, Json],
    at: str,
    *,
    is_integer: bool,
    is_merged: bool = False,
) -> Json:
    """Rewrites the keywords of numbers. Returns a schema; False if no number satisfies the
    keywords. Raises ValueError if the keywords cannot be enforced.

    Args:
        at: The schema's JSON pointer, for messages.
        is_integer: Whether only whole numbers are wanted.
        is_merged: Other schemas hold at the same place.
    """
    given = {name: _number(schema, name, at) for name in ("minimum", "maximum", "multipleOf")}
    step, decimals = _step(given["multipleOf"], f"{at}/multipleOf", is_integer=is_integer)
    unit = Fraction(1, 10**decimals)
    low, high = _bounds(schema, given, at, unit)
    if given["multipleOf"] is not None:
        low, high = math.ceil(low / step) * step, math.floor(high / step) * step
    if low > high:
        return False
    out: dict[str, Json] = {"type": "integer" if is_integer else "number"}
    if step.numerator > MAX_MULTIPLE:
        count = (high - low) / step
        if count >= MAX_LISTED:
            message = f"is supported up to {MAX_MULTIPLE:,} without its decimals"
            raise ValueError(f"at {at}/multipleOf: {message}")
        return {"enum": [_json(low + i * step) for i in range(int(count) + 1)]}
    # llguidance multiplies the steps of schemas that hold together, in 32 bits.
    is_small = step * 100 <= MAX_MERGED and (step * 100).denominator == 1
    if is_merged and given["multipleOf"] is not None and not is_small:
        message = f"beside other schemas it is supported up to {MAX_MERGED // 100}"
        raise ValueError(f"at {at}/multipleOf: {message}, with two decimals")
    if low == high:
        return {"enum": [_json(low)]}
    out |= {"minimum": _json(low, -1), "maximum": _json(high, 1)}
    if given["multipleOf"] is not None or not (is_integer or is_merged):
        out["multipleOf"] = _json(step)
    found: list[Json] = [out]
    if cut := _cut_bounds(low, high, step, decimals):
        found.append({"enum": [_json(value) for value in cut]})
    if not is_merged and step * 10**decimals != 1:
        # llguidance takes 2.50 for a multiple of 0.25, but 2.5 for none: it is one of 0.5.
        multiples = {_common_multiple(step, Fraction(1, 10**count)) for count in range(1, decimals)}
        shorter = [one for one in sorted(multiples - {step}) if math.ceil(low / one) * one <= high]
        found += ({**out, "multipleOf": _json(multiple)} for multiple in shorter)
    return {"anyOf": found} if len(found) > 1 else out


def _cut_bounds(low: Fraction, high: Fraction, step: Fraction, decimals: int) -> list[Fraction]:
    """The bounds with fewer decimals, as far as they are between the bounds and are multiples.

    llguidance refuses them: between 0 and 99.75 it takes 99.6 and 99.70, but not 99.7.
    """
    cut = {
        Fraction(math.trunc(bound * 10**count), 10**count)
        for bound in (low, high)
        for count in range(1, decimals)
    }
    return sorted(
        value
        for value in cut - {low, high}
        if low <= value <= high and value.denominator != 1 and (value / step).denominator == 1
    )


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(
        math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator)
    )


def _number(schema: Mapping[str, Json], name: str, at: str) -> Fraction | None:
    value = schema.get(name)
    if name not in schema:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"at {at}/{name}: a number is expected")
    # `repr` gives the number as it was written, so 0.1 is exactly a tenth.
    return Fraction(repr(value))


def _step(given: Fraction | None, at: str, *, is_integer: bool) -> tuple[Fraction, int]:
    """The step that numbers are multiples of, and the step's number of decimals."""
    if given is None:
        return (Fraction(1), 0) if is_integer else (Fraction(1, 10**DECIMALS), DECIMALS)
    if given <= 0:
        raise ValueError(f"at {at}: a number above 0 is expected")
    step = Fraction(given.numerator) if is_integer else given
    decimals = 0
    while (step * 10**decimals).denominator != 1:
        decimals += 1
        if decimals > DECIMALS:
            raise ValueError(f"at {at}: has more than {DECIMALS} decimals")
    scaled = float(step)
    for _ in range(decimals):
        scaled *= 10.0
    if not is_integer and scaled != step * 10**decimals:
        raise ValueError(f"at {at}: cannot be enforced exactly")
    return step, decimals


def _bounds(
    schema: Mapping[str, Json],
    given: Mapping[str, Fraction | None],
    at: str,
    unit: Fraction,
) -> tuple[Fraction, Fraction]:
    low, high = given["minimum"], given["maximum"]
    lows = [] if low is None else [math.ceil(low / unit) * unit]
    highs = [] if high is None else [math.floor(high / unit) * unit]
    for name, bound in (("exclusiveMinimum", low), ("exclusiveMaximum", high)):
        value = schema.get(name)
        if isinstance(value, bool):  # as in draft 4 and in OpenAPI 3.0
            excluded = bound if value else None
        else:
            excluded = _number(schema, name, at)
        if excluded is None:
            continue
        if name == "exclusiveMinimum":
            lows.append((math.floor(excluded / unit) + 1) * unit)
        else:
            highs.append((math.ceil(excluded / unit) - 1) * unit)
    most = Fraction(_MOST)
    return max([*(lows or [Fraction(-LARGEST)]), -most]), min(
        [*(highs or [Fraction(LARGEST)]), most]
    )


def _json(value: Fraction, outward: int = 0) -> int | float:
    """A number for JSON. If `value` cannot be represented exactly, the result is a neighbour, which
    must not lie on the side `outward` of it: -1 below, 1 above; 0: either.
    """
    if value.denominator == 1 and abs(value) <= 2**53:
        return int(value)
    written = float(value)
    exact = Fraction(repr(written))
    if outward < 0 and exact < value:
        written = math.nextafter(written, math.inf)
    if outward > 0 and exact > value:
        written = math.nextafter(written, -math.inf)
    return int(written) if value.denominator == 1 else written
