"""Arrays without duplicates: what is generated has none, and everything else may come."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from weft.contract.request import Constraint
from weft.engine.features.constraints.disjoint import same
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.grammar_state import ConstraintState
from weft.engine.features.constraints.schema import MAX_UNIQUE
from weft.engine.features.constraints.unique import Matcher
from weft.engine.features.constraints.vocabulary import tokenizer_of
from weft.testing.engine.constraint_texts import accepts, compiled, random_text
from weft.testing.kernels.kernel_checks import fresh_seed

SET: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
NAMES = {"type": "array", "items": {"$ref": "#/$defs/name"}, "uniqueItems": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": SET,
        "more": {"anyOf": [{**NAMES, "minItems": 3}, {"type": "null"}]},
        "each": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "lists": {"type": "array", "items": SET},
        "inner": {"$ref": "#/$defs/inner"},
        "also": {"$ref": "#/$defs/inner"},
    },
    "required": ["tags", "more", "each", "lists", "inner"],
    "$defs": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "inner": {"type": "object", "properties": {"tags": SET}, "required": ["tags"]},
    },
}
JOINED = ['","', '["', '"]', '","a', 'a"', 'b"]', '["a"', '["a","a"]', '"a"', 'a","a"', ", ", '""']
JOINED += [
    "1,",
    ",1",
    ", 2",
    "10",
    "00",
    ".5",
    "0.",
    "],[",
    "[1,1]",
    "[1,2],[",
    "true,",
    "true",
    " false",
]
JOINED += [
    '{"a":',
    '"},{"',
    "},",
    "1}",
    '":1',
    "null",
    "[[",
    "]]",
    '"aa',
    "1,1",
    "0,",
    "[]",
    "1.5,",
    "-1",
    "-0",
]


def set_of(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


PAIR = {"type": "array", "prefixItems": [{"enum": [0, 1, 2]}, {"type": "boolean"}], "minItems": 2}
FLAGGED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
        "b": {"type": "boolean"},
    },
    "required": ["a", "b"],
}
SETS: list[Any] = [
    *(set_of({"type": kind}) for kind in ("string", "integer", "number", ["string", "null"])),
    set_of({"type": "boolean"}, minItems=2),
    set_of({"type": "integer", "minimum": -2, "maximum": 3}, minItems=6),
    set_of({"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.5}, minItems=5),
    set_of({"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=6),
    set_of({"type": "string", "maxLength": 1}, minItems=MAX_UNIQUE),
    set_of({"type": "string", "format": "uuid"}, maxItems=5),
    set_of({"enum": ["a", "aa", 1, 10, 1.5, None, True, {"x": [1]}, []]}, minItems=9),
    set_of({**PAIR, "items": False}, minItems=6),
    set_of(FLAGGED, minItems=6),
    set_of(set_of({"type": "integer"}, maxItems=3), maxItems=5),
    set_of({"type": "object", "properties": {"a": {"type": "boolean"}}, "minProperties": 0}),
    {"type": "array", "maxItems": 6, "uniqueItems": True},
    {"type": "object", "additionalProperties": set_of({"type": "string"}), "maxProperties": 4},
    {"anyOf": [set_of({"type": "integer"}), set_of({"type": "string"}, minItems=1)]},
    {"allOf": [set_of({"type": "string"}), {"maxItems": 3}]},
    {"allOf": [set_of({"type": "array", "items": {"type": "number"}, "maxItems": 2}), {}]},
    {"prefixItems": [{"type": "integer"}, {"type": "boolean"}], **set_of({"type": "string"})},
    {"patternProperties": {"^i": set_of({"type": "integer"}), "^b": {"type": "array"}}},
]


def values() -> list[Any]:
    full = {"tags": [], "more": None, "each": [["a", "a"]], "lists": [["a"], ["a"]]}
    full["inner"] = {"tags": ["a", "b"]}
    found: list[Any] = [full]
    for tags in (["a", "aa", "ab", ""], ["a", "b", "a"], ["", ""], ['"', '"'], ["\\", '\\"']):
        found += [{**full, name: tags} for name in ("tags", "more")]
        found += [{**full, "inner": {"tags": tags}}, {**full, "lists": [["a"], tags]}]
        found += [{**full, "also": {"tags": tags}}, {**full, "each": [["a"], tags]}]
    return found


def test_what_is_allowed_has_no_duplicate_and_all_else_is_allowed() -> None:
    grammar, validator = compiled(SCHEMA), Draft202012Validator(SCHEMA)
    for value in values():
        assert accepts(grammar, json.dumps(value)) == validator.is_valid(value), value
    for value in (["x" * 40, "x" * 39], ["é" * 40, "é" * 40]):
        assert accepts(compiled(SCHEMA["$defs"]["inner"]), json.dumps({"tags": value})) == (
            value[0] != value[1]
        )


def a_vocabulary() -> tuple[GrammarSource, list[bytes], int]:
    spelled = [*(bytes([byte]) for byte in range(255)), *(text.encode() for text in JOINED)]
    end = len(spelled)
    return GrammarSource(tokenizer_of([*spelled, b""], [end])), spelled, end


def compiled_by(source: GrammarSource, schema: Any) -> Matcher:
    return source.compile(Constraint(kind="json_schema", text=json.dumps(schema)))


def draw(rng: random.Random, may_come: list[int], spelled: list[bytes], end: int) -> int:
    """A token, most often one that brings items to their end."""
    if end in may_come and rng.random() < 0.4:
        return end
    likely = [token for token in may_come if token != end and spelled[token][-1:] in b'"]},ab0']
    return rng.choice(likely if likely and rng.random() < 0.8 else may_come)


@pytest.mark.parametrize("schema", SETS, ids=json.dumps)
def test_tokens_of_several_characters_write_no_duplicate(schema: Any) -> None:
    """Some token may come until the end. Tokens ahead change nothing."""
    source, spelled, end = a_vocabulary()
    grammar = compiled_by(source, schema)
    fresh_seed()
    rng = random.Random(random.random())
    for _ in range(3):
        state, ids, new = ConstraintState(grammar, end + 1, frozenset({end})), list[int](), []
        while True:
            ahead = [rng.choice((34, 44, 49, 97, end - 1)) for _ in range(rng.randrange(4))]
            mask = state.next_masks(new, ahead)[0]
            assert mask is not None
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: end + 1]
            may_come = np.flatnonzero(bits).tolist()
            assert may_come, b"".join(spelled[token] for token in ids)
            token = draw(rng, may_come, spelled, end)
            if token == end:
                value = json.loads(b"".join(spelled[token] for token in ids))
                Draft202012Validator(schema).validate(value)
                break
            if len(ids) > 400:
                break
            new = [token]
            ids += new


@pytest.mark.parametrize("schema", SETS, ids=json.dumps)
def test_a_mask_has_the_tokens_that_may_be_consumed(schema: Any) -> None:
    source, spelled, end = a_vocabulary()
    grammar = compiled_by(source, schema)
    fresh_seed()
    rng = random.Random(random.random())
    matcher = grammar.deep_copy()
    for _ in range(25):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        may_come = [token for token in range(end) if bits[token]]
        for token in range(255, end):
            is_consumed = matcher.try_consume_tokens([token]) == 1
            assert is_consumed == bool(bits[token]), spelled[token]
            if is_consumed:
                matcher.rollback(1)
        if not may_come or not matcher.consume_token(draw(rng, may_come, spelled, end)):
            break


POOL = ["", "a", "aa", "b", 0, 1, 10, 1.5, -1, -1.0, 0.5, None, True, False, {}, [], {"a": True}]
POOL += [
    [0, True],
    [1, False],
    [1],
    {"a": 0.5, "b": True},
    {"a": 0.5, "b": False},
    {"b": 1, "a": 0.5},
]


@pytest.mark.parametrize("schema", SETS, ids=json.dumps)
def test_exactly_arrays_with_duplicates_are_refused(schema: Any) -> None:
    free = {name: part for name, part in schema.items() if name not in ("uniqueItems", "minItems")}
    grammar, without = compiled({**schema, "minItems": 0}), compiled(free)
    if schema.get("type") != "array":
        return
    for number in (2, 3):
        for items in itertools.product(POOL, repeat=number):
            text = json.dumps(items)
            is_twice = any(same(a, b) for a, b in itertools.combinations(items, 2))
            if number == 3 and not is_twice:
                continue
            assert accepts(grammar, text) == (accepts(without, text) and not is_twice), text


def test_strings_are_written_until_the_array_is_full() -> None:
    fresh_seed()
    grammar = compiled({**SET, "minItems": MAX_UNIQUE})
    value = json.loads(random_text(grammar, random.Random(random.random()), most=20_000))
    assert len({*value}) == len(value) == MAX_UNIQUE


@pytest.mark.parametrize(
    "schema",
    [
        {**SET, "minItems": MAX_UNIQUE + 1},
        set_of({"type": "boolean"}, minItems=3),
        set_of({"type": "string", "pattern": "^[ab]$"}, minItems=3),
        set_of(set_of({"type": "boolean"})),
        set_of({"type": "object", "maxProperties": 2}),
        set_of({"patternProperties": {"^[ab]$": {"type": "null"}}, "additionalProperties": False}),
        {"anyOf": [SET, {"type": "array", "items": {"enum": ["a"]}}]},
        {"allOf": [SET, {"items": {"enum": ["a", "b"]}}]},
    ],
    ids=json.dumps,
)
def test_arrays_that_cannot_be_kept_free_of_duplicates_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"at #.*/uniqueItems: "):
        compiled(schema)
