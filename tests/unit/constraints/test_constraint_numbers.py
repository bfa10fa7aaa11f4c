"""Numbers and dates of JSON schemas: just valid texts are accepted, or the schema is refused."""

from __future__ import annotations

import datetime
import json
import random
from typing import Any

import pytest
import xgrammar
from jsonschema import Draft202012Validator
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.constraints.schema import prepare_schema
from weft.engine.request import Constraint
from weft.testing.kernels.kernel_checks import fresh_seed

BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[256]
)
SOURCE = GrammarSource(BYTES, 1 << 28)


def compiled(schema: Any) -> xgrammar.CompiledGrammar:
    return SOURCE.read(SOURCE.compile(Constraint(kind="json_schema", text=json.dumps(schema))))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


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
        {"minimum": 1.5},
        {"maximum": -0.5},
        {"minimum": 2.0, "exclusiveMaximum": 7.5},
        {"minimum": 5, "exclusiveMinimum": 5},
        {"minimum": 9, "exclusiveMinimum": 3, "maximum": 9},
    ],
)
def test_whole_numbers(bounds: dict[str, Any]) -> None:
    fresh_seed()
    check({"type": "integer", **bounds}, random_integers())
    of_two = {"type": ["integer", "null"], **bounds}
    check(
        {"properties": {"a": of_two}}, [f'{{"a":{text}}}' for text in (*random_integers(), "null")]
    )


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 0, "multipleOf": 3}, "$.multipleOf: is supported"),
        ({"type": "integer", "multipleOf": 2.5}, "$.multipleOf: only whole"),
        ({"type": "integer", "multipleOf": 257}, "$.multipleOf: 257 is supported"),
        ({"type": "integer", "minimum": 0, "maximum": 10**6, "multipleOf": 3}, "multiples lie"),
        ({"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3}, "no multiple of 3"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no whole number"),
        ({"type": "integer", "minimum": 2**63}, "$.minimum: 9223372036854775808 has more than 64"),
        ({"type": "number", "multipleOf": 0.1}, "$.multipleOf: is supported for integers"),
        ({"items": {"type": "number", "minimum": 1e-7, "maximum": 2e-7}}, "$.items: no number of"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "six decimals"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "no number lies"),
        ({"const": 2**63}, "$: 9223372036854775808 has more than 64"),
        ({"properties": {"a": {"enum": [{"b": [-(2**63) - 1]}]}}}, "$.properties.a: -92"),
    ],
)
def test_what_the_compiler_would_ignore_is_refused_with_its_place(schema: Any, told: str) -> None:
    with pytest.raises(ValueError, match=r"^at ") as refused:
        compiled(schema)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 52.5200066, "maximum": 52.5200066}, f"{52.5200066:.17g}", "52.520006"),
        ({"minimum": 0.5, "maximum": 0.500001}, "0.500001", "0.500002"),
        ({"exclusiveMinimum": 0, "maximum": 1e-6}, "0.000001", "0"),
        ({"minimum": -1, "exclusiveMinimum": -1, "maximum": 0}, "-0.5", "-1"),
        ({"minimum": 3, "exclusiveMinimum": 1}, "3", "2.5"),
    ],
)
def test_numbers_within_bounds(schema: dict[str, Any], right: str, wrong: str) -> None:
    grammar = compiled({"type": "number", **schema})
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_largest_listed_numbers_keep_their_digits() -> None:
    values = [2**63 - 1, -(2**63), 2**53 + 1]
    grammar = compiled({"enum": values})
    assert all(accepts(grammar, str(value)) for value in values)
    assert not accepts(grammar, str(2**63))


def test_older_drafts_exclude_bounds_by_a_flag() -> None:
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}
    grammar = compiled({**draft, "minimum": 3, "exclusiveMinimum": True, "maximum": 5})
    assert [number for number in range(9) if accepts(grammar, str(number))] == [4, 5]


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), ([1, {"a": 2}], [1.0, {"a": 2.0}])])
def test_branches_that_hold_equal_numbers_overlap(first: Any, second: Any) -> None:
    with pytest.raises(ValueError, match="may overlap"):
        prepare_schema(json.dumps({"oneOf": [{"enum": [first]}, {"enum": [second]}]}))
    prepare_schema(json.dumps({"oneOf": [{"enum": [1]}, {"enum": [True]}]}))


def test_dates_are_of_the_calendar() -> None:
    grammar = compiled({"type": "string", "format": "date"})
    fresh_seed()
    years = [1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999, *random.sample(range(1, 10_000), 8)]
    for year in (0, *years):
        for month in range(14):
            for day in (0, 1, 9, 10, 19, 20, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts(grammar, f'"{text}"') == is_date(text), text


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_times_of_days() -> None:
    grammar = compiled({"type": "string", "format": "date-time"})
    right = ["2024-02-29T00:00:00Z", "1999-12-31T23:59:59.123456789+14:00"]
    wrong = [
        *("2023-02-29T00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T00:00:00", "2024-02-29"),
        *("2024-02-29T00:00:006Z", "2024-02-29T00:00:60Z"),
    ]
    assert [accepts(grammar, f'"{text}"') for text in right + wrong] == [True] * 2 + [False] * 6
    assert accepts(compiled({"type": ["string", "null"], "format": "time"}), '"12:30:00-05:00"')
