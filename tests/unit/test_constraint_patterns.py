"""Regular expressions mean to the compiler what they mean to Python, or are refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import xgrammar
from weft.engine.constraints.grammar import GrammarSource
from weft.engine.constraints.patterns import prepare_regex
from weft.engine.request import Constraint

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


@pytest.mark.parametrize(
    "pattern",
    [
        *("(ab+)?c", "(ab*)?c", "(ab{2,})?c", "(?:(ab+))?c", "(ab+)?(ca)?", "(a(b|c)+)?c"),
        *("(a(bc)*)?c", "((ab+)?c)?", r"a(\?b+)?c", "a(b[)?]+)?c", "(ab+)+?c", "(ab+)*c"),
    ],
)
def test_patterns_of_strings_are_read_as_by_python(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    grammar = SOURCE.read(SOURCE.compile(Constraint(kind="json_schema", text=schema)))
    for length in range(5):
        for text in map("".join, itertools.product("abc?", repeat=length)):
            matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
            accepted = matcher.accept_string(f'"{text}"') and matcher.is_completed()
            assert accepted == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", [r"\Aab\Z", "a^b", "^a$b"])
def test_patterns_of_schemas_are_refused_alike(pattern: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"pattern": pattern}}})
    with pytest.raises(ValueError, match=r"^at .*x\.pattern, position \d: "):
        SOURCE.compile(Constraint(kind="json_schema", text=schema))
