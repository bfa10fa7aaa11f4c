"""Arrays without duplicates: what is generated has none, and everything else may come."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from weft.contract.request import Constraint
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.masks import ConstraintState
from weft.engine.features.constraints.unique import MAX_ITEMS
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
JOINED = ['","', '["', '"]', '","a', 'a"', 'b"]', '["a"', '["a","a"]', '"a"', 'a","a"', ', "', '""']


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


def test_tokens_of_several_characters_write_no_duplicate() -> None:
    """Few letters are drawn, so that strings often meet. Tokens ahead change nothing."""
    spelled = [*(bytes([byte]) for byte in range(255)), *(text.encode() for text in JOINED)]
    end = len(spelled)
    source = GrammarSource(tokenizer_of([*spelled, b""], [end]))
    short = {**SCHEMA["$defs"]["name"], "maxLength": 32}
    schema = {**SCHEMA, "$defs": {**SCHEMA["$defs"], "name": short}}
    grammar = source.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    fresh_seed()
    rng = random.Random(random.random())
    ended = 0
    for _ in range(12):
        state, ids, new = ConstraintState(grammar, end + 1, frozenset({end})), list[int](), []
        while len(ids) < 400:
            ahead = [rng.choice((34, 44, 97, end - 1)) for _ in range(rng.randrange(4))]
            mask = state.next_masks(new, ahead)[0]
            assert mask is not None
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: end + 1]
            may_come = np.flatnonzero(bits).tolist()
            assert may_come, b"".join(spelled[token] for token in ids)
            if end in may_come:
                value = json.loads(b"".join(spelled[token] for token in ids))
                Draft202012Validator(schema).validate(value)
                ended += 1
                break
            likely = [token for token in may_come if spelled[token][:1] in b'"]},ab']
            new = [rng.choice(likely if likely and rng.random() < 0.95 else may_come)]
            ids += new
    assert ended


def test_strings_are_written_until_the_array_is_full() -> None:
    fresh_seed()
    grammar = compiled({**SET, "minItems": MAX_ITEMS})
    value = json.loads(random_text(grammar, random.Random(random.random()), most=20_000))
    assert len({*value}) == len(value) == MAX_ITEMS


@pytest.mark.parametrize(
    "schema",
    [
        {**SET, "minItems": MAX_ITEMS + 1},
        {**SET, "items": {"type": "string", "pattern": "^[ab]$"}},
        {**SET, "items": {"type": "string", "maxLength": 1}},
        {**SET, "items": {"type": ["string", "null"]}},
        {**SET, "items": {"type": "array"}},
        {"properties": {"a": SET, "b": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": SET}},
        {"anyOf": [SET, {"properties": {"a": {"$ref": "#"}}}]},
        {"properties": {"a": {"anyOf": [SET, {"type": "array", "items": {"enum": ["a"]}}]}}},
        {"additionalProperties": SET},
        {"allOf": [SET, {"maxItems": 3}]},
    ],
    ids=json.dumps,
)
def test_arrays_that_cannot_be_followed_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="uniqueItems: "):
        compiled(schema)
