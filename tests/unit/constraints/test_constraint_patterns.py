"""Regular expressions mean to llguidance what they mean to Python, or are refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher
from weft.contract.request import Constraint
from weft.engine.features.constraints.patterns import convert_regex
from weft.testing.engine.constraint_texts import SOURCE, accepts, compiled
from weft.testing.kernels.kernel_checks import fresh_seed

TEXTS = [
    *("", "a", "b", "ab", "AB", "aab", "abc", "bc", "ac", "aZ", "AabZ", "a\nb", "\n", "a b", "5"),
    *("^", "$", "a^b", "a$b", "a.b", "axb", "\\", "]", "-", '"', "é", "aé", "\t", "\0", "(", "|"),
    *("[", "a[", "&&", "a&&b", "--", "~~", "/", "a/b", "{", "a{b", "}", "#", "a#b", "😀", "a😀"),
]


def of_regex(regex: str) -> LLMatcher:
    return SOURCE.compile(Constraint(kind="regex", text=regex))


@pytest.mark.parametrize(
    "regex",
    [
        *(r"\x41B", r"[\x41-\x43]B", r"\u0041B", r"a.b", r"a[.]b", r"a\.b", r"[^a]", r"[a^]"),
        *(r"^ab$", r"^(ab|bc)$", r"(^a|^b)c", r"^a|^b", r"a$|b", r"(a|b$)", r"\$", r"\^", r"[$]"),
        *(r"[\]]", r"[\\]", r"\\", r"\-", r"[\w-]+", r"\d", r"\n", r"\t", r"\0", r"(?:ab)+"),
        *(r"é", r"a\é", r"\(", r"[(|]", r"[^\n]+", r".*", r"a?b{1,2}c?", r"(a|(b|))c", r"\""),
        *(r"a*?b", r"\ ", r"a\$b", r"[\^a]+", r"[\^]", r"[\x5e]a", r"[\u005E-]", r"[\^0-9+*/-]+"),
        *(r"[\^^\^b]?", r"a[\^\]]b", r"[^\^a]", r"[a\^]", r"[\^\-a]*", r"[\[a]+", r"[&&a]+"),
        *(r"[~~b]+", r"a/b", r"[/]", r"a{b", r"[#]", "a#b", "(?i)aB", r"[\s\S]", r"[^\s\S]", r"\D"),
        *(r"(?P<x>a)b", r"[^b]*", r"a😀?", r"[😀-😂]", r"a{2}b", "()", "(|a)b", r"\S+", r"\s"),
    ],
)  # fmt: skip
def test_regexes_are_read_as_by_python(regex: str) -> None:
    try:
        grammar = of_regex(regex)
    except ValueError as error:
        grammar = None
        assert "no text" in str(error)  # noqa: PT017
    for text in TEXTS:
        is_taken = grammar is not None and accepts(grammar, text)
        assert is_taken == bool(re.fullmatch(regex, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("regex", "position"),
    [
        *((r"\Aab\Z", 0), (r"ab\Z", 2), (r"a\zb", 1), (r"\Qab\E", 0), (r"\h", 0), (r"\cA", 0)),
        *((r"\e", 0), (r"\a", 0), (r"\07", 0), (r"a\1", 1), (r"\x4", 0), (r"\u00", 0), ("ab\\", 2)),
        *((r"[a\Z]", 2), (r"[\h]", 1), ("a^b", 1), ("a$b", 1), ("a(^b|c)", 2), ("(a$)*", 2)),
        *(("(a|b^)", 4), ("(a$|b)c", 2), ("[ab]^", 4), ("(a)^b", 3), ("^^a$b", 3), (r"a\b", 1)),
        *((r"(?=a)b", 0), (r"a(?<!b)", 1), (r"(?s)a", 0), ("(a", 2), ("a)", 1), ("[a", 2)),
        ("*a", 1),
        *((r"[z-a]", 4), ("a**", 3), ("a++", 3), (r"\ud83d", 6), (r"[\udc00]", 7), ("\ud83d", 0)),
    ],
)  # fmt: skip
def test_what_would_be_read_otherwise_is_refused(regex: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"^at position {position}: "):
        convert_regex(regex)


def random_regex(depth: int, *, is_repeated: bool = False) -> str:
    """In what is repeated without a bound nothing else is: Python could take hours to match it."""
    without_bound = [] if is_repeated else ["*", "+", "{1,}"]
    if depth == 0 or random.random() < 0.3:
        atom = random.choice(["a", "b", "c", "[ab]", "[^a]", "ab", "a?", "b", "[bc]", "."])
        return atom + random.choice(["", "", *without_bound]) if len(atom) != 2 else atom
    kind = random.choice(["joined", "either", "group", "group"])
    if kind in ("joined", "either"):
        first, second = (random_regex(depth - 1, is_repeated=is_repeated) for _ in range(2))
        return first + second if kind == "joined" else f"({first}|{second})"
    times = random.choice(["?", "{0,1}", "{2}", "{1,2}", "{0,2}", "", *without_bound])
    inner = random_regex(depth - 1, is_repeated=is_repeated or times in without_bound)
    return f"{random.choice(['(', '(?:'])}{inner}){times}"


def test_random_patterns_are_read_as_by_python() -> None:
    """Those of strings match anywhere in them, unless they have anchors."""
    fresh_seed()
    for _ in range(60):
        pattern = random_regex(4)
        anchored = random.choice(["", "^"]) + f"({pattern})" + random.choice(["", "$"])
        in_string, alone = compiled({"type": "string", "pattern": anchored}), of_regex(pattern)
        for length in range(5):
            for text in map("".join, itertools.product("abc", repeat=length)):
                assert accepts(alone, text) == bool(re.fullmatch(pattern, text)), (pattern, text)
                is_match = bool(re.search(anchored, text))
                assert accepts(in_string, f'"{text}"') == is_match, (anchored, text)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r".", r"[^a]", r"[\s\S]", r"\D", r"[^\d]", r"[ -\x7e]", r"[\x00-\u00ff]", r"[!-~]"),
        *(r"[\]\-^/]", r"[é-ü]", r"é", r"[^\]^-]", r"\s", r"[^\s]", r"[😀-😂]"),
    ],
)
def test_classes_have_what_python_has_and_whole_characters(pattern: str) -> None:
    of_string, alone = compiled({"type": "string", "pattern": f"^{pattern}$"}), of_regex(pattern)
    codes = (*range(0x20, 0x7F), *range(0x80, 0x180), 0x2028, 0xD7FF, 0xE000, 0x1F600, 0x10FFFF)
    for character in map(chr, codes):
        is_taken = accepts(alone, character)
        assert re.fullmatch(pattern, character, re.ASCII if "d" in pattern else 0) or not is_taken
        if character not in "\x85\u2028\ufeff\x1c\x1d\x1e\x1f":
            assert is_taken == bool(re.fullmatch(pattern, character)), repr(character)
        written = json.dumps(character, ensure_ascii=False)
        assert accepts(of_string, written) == is_taken, repr(character)
    for half in (b"\xed\xa0\x80", b"\xff", b"\xc3", b"\xf0\x9f", b"\x80"):
        assert not accepts(alone, half)
        assert not accepts(of_string, b'"' + half + b'"')


@pytest.mark.parametrize(
    ("pattern", "text", "is_valid"),
    [
        (r"^\ud83d\ude00$", "😀", True),
        (r"^[\ud83d\ude00-\ud83d\ude02]+$", "😁😂", True),
        (r"^\u{1F600}$", "😀", True),
        (r"^[^\ud83d\ude00]$", "😀", False),
        (r"^[^]$", "\n", True),
        (r"^[[]$", "[", True),
        (r"^\p{Lu}$", "É", True),
        (r"^.$", "\r", False),
        (r"^.$", "\u2028", False),
        (r"^\w$", "é", False),
        (r"^\W$", "é", True),
    ],
)
def test_patterns_of_schemas_are_those_of_ecma(pattern: str, text: str, is_valid: bool) -> None:
    schema: Any = {"type": "string", "pattern": pattern}
    assert accepts(compiled(schema), json.dumps(text, ensure_ascii=False)) == is_valid


@pytest.mark.parametrize("pattern", [r"\Aab\Z", "a(?=b)", r"\bword", r"\1", "a**"])
def test_patterns_of_schemas_are_refused_with_their_place(pattern: str) -> None:
    schema = {"type": "object", "properties": {"x/y": {"pattern": pattern}}}
    with pytest.raises(ValueError, match=r"^at #/properties/x~1y/pattern: at position \d: "):
        compiled(schema)
