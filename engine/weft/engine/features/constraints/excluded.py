"""Numbers of a schema without the multiples of a step: those that are not whole, the odd ones.

llguidance has no form for them. So a rewritten schema has the numbers with their bounds, and the
mark `EXCLUDED`; `UniqueMatcher` lets none come that the mark excludes, and begins none that cannot
become another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from weft.contract.schema_keywords import KEYWORDS
from weft.engine.features.constraints.numbers import DECIMALS

Json = Any

EXCLUDED = "x-excluded"
"""Marks numbers in a rewritten schema; its value has `at`, the JSON pointer of their schema as the
client wrote it, and `steps`, whose multiples are excluded. llguidance ignores it.
"""
AMBIGUOUS_NUMBERS = (
    "numbers that are not whole, or are no multiples, cannot be told apart from the other numbers"
    " that may come here; use anyOf"
)
_UNIT = 10**DECIMALS
"""Numbers are counted in the last decimal, so 1 is this many."""
_MOST = 2**63 * _UNIT
_MOST_DIGITS = 20
_MOST_EXACT = 10**15
"""Doubles have so many decimals, wherever the point is."""
_MAX_INTERVALS = 64
_MAX_TRIED = 64
"""Multiples of a step that are tried, to find one that is not excluded."""
_NUMBER = re.compile(
    rb"(?P<sign>-?)(?P<whole>0|[1-9][0-9]{0,30})?(?P<decimals>\.(?P<digits>[0-9]*))?"
)


class AmbiguousNumbers(ValueError):
    """Excluded numbers that a matcher could not recognise."""


class _Interval(NamedTuple):
    """Multiples of a step between two bounds, without those of other steps; all counted in the last
    decimal.
    """

    low: int
    high: int
    step: int
    excluded: frozenset[int] = frozenset()

    @property
    def num_zeros(self) -> int:
        """Decimals that llguidance may want to be written, zeros too: it takes 2.50 for a multiple
        of 0.25, but not 2.5.
        """
        decimals = next(n for n in range(DECIMALS + 1) if self.step * 10**n % _UNIT == 0)
        return decimals if self.step * 10**decimals != _UNIT else 0

    def has_between(self, low: int, high: int) -> bool:
        low, high = max(low, self.low), min(high, self.high)
        first, last = -(-low // self.step) * self.step, high // self.step * self.step
        if first > last:
            return False
        return any(
            first <= one <= last and self._is_left(one)
            for end in (first, (first + last) // 2, last)
            for one in self._near(end)
        )

    def _near(self, value: int) -> Iterator[int]:
        """Multiples of the step to try. Those nearest to a large number equal it to readers who
        have doubles, one between two excluded multiples does not.
        """
        least = value // self.step * self.step
        yield from range(least, least + _MAX_TRIED * self.step, self.step)
        for apart in self.excluded:
            yield (value // apart * apart + apart // 2) // self.step * self.step

    def _is_left(self, value: int) -> bool:
        """Whether a number is no excluded multiple, nor becomes one to readers who have doubles."""
        if any(value % step == 0 for step in self.excluded):
            return False
        if not self.excluded or abs(value) < _MOST_EXACT or value % _UNIT == 0:
            return True
        read = Fraction(repr(value / _UNIT)) * _UNIT
        return all(read % step for step in self.excluded)


_ALL = (_Interval(-_MOST, _MOST, 1),)


class NumberSet:
    """Numbers that a place of a text may have."""

    def __init__(self, intervals: Iterable[_Interval]) -> None:
        self._intervals = frozenset(intervals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberSet) and self._intervals == other._intervals

    def __hash__(self) -> int:
        return hash(self._intervals)

    def __bool__(self) -> bool:
        return self._has_between(-_MOST, _MOST)

    @property
    def is_begun(self) -> bool:
        """Whether a grammar, which excludes no step, may let one of the numbers begin."""
        return bool(self._intervals)

    def has(self, written: bytes) -> bool:
        """Whether a number as it is written, without an exponent, is one of the numbers."""
        found = _NUMBER.fullmatch(written)
        if found is None or found["whole"] is None or found["digits"] == b"":
            return False
        if len(found["digits"] or b"") > DECIMALS:
            return False
        value = _between(found, 0)[0]
        return self._has_between(*_signed(found, value, value))

    def may_become(self, begun: bytes) -> bool:
        """Whether a text is the beginning of one of the numbers, or one of them. Zeros at the end
        of its decimals count only if others can follow, or llguidance may want them: it takes no
        -0.50 for a number above -1.
        """
        found = _NUMBER.fullmatch(begun)
        digits = found["digits"] or b"" if found is not None else b""
        if found is None or len(digits) > DECIMALS:
            return False
        if found["whole"] is None:
            is_sign = found["decimals"] is None
            return is_sign and self._has_between(*_signed(found, 0, _MOST))
        if found["decimals"] is not None and digits[-1:] in (b"", b"0"):
            num_zeros = max(1, len(digits))
            least, most = _between(found, 0)
            return any(
                one.has_between(*_signed(found, least + (num_zeros > one.num_zeros), most))
                for one in self._intervals
            )
        is_longer = found["decimals"] is None and found["whole"] != b"0"
        return any(
            self._has_between(*_signed(found, *_between(found, more)))
            for more in range(_MOST_DIGITS if is_longer else 1)
        )

    def _has_between(self, low: int, high: int) -> bool:
        return any(interval.has_between(low, high) for interval in self._intervals)


def _between(found: re.Match[bytes], num_more: int) -> tuple[int, int]:
    """Least and largest number, without its sign, whose text goes on after a beginning with some
    digits more before its decimals.
    """
    digits = found["digits"] or b""
    unit = _UNIT // 10 ** len(digits)
    least = int(found["whole"] + digits) * unit * 10**num_more
    return least, least + unit * 10**num_more - 1


def _signed(found: re.Match[bytes], low: int, high: int) -> tuple[int, int]:
    return (-high, -low) if found["sign"] else (low, high)


def excluded_steps(schema: Json) -> tuple[Fraction, bool] | None:
    """The step whose multiples are what a schema allows of numbers, and whether it allows only
    numbers; None: it is not of this kind.
    """
    if not isinstance(schema, dict) or KEYWORDS & schema.keys() - {"type", "multipleOf"}:
        return None
    kind, step = schema.get("type"), schema.get("multipleOf", 1 if "type" in schema else None)
    if kind not in ("integer", "number", None) or (kind == "number" and "multipleOf" not in schema):
        return None
    if not isinstance(step, int | float) or isinstance(step, bool):
        return None
    if not math.isfinite(step) or step <= 0:
        return None
    exact = Fraction(repr(step))
    if (exact * _UNIT).denominator != 1:
        return None
    if kind == "integer":
        exact = Fraction(exact.numerator)
    return exact, kind is not None


def without_multiples(schema: Json, steps: Iterable[Fraction], at: str) -> Json:
    """Marks the numbers of a rewritten schema; False if none is left."""
    steps = sorted(set(steps))
    if schema is False:
        return False
    if "anyOf" in schema:
        parts = [without_multiples(part, steps, at) for part in schema["anyOf"]]
        left = [part for part in parts if part is not False]
        return {"anyOf": left} if len(left) > 1 else left[0] if left else False
    if "enum" in schema:
        values = [
            value
            for value in schema["enum"]
            if all((Fraction(repr(value)) / step).denominator != 1 for step in steps)
        ]
        return {"enum": values} if values else False
    marked = {**schema, EXCLUDED: {"at": at, "steps": [str(step) for step in steps]}}
    return marked if number_set(marked, {}) else False


def number_set(schema: Json, definitions: Mapping[str, Json]) -> NumberSet:
    """The numbers that a rewritten schema allows. Raises AmbiguousNumbers if they are of too many
    kinds.
    """
    return NumberSet(_numbers(schema, definitions, frozenset()))


def _numbers(
    schema: Json, definitions: Mapping[str, Json], outer: frozenset[str]
) -> tuple[_Interval, ...]:
    if isinstance(schema, bool):
        return _ALL if schema else ()
    found = _own_numbers(schema)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in outer:
            return ()
        found = _both(found, _numbers(definitions[name], definitions, outer | {name}))
    if "anyOf" in schema:
        either = [one for part in schema["anyOf"] for one in _numbers(part, definitions, outer)]
        found = _both(found, tuple(dict.fromkeys(either)))
    for part in schema.get("allOf", ()):
        found = _both(found, _numbers(part, definitions, outer))
    return found


def _own_numbers(schema: Mapping[str, Json]) -> tuple[_Interval, ...]:
    if "enum" in schema:
        values = [_counted(value) for value in schema["enum"] if type(value) in (int, float)]
        if any(value.denominator != 1 for value in values):
            raise AmbiguousNumbers(AMBIGUOUS_NUMBERS)
        return tuple(_Interval(int(value), int(value), 1) for value in values)
    kind = schema.get("type")
    if kind not in ("integer", "number"):
        return _ALL if kind is None else ()
    low, high = _counted(schema["minimum"]), _counted(schema["maximum"])
    least = 1 if kind == "integer" else Fraction(1, _UNIT)
    step = int(_counted(schema.get("multipleOf", least)))
    steps = schema.get(EXCLUDED, {}).get("steps", ())
    excluded = frozenset(int(Fraction(one) * _UNIT) for one in steps)
    return (_Interval(math.ceil(low), math.floor(high), step, excluded),)


def _counted(value: float | Fraction) -> Fraction:
    exact: Fraction = value if isinstance(value, Fraction) else Fraction(repr(value))
    return Fraction(exact * _UNIT)


def _both(one: tuple[_Interval, ...], other: tuple[_Interval, ...]) -> tuple[_Interval, ...]:
    if one is _ALL or other is _ALL:
        return other if one is _ALL else one
    found = []
    for first in one:
        for second in other:
            low, high = max(first.low, second.low), min(first.high, second.high)
            step, excluded = math.lcm(first.step, second.step), first.excluded | second.excluded
            if low <= high:
                found.append(_Interval(low, high, step, excluded))
    if len(found) > _MAX_INTERVALS:
        raise AmbiguousNumbers(AMBIGUOUS_NUMBERS)
    return tuple(dict.fromkeys(found))
