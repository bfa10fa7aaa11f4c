"""Numbers that are not whole, or are no multiples: exactly those come, and no text has no end."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from weft.contract.request import Constraint
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.unique import UniqueMatcher
from weft.engine.features.constraints.vocabulary import tokenizer_of
from weft.testing.engine.constraint_texts import accepts, compiled, random_text
from weft.testing.engine.schema_judge import problem
from weft.testing.kernels.kernel_checks import fresh_seed

WHOLE, NUMBER, NULL = {"type": "integer"}, {"type": "number"}, {"type": "null"}
EITHER = {"oneOf": [WHOLE, NUMBER]}
JOINED = [
    *('{"', '":', '": ', '":1', '": 0.', ",1", ", 2.5", "[1", "[0.5", "[-", "[1,", "0.5]", ".0"),
    *(".5", "1.5", "10", "00", "000", "0000000000", "-0", "-1.", "1}", "5}", "0,", "5,", "],[1"),
    *("null", "null]", '"a', 'a"', '",', '"a",1', '"1', "1,2", "1.0,", "1.5,", "-0.5", ".", "25"),
]
VALUES = ["0", "-0", "1", "-1", "2", "3", "7", "10", "100", "12345", "0.5", "-0.5", "1.5", "2.25"]
VALUES += ["0.0", "1.0", "1.000", "-3.0", "0.50", "0.9999999999", "1.0000000001", "0.1", "9.75"]
VALUES += ["-0.0000000001", "99.5", "0.0000000000", "-7", "4.5", "6", "12.5", "null", '"a"', "true"]

FIXED: list[Any] = [
    EITHER,
    {"oneOf": [NUMBER, WHOLE, NULL]},
    {"oneOf": [WHOLE, NUMBER, {"type": "string"}, {"type": "array", "items": EITHER}]},
    {"oneOf": [{**WHOLE, "minimum": 0}, NUMBER]},
    {"oneOf": [WHOLE, {**NUMBER, "exclusiveMaximum": 1, "minimum": 0}]},
    {"oneOf": [WHOLE, {**NUMBER, "maximum": 5}], "minimum": 4},
    {"oneOf": [{"$ref": "#/$defs/a"}, NUMBER], "$defs": {"a": WHOLE}},
    {"oneOf": [{**NUMBER, "multipleOf": 0.5}, {**NUMBER, "maximum": 3}]},
    {"oneOf": [{**WHOLE, "multipleOf": 3}, WHOLE]},
    {"oneOf": [{**NUMBER, "multipleOf": 2}, {**NUMBER, "multipleOf": 3}]},
    {**NUMBER, "not": WHOLE},
    {"type": ["number", "null"], "not": WHOLE, "maximum": 1},
    {**NUMBER, "not": WHOLE, "minimum": 1, "exclusiveMaximum": 2, "multipleOf": 0.25},
    {**WHOLE, "not": {"multipleOf": 2}},
    {**WHOLE, "allOf": [{"not": {"multipleOf": 2}}, {"not": {"multipleOf": 3}}], "maximum": 9},
    {"allOf": [EITHER, {**NUMBER, "minimum": -1, "maximum": 1}]},
    {"anyOf": [{**NUMBER, "not": WHOLE}, {**WHOLE, "maximum": 3}]},
    {"anyOf": [{**NUMBER, "not": WHOLE, "minimum": 9}, {"enum": [1, 10, 100]}]},
    {"not": WHOLE},
    {"if": WHOLE, "then": {"minimum": 5}, "else": {"type": ["number", "null"], "maximum": 2}},
]


def around(schema: Any) -> list[tuple[Any, str]]:
    """A schema at several places, and texts with a place for its value."""
    inner = {"type": "object", "properties": {"a": schema, "b": schema, "c": {"type": "string"}}}
    return [
        (schema, "{}"),
        ({"type": "array", "items": schema}, "[{0},{0}]"),
        ({**inner, "required": ["a"]}, '{{"a":{},"c":"1,2.0"}}'),
        ({"type": "object", "additionalProperties": schema}, '{{"x":{0}, "y": {0}}}'),
        ({"type": "array", "prefixItems": [{"type": "boolean"}, schema]}, "[true,{}]"),
    ]


def is_valid(schema: Any, text: str) -> bool:
    return not problem(schema, text)


def hoisted(schema: Any, outer: Any) -> Any:
    """The outer schema with the definitions of the inner one, where its references find them."""
    return outer if outer is schema else {**outer, "$defs": schema.get("$defs", {})}


def a_schema(rng: random.Random) -> Any:
    """Numbers that overlap, with random bounds and steps, beside other types."""
    parts: list[Any] = []
    for _ in range(rng.choice([2, 2, 2, 3])):
        part: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        if rng.random() < 0.3:
            part[rng.choice(["minimum", "exclusiveMinimum"])] = rng.choice([-3, 0, 0.5, 1, 7, 99])
        if rng.random() < 0.3:
            part[rng.choice(["maximum", "exclusiveMaximum"])] = rng.choice([0, 1, 1.5, 3, 10, 100])
        if rng.random() < 0.2:
            part["multipleOf"] = rng.choice([0.25, 0.5, 2, 3] if part["type"] == "number" else [2])
        parts.append(part)
    if rng.random() < 0.2:
        return {**parts[0], "not": {**parts[1]}}
    if rng.random() < 0.4:
        parts.append(rng.choice([NULL, {"type": "string"}, {"type": ["boolean", "array"]}]))
        rng.shuffle(parts)
    return {"oneOf": parts, **rng.choice([{}, {}, {"minimum": 0.5}, {"maximum": 12}])}


@pytest.mark.parametrize("schema", FIXED, ids=json.dumps)
def test_values_are_allowed_as_by_jsonschema(schema: Any) -> None:
    for outer, text in around(schema):
        whole = hoisted(schema, outer)
        grammar, num_allowed = compiled(whole), 0
        for value in VALUES:
            written = text.format(value)
            is_allowed = accepts(grammar, written)
            assert is_valid(whole, written) or not is_allowed, written
            # Whole numbers are written without decimals where they are no multiples of decimals.
            if not value.rstrip("0").endswith("."):
                assert is_allowed == is_valid(whole, written), written
            num_allowed += is_allowed
        assert num_allowed


def test_random_schemas_allow_exactly_what_is_valid() -> None:
    fresh_seed()
    rng = random.Random(random.random())
    num_watched = 0
    for _ in range(30):
        schema = a_schema(rng)
        outer, text = rng.choice(around(schema))
        try:
            grammar = compiled(outer)
        except ValueError:
            continue
        num_watched += isinstance(grammar, UniqueMatcher)
        values = [*VALUES, *(f"{rng.uniform(-20, 20):.{rng.randrange(1, 5)}f}" for _ in range(30))]
        for value in values:
            written = text.format(value)
            is_allowed = accepts(grammar, written)
            assert is_valid(outer, written) or not is_allowed, (outer, written)
        for _ in range(10):
            walked = random_text(grammar, rng, b'.05"}],')
            assert is_valid(outer, walked), (outer, walked)
    assert num_watched > 3


def a_vocabulary() -> tuple[GrammarSource, list[bytes], int]:
    spelled = [*(bytes([byte]) for byte in range(255)), *(text.encode() for text in JOINED)]
    end = len(spelled)
    return GrammarSource(tokenizer_of([*spelled, b""], [end])), spelled, end


@pytest.mark.parametrize("schema", FIXED, ids=json.dumps)
def test_a_mask_has_the_tokens_that_may_be_consumed_and_texts_end(schema: Any) -> None:
    source, spelled, end = a_vocabulary()
    fresh_seed()
    rng = random.Random(random.random())
    for outer, _ in around(schema):
        whole = hoisted(schema, outer)
        grammar = source.compile(Constraint(kind="json_schema", text=json.dumps(whole)))
        matcher, ids = grammar.deep_copy(), list[int]()
        while len(ids) < 60:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(mask, bitorder="little")[: end + 1]
            may_come = np.flatnonzero(bits).tolist()
            assert may_come, b"".join(spelled[token] for token in ids)
            for token in range(255, end):
                is_consumed = matcher.try_consume_tokens([token]) == 1
                assert is_consumed == bool(bits[token]), spelled[token]
                if is_consumed:
                    matcher.rollback(1)
            assert matcher.is_accepting() == bool(bits[end])
            if bits[end] and rng.random() < 0.5:
                break
            likely = [token for token in may_come if token >= 255 or token in b'05.,}]"']
            token = rng.choice(likely if likely and rng.random() < 0.8 else may_come)
            if token == end:
                break
            assert matcher.consume_token(token)
            ids.append(token)
        else:
            continue
        text = b"".join(spelled[token] for token in ids).decode()
        assert is_valid(whole, text), (whole, text)


def test_a_text_that_is_taken_back_is_followed_again() -> None:
    grammar = compiled({"type": "array", "items": EITHER})
    matcher = grammar.deep_copy()
    assert matcher.try_consume_tokens([*b"[1.5,2"]) == 6
    copied = matcher.deep_copy()
    assert matcher.rollback(4)
    assert matcher.try_consume_tokens([*b",3"]) == 0
    assert matcher.try_consume_tokens([*b".25]"]) == 4
    assert matcher.is_accepting()
    assert copied.try_consume_tokens([*b"]"]) == 0
    assert copied.try_consume_tokens([*b".01]"]) == 4


def test_other_conditions_of_the_same_objects() -> None:
    """Where a number's place alone does not tell which numbers may come, none comes."""
    kinds = [
        {"properties": {"kind": {"const": kind}, "x": part}, "required": ["kind", "x"]}
        for kind, part in (("a", {"type": ["number", "null"], "not": WHOLE}), ("b", NUMBER))
    ]
    grammar = compiled({"type": "object", "anyOf": kinds})
    assert accepts(grammar, '{"kind":"a","x":null}')
    assert accepts(grammar, '{"kind":"b","x":1}')
    assert not accepts(grammar, '{"kind":"a","x":1}')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "items": EITHER, "uniqueItems": True}, "#/items/oneOf/0"),
        (
            {
                "anyOf": [
                    {"properties": {"k": {"const": k}, "x": part}, "required": ["x"]}
                    for k, part in (("a", EITHER), ("b", NUMBER))
                ]
            },
            "#/anyOf/0/properties/x/oneOf/0",
        ),
        ({**NUMBER, "multipleOf": 2, "not": WHOLE}, "#"),
    ],
    ids=json.dumps,
)
def test_what_cannot_be_told_apart_is_refused(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=f"^at {place}: ") as refused:
        compiled(schema)
    assert "not whole" in str(refused.value) or "no " in str(refused.value)


def test_tools_have_such_numbers() -> None:
    """Texts inside of other texts, whose end the grammar sees and the watching has to."""
    schema = {"type": "object", "properties": {"x": EITHER}, "required": ["x"]}
    tag = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema"}, "end": "</x>1"}
    tag["content"]["json_schema"] = schema
    formatted = {"format": {"type": "sequence", "elements": [tag, tag]}}
    source, _, end = a_vocabulary()
    grammar = source.compile(Constraint(kind="structural_tag", text=json.dumps(formatted)))
    for first, second in itertools.product(["1.5", "0.25", "1", "2.0"], repeat=2):
        text = f'<x>{{"x":{first}}}</x>1<x>{{"x": {second}}}</x>1'
        is_right = {first, second} <= {"1.5", "0.25"}
        assert accepts(grammar, text) == is_right, text
    assert end
