"""Strings in grammars of JSON schemas: exactly those of JSON, of so many characters."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.request import Constraint

BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[256]
)
SOURCE = GrammarSource(BYTES, 1 << 28)
UNITS = ["x", "é", "😀", r"\n", r"\"", r"\\", r"\u00e9", r"\/"]


def matcher_of(schema: dict[str, Any]) -> xgrammar.CompiledGrammar:
    return SOURCE.read(SOURCE.compile(Constraint(kind="json_schema", text=json.dumps(schema))))


def accepts(grammar: xgrammar.CompiledGrammar, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 3), (1, None), (2, 2), (0, 0), (3, 300), (127, 128), (130, 130), (256, 257), (140, None)],
)
def test_lengths_are_kept(least: int, most: int | None) -> None:
    """Also beyond what is counted in one piece; an escape is one character."""
    schema: dict[str, Any] = {"type": "string", "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    grammar = matcher_of(schema)
    end = most if most is not None else least
    near = (least - 1, least, least + 1, end - 1, end, end + 1)
    for count in {0, 1, 127, 128, 129, *(size for size in near if size >= 0)}:
        for unit in UNITS:
            text = f'"{unit * count}"'
            assert len(json.loads(text)) == count
            is_valid = least <= count and (most is None or count <= most)
            assert accepts(grammar, text) == is_valid, (count, unit)


@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"type": "string", "maxLength": 9}, {"type": ["string", "null"]}],
)
def test_strings_are_json_and_utf8(schema: dict[str, Any]) -> None:
    grammar = matcher_of(schema)
    for good in ('""', r'"\u0041"', '"\ud7ff\ue000\U0010ffff"', r'"\b\f\n\r\t\"\\\/"'):
        assert accepts(grammar, good), good
    for bad in (
        *('"\n"', '"\x01"', '"\t"', r'"\x41"', r'"\u12"', '"a', 'a"'),
        *(r'"\ud800"', r'"\uDFFF"', b'"\xed\xa0\x80"', b'"\xed\xbf\xbf"', b'"\xff"', b'"\xc3"'),
    ):
        assert not accepts(grammar, bad), bad


def test_several_bounds_in_one_schema() -> None:
    bounds = {"a": (0, 2), "b": (1, 130), "c": (200, None)}
    properties = {
        name: {"type": "string", "minLength": least} | ({"maxLength": most} if most else {})
        for name, (least, most) in bounds.items()
    }
    grammar = matcher_of({"properties": properties, "required": list(bounds)})

    def text(*sizes: int) -> str:
        return json.dumps({name: "x" * size for name, size in zip(bounds, sizes, strict=True)})

    assert accepts(grammar, text(0, 1, 200))
    assert accepts(grammar, text(2, 130, 555))
    for wrong in ((3, 1, 200), (0, 0, 200), (0, 131, 200), (0, 1, 199)):
        assert not accepts(grammar, text(*wrong)), wrong


def test_no_name_comes_twice_under_another_spelling() -> None:
    described = {"a": {"type": "string"}, "ab": {"type": "string"}}
    grammar = matcher_of(
        {"properties": described, "required": ["a"], "additionalProperties": {"type": "integer"}}
    )
    for name in ("b", "abc", "", r"\"", "é", r"b\n"):
        assert accepts(grammar, f'{{"a": "x", "{name}": 5}}'), name
    for name in ("a", r"\u0061", r"a\u0062", r"\u0061b"):
        assert not accepts(grammar, f'{{"a": "x", "{name}": 5}}'), name


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]
)
def test_a_schema_of_no_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no text satisfies it"):
        matcher_of(schema)


@pytest.mark.parametrize(
    ("least", "most"),
    [("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum")],
)
def test_bounds_that_exclude_each_other_are_refused_with_their_place(least: str, most: str) -> None:
    with pytest.raises(ValueError, match=rf"at \$\.properties\.a\.{most}: 2 is below {least}, 3"):
        matcher_of({"properties": {"a": {least: 3, most: 2}}})


@pytest.mark.parametrize("given", [5, [], None])
def test_a_broken_draft_is_refused_with_its_place(given: object) -> None:
    with pytest.raises(ValueError, match=r"at \$\.\$schema: a string is expected"):
        matcher_of({"$schema": given, "type": "string"})
