"""Regular expressions mean to the compiler what they mean to Python, or are refused."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
import xgrammar
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.constraints.patterns import prepare_regex
from weft.engine.request import Constraint
from weft.testing.kernels.kernel_checks import fresh_seed

BYTES = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[256]
)
SOURCE = GrammarSource(BYTES, 1 << 28)
TEXTS = [
    *("", "a", "b", "ab", "AB", "aab", "abc", "bc", "ac", "aZ", "AabZ", "a\nb", "\n", "a b", "5"),
    *("^", "$", "a^b", "a$b", "a.b", "axb", "\\", "]", "-", '"', "é", "aé", "\t", "\0", "(", "|"),
]


def accepts(regex: str, text: str) -> bool:
    grammar = SOURCE.read(SOURCE.compile(Constraint(kind="regex", text=regex)))
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    # xgrammar takes no empty text; what ends at once is told by its first mask.
    return (not text or matcher.accept_string(text)) and matcher.is_completed()


@pytest.mark.parametrize(
    "regex",
    [
        *(r"\x41B", r"[\x41-\x43]B", r"\u0041B", r"a.b", r"a[.]b", r"a\.b", r"[^a]", r"[a^]"),
        *(r"^ab$", r"^(ab|bc)$", r"(^a|^b)c", r"^a|^b", r"a$|b", r"(a|b$)", r"\$", r"\^", r"[$]"),
        *(r"[\]]", r"[\\]", r"\\", r"\-", r"[\w-]+", r"\d", r"\n", r"\t", r"\0", r"(?:ab)+"),
        *(r"é", r"a\é", r"\(", r"[(|]", r"[^\n]+", r".*", r"a?b{1,2}c?", r"(a|(b|))c", r"\""),
        *(r"a*?b", r"\ ", r"a\$b", r"[\^a]+", r"[\^]", r"[\x5e]a", r"[\u005E-]", r"[\^0-9+*/-]+"),
        *(r"[\^^\^b]?", r"a[\^\]]b", r"[^\^a]", r"[a\^]", r"[\^\-a]*"),
    ],
)  # fmt: skip
def test_regexes_are_read_as_by_python(regex: str) -> None:
    for text in TEXTS:
        assert accepts(regex, text) == bool(re.fullmatch(regex, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("regex", "position"),
    [
        *((r"\Aab\Z", 0), (r"ab\Z", 2), (r"a\zb", 1), (r"\Qab\E", 0), (r"\h", 0), (r"\cA", 0)),
        *((r"\e", 0), (r"\a", 0), (r"\07", 0), (r"a\1", 1), (r"\x4", 0), (r"\u00", 0), ("ab\\", 2)),
        *((r"[a\Z]", 2), (r"[\h]", 1), ("a^b", 1), ("a$b", 1), ("a(^b|c)", 2), ("(a$)*", 2)),
        *(
            (r"[\^-a]", 0),
            (r"b[\^\^-z]", 1),
            ("(a|b^)", 4),
            ("(a$|b)c", 2),
            ("[ab]^", 4),
            ("(a)^b", 3),
            ("^^a$b", 3),
        ),
    ],
)
def test_what_would_be_read_otherwise_is_refused(regex: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"^at position {position}: "):
        prepare_regex(regex)


def test_the_place_in_a_schema_is_named() -> None:
    with pytest.raises(ValueError, match=r"^at \$\.pattern, position 1: this escape"):
        prepare_regex(r"a\Z", "$.pattern")


def random_regex(depth: int) -> str:
    if depth == 0 or random.random() < 0.3:
        return random.choice(["a", "b", "c", "[ab]", "[^a]", "ab", "a?", "b*", "[bc]+", "."])
    kind = random.choice(["joined", "either", "group", "group"])
    if kind == "joined":
        return random_regex(depth - 1) + random_regex(depth - 1)
    if kind == "either":
        return f"({random_regex(depth - 1)}|{random_regex(depth - 1)})"
    times = random.choice(["?", "*", "+", "{0,1}", "{2}", "{1,2}", "{0,2}", "{1,}", ""])
    return f"{random.choice(['(', '(?:'])}{random_regex(depth - 1)}){times}"


def of_strings(pattern: str) -> xgrammar.CompiledGrammar:
    schema = json.dumps({"type": "string", "pattern": f"^({pattern})$"})
    return SOURCE.read(SOURCE.compile(Constraint(kind="json_schema", text=schema)))


def is_taken(grammar: xgrammar.CompiledGrammar, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


def test_patterns_of_strings_are_read_as_by_python() -> None:
    """Some of which the compiler's own automaton reads otherwise, and random ones."""
    fresh_seed()
    known = [
        *("(ab+)?c", "(a(b|c)+)?c", "([ab]){1,2}|[ab]", "c|((?:a?){1,2}|a?)", r"a(\.b+)?c"),
        *("((ab+)?c)?", "a(b[)?]+)?c", "(ab+)+?c", "(?:(abc[bc]+){0,1}){1,}"),
    ]
    for pattern in (*known, *(random_regex(4) for _ in range(40))):
        grammar = of_strings(pattern)
        for length in range(5):
            for text in map("".join, itertools.product("abc", repeat=length)):
                is_match = re.fullmatch(pattern, text) is not None
                assert is_taken(grammar, f'"{text}"') == is_match, (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r".", r"[^a]", r"[\s\S]", r"\W", r"\D", r"[^\d]", r"[ -\x7f]", r"[\x00-\u00ff]"),
        *(r"[!-~]", r"[\]\-^/]", r"[é-ü]", r"é", r"[\u{1F600}-\u{1F64F}]", r"[^\]^-]"),
    ],
)
def test_classes_of_strings_have_what_a_string_may_have(pattern: str) -> None:
    grammar = of_strings(pattern)
    plain = SOURCE.read(SOURCE.compile(Constraint(kind="regex", text=pattern)))
    characters = [chr(code) for code in (*range(0x180), 0xD7FF, 0xE000, 0x1F600, 0x10FFFF)]
    taken = {one for one in characters if is_taken(grammar, f'"{one}"')}
    wanted = {one for one in characters if is_taken(plain, one)}
    assert taken == {one for one in wanted if one >= " " and one not in '"\\'}
    assert not is_taken(grammar, b'"\xed\xa0\x80"')


def test_a_class_that_no_string_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no string may have a character of a class"):
        of_strings(r"a[\n-\r]")


@pytest.mark.parametrize("pattern", [r"\Aab\Z", "a^b", "^a$b"])
def test_patterns_of_schemas_are_refused_alike(pattern: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"pattern": pattern}}})
    with pytest.raises(ValueError, match=r"^at .*x\.pattern, position \d: "):
        SOURCE.compile(Constraint(kind="json_schema", text=schema))
