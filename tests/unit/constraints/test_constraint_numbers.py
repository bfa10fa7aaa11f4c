"""Numbers in JSON schemas mean what `jsonschema` takes them for, end, and are written as given."""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from weft.testing.engine.constraint_texts import accepts, compiled, random_text
from weft.testing.kernels.kernel_checks import fresh_seed


def check(schema: Any, texts: list[str]) -> None:
    """Compares a schema's grammar with its meaning on some texts."""
    grammar, validator = compiled(schema), Draft202012Validator(schema)
    for text in texts:
        assert accepts(grammar, text) == validator.is_valid(json.loads(text)), text


def random_integers() -> list[str]:
    spread = [random.randint(-(10**power), 10**power) for power in range(2, 15)]
    return [str(number) for number in (*range(-60, 200), *spread)]


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 1, "maximum": 150, "multipleOf": 10},
        {"exclusiveMinimum": -21, "maximum": 30, "multipleOf": 7},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 28, "multipleOf": 7.0},
        {"minimum": -100_000, "maximum": 100_000, "multipleOf": 1000},
        {"multipleOf": 3},
        {"multipleOf": 2.5},
        {"minimum": 0, "multipleOf": 3},
        {"minimum": 0, "maximum": 10**8, "multipleOf": 1_000_003},
        {"minimum": 1.5},
        {"maximum": -0.5},
        {"minimum": 2.0, "exclusiveMaximum": 7.5},
        {"minimum": 5, "exclusiveMinimum": 5},
        {"minimum": 9, "exclusiveMinimum": 3, "maximum": 9},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
    ],
)
def test_whole_numbers(bounds: dict[str, Any]) -> None:
    fresh_seed()
    check({"type": "integer", **bounds}, random_integers())
    of_two = {"type": ["integer", "null"], **bounds}
    check(
        {"properties": {"a": of_two}}, [f'{{"a":{text}}}' for text in (*random_integers(), "null")]
    )


@pytest.mark.parametrize("step", [0.25, 0.125, 0.05, 0.75])
def test_multiples_may_leave_zeros_at_their_end_away(step: float) -> None:
    grammar = compiled({"type": "number", "multipleOf": step, "minimum": -3, "maximum": 40})
    for thousandths in range(-4000, 4000, 5):
        text = repr(thousandths / 1000)
        is_multiple = Fraction(text) % Fraction(repr(step)) == 0 and thousandths >= -3000
        assert accepts(grammar, text) == is_multiple, text


@pytest.mark.parametrize("merged", [False, True])
def test_numbers_within_random_bounds(merged: bool) -> None:
    """Walks through the masks end at numbers that are valid, and bounds themselves are allowed."""
    fresh_seed()
    rng = random.Random(random.random())
    for _ in range(60):
        low = round(rng.uniform(-20, 20), rng.randint(0, 4))
        high = round(low + rng.choice([0.0004, 0.05, 1, 30]), 6)
        least, most = (
            rng.choice([f"{one}imum", f"exclusive{one.title()}imum"]) for one in ("min", "max")
        )
        schema: Any = {"type": "number", least: low, most: high}
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice([0.5, 0.25, 2, 0.0001] if not merged else [0.5, 2])
        whole = {"allOf": [schema, {"type": "number"}]} if merged else schema
        try:
            grammar = compiled(whole)
        except ValueError:
            continue
        for _ in range(8):
            value = json.loads(random_text(grammar, rng, b"."))
            exact = Fraction(repr(value))
            assert Draft202012Validator({**schema, "multipleOf": 1e-300}).is_valid(value) or (
                Fraction(repr(low)) <= exact <= Fraction(repr(high))
            ), (schema, value)
            if "multipleOf" in schema:
                assert (exact / Fraction(repr(schema["multipleOf"]))).denominator == 1


def test_decimals_between_random_bounds_are_all_allowed() -> None:
    """The bounds with fewer decimals as well: 0.9 is below 1, 99.7 is below 99.75."""
    fresh_seed()
    rng = random.Random(random.random())
    for _ in range(40):
        low = Fraction(rng.randint(-200_000, 200_000), 10 ** rng.randint(0, 4))
        high = low + Fraction(rng.randint(1, 300_000), 10 ** rng.randint(1, 4))
        least, most = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        schema = {"type": "number", least: float(low), most: float(high)}
        texts = {repr(float(bound)) for bound in (low, high)}
        for decimals in range(1, 6):
            unit = Fraction(1, 10**decimals)
            for bound in (low, high):
                near = math.floor(bound / unit)
                texts |= {repr(float((near + step) * unit)) for step in (-1, 0, 1, 2)}
        # Whole numbers are written without decimals.
        check(schema, sorted(text.removesuffix(".0") for text in texts if "e" not in text))


def test_numbers_end_and_are_finite() -> None:
    fresh_seed()
    rng = random.Random(random.random())
    for schema in ({"type": "number"}, {"type": "integer"}, {"type": "number", "minimum": 3}, {}):
        grammar = compiled(schema)
        for _ in range(20):
            text = random_text(grammar, rng, b'123456789."}]', most=100_000)
            if text[0] in "-0123456789":
                assert len(text) < 40
                assert math.isfinite(json.loads(text))
        for endless in ("1" * 40, "0." + "1" * 40, "1e999"):
            assert not accepts(grammar, endless)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "multipleOf": 100_003}, "#/multipleOf: is supported up to"),
        ({"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3}, "#: no value"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "#: no value"),
        ({"type": "integer", "minimum": 2**70}, "#: no value"),
        ({"type": "number", "multipleOf": 0}, "#/multipleOf: a number above 0"),
        ({"type": "number", "multipleOf": 1e-12}, "#/multipleOf: has more than 10 decimals"),
        ({"type": "number", "multipleOf": 0.07}, "#/multipleOf: cannot be enforced exactly"),
        ({"type": "number", "minimum": "3"}, "#/minimum: a number is expected"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "#: no value"),
        ({"const": 2**53 + 1}, "#/const: "),
        ({"properties": {"a": {"enum": [{"b": [-(2**63) - 1]}]}}}, "#/properties/a/enum: "),
        ({"allOf": [{"multipleOf": 4096}, {"type": "number"}]}, "#/allOf/0/multipleOf: beside"),
    ],
)
def test_what_would_be_ignored_is_refused_with_its_place(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^at ") as refused:
        compiled(schema)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 52.5200066, "maximum": 52.5200066}, "52.5200066", "52.520006"),
        ({"minimum": 0.5, "maximum": 0.500001}, "0.500001", "0.500002"),
        ({"exclusiveMinimum": 0, "maximum": 1e-6}, "0.000001", "0"),
        ({"minimum": -1, "exclusiveMinimum": -1, "maximum": 0}, "-0.5", "-1"),
        ({"exclusiveMaximum": 0}, "-0.5", "-0"),
        ({"minimum": 3, "exclusiveMinimum": 1}, "3", "2.5"),
        ({"multipleOf": 0.01}, "1.25", "1.255"),
        ({"multipleOf": 2}, "4", "5"),
    ],
)
def test_numbers_within_bounds(schema: dict[str, Any], right: str, wrong: str) -> None:
    grammar = compiled({"type": "number", **schema})
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_constants_are_written_as_they_are_given() -> None:
    fresh_seed()
    values = [0.1, -0.5, 3, 10**18, 2**53, -(2**62), round(random.uniform(-9, 9), 9), 1.0, 2.5e-7]
    grammar = compiled({"enum": values})
    for value in values:
        written = str(int(value)) if value == int(value) else f"{Decimal(repr(value)):f}"
        assert accepts(grammar, written), value
    for wrong in ("0.2", "4", "0", str(2**53 + 1)):
        assert not accepts(grammar, wrong)


def test_older_drafts_exclude_bounds_by_a_flag() -> None:
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}
    grammar = compiled({**draft, "minimum": 3, "exclusiveMinimum": True, "maximum": 5})
    assert [number for number in range(9) if accepts(grammar, str(number))] == [4, 5]


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), ("z", "z")])
def test_branches_that_hold_equal_values_exclude_them(first: Any, second: Any) -> None:
    both = {"oneOf": [{"enum": [first, "x"]}, {"enum": [second, "y"]}]}
    grammar = compiled(both)
    assert not accepts(grammar, json.dumps(second, separators=(",", ":")))
    assert accepts(grammar, '"x"')
    assert accepts(grammar, '"y"')
    assert accepts(compiled({"oneOf": [{"enum": [1]}, {"enum": [True]}]}), "true")


def test_steps_of_a_listed_property_hold_beside_those_of_patterns() -> None:
    rng, of_patterns = random.Random(random.random()), {"type": ["number", "string"]}
    schema = {
        "properties": {"a": {"type": "number", "multipleOf": 3}},
        "patternProperties": {"^[ab]": of_patterns | {"maximum": 8.5}},
    }
    grammar = compiled({"type": "object", "additionalProperties": False, **schema})
    for value in ("0", "3", "-3", "6"):
        assert accepts(grammar, f'{{"a": {value}}}')
    steps = [rng.randint(-100, 100) * 3 + rng.choice([1, 2, 0.064771072, 0.5]) for _ in range(50)]
    assert [value for value in steps if accepts(grammar, f'{{"a": {value}}}')] == []
