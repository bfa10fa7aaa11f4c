"""Regular expressions that end a text, against Python's own engine."""

from __future__ import annotations

import random
import re

import pytest
from weft.gateway.text.stop_patterns import (
    MAX_EDGES,
    MAX_HELD_CHARS,
    PatternError,
    PatternScanner,
    ScannerChain,
    StopPatterns,
)
from weft.gateway.text.stops import StopAutomaton, StopScanner

LETTERS = "ab1 \n"


def random_pattern(depth: int = 0) -> str:
    """An expression over few letters, of what both engines know."""
    atoms = [
        "a",
        "b",
        "1",
        " ",
        ".",
        r"\d",
        r"\w",
        r"\s",
        "[ab]",
        "[^a]",
        r"[\d ]",
        "[a-b1]",
        r"\n",
    ]
    kind = random.randrange(8 if depth < 3 else 2)
    if kind < 3:
        return random.choice(atoms)
    if kind == 3:
        return f"(?:{random_pattern(depth + 1)}|{random_pattern(depth + 1)})"
    if kind == 4:
        repeat = random.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"])
        return f"(?:{random_pattern(depth + 1)}){repeat}"
    if kind == 5:
        return f"({random_pattern(depth + 1)})"
    return random_pattern(depth + 1) + random_pattern(depth + 1)


def first_match(pattern: str, text: str, least_end: int = 0) -> tuple[int, int] | None:
    """Where the match that is complete first begins, the longest of several, and where it ends."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end) and end > least_end:
                return start, end
    return None


def pieces(text: str) -> list[str]:
    cuts = sorted(random.choices(range(len(text) + 1), k=random.randrange(6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def scan(scanner: PatternScanner | ScannerChain, text: str) -> tuple[str, bool]:
    shown = ""
    for piece in pieces(text):
        part, is_stopped = scanner.push(piece)
        shown += part
        if is_stopped:
            return shown, True
    return shown + scanner.finish(), bool(scanner.found)


def test_texts_end_where_the_first_match_is_complete() -> None:
    num_matched = 0
    for _ in range(1500):
        pattern = random_pattern()
        try:
            patterns = StopPatterns([pattern])
        except PatternError:
            assert re.compile(pattern).fullmatch("") or len(pattern) > 20, pattern
            continue
        for include_stop in (False, True):
            text = "".join(random.choices(LETTERS, k=random.randrange(1, 14)))
            expected = first_match(pattern, text)
            scanner = PatternScanner(patterns, include_stop)
            found = scan(scanner, text)
            if expected is None:
                assert found == (text, False), (pattern, text)
            else:
                start, end = expected
                assert found == (text[: end if include_stop else start], True), (pattern, text)
                assert scanner.found == pattern
                num_matched += 1
    assert num_matched > 200


def test_several_expressions_beside_stop_strings() -> None:
    for _ in range(500):
        text = "".join(random.choices(LETTERS, k=20))
        given = ["1a+1", "[ab]{3} "]
        chain = ScannerChain(
            StopScanner(StopAutomaton(["b1b", "1 1"]), include_stop=False),
            PatternScanner(StopPatterns(given), include_stop=False),
        )
        strings = [found for one in ("b1b", "1 1") if (found := first_match(one, text))]
        # The expressions see what the strings leave.
        left = text[: min(strings, key=lambda one: one[1])[0]] if strings else text
        matches = [found for one in given if (found := first_match(one, left))]
        expected = left[: min(matches, key=lambda one: (one[1], one[0]))[0]] if matches else left
        assert scan(chain, text) == (expected, bool(strings or matches)), text


def test_only_what_may_begin_a_match_is_held_back() -> None:
    scanner = PatternScanner(StopPatterns([r"END\d+!"]), include_stop=False)
    assert scanner.push("text E") == ("text ", False)
    assert scanner.push("ND12") == ("", False)
    assert scanner.push("x") == ("END12x", False)
    assert scanner.push("END1!more") == ("", True)
    scanner = PatternScanner(StopPatterns(["a.*z"]), include_stop=False)
    text = "a" + "b" * 5 * MAX_HELD_CHARS
    shown, is_stopped = scanner.push(text)
    assert (len(shown), is_stopped) == (len(text) - MAX_HELD_CHARS, False)
    # It is cut as far as it was not shown.
    assert scanner.push("z") == ("", True)


def test_text_before_the_least_number_of_tokens_does_not_count() -> None:
    scanner = PatternScanner(StopPatterns(["ab"]), include_stop=False)
    assert scanner.push("xabx", counts=False) == ("xabx", False)
    assert scanner.push("xaby") == ("x", True)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(a|a)*b", "(a|aa)+b", "(.*)(.*)(.*)(.*)(.*)b", "(?:a?){30}a{30}b"],
)
def test_no_expression_takes_long(pattern: str) -> None:
    patterns = StopPatterns([pattern])
    assert sum(map(len, patterns.behind.values())) <= MAX_EDGES
    scanner = PatternScanner(patterns, include_stop=False)
    shown, is_stopped = scanner.push("a" * 3000)
    assert not is_stopped
    assert len(shown) >= 3000 - MAX_HELD_CHARS
    assert shown + scanner.push("\n")[0] == "a" * 3000 + "\n"


def test_what_fits_is_found_for_any_number_of_characters() -> None:
    scanner = PatternScanner(StopPatterns(["[^a]b"]), include_stop=False)
    text = "".join(chr(0x4E00 + index) for index in range(2000))
    assert scan(scanner, text + "ab") == (text + "ab", False)
    scanner = PatternScanner(StopPatterns(["[^a]b"]), include_stop=False)
    assert scan(scanner, text + "b") == (text[:-1], True)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a*", "no text"),
        ("", "no text"),
        ("a|", "no text"),
        ("(a", "not closed"),
        ("a)", "unbalanced"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "more at least"),
        ("a{", "repetition"),
        ("a{999999999}", "more than"),
        ("((a{200}){200}){200}", "too large"),
        ("((){256}){256}" * 3 + "a", "too large"),
        ("(a?){200}b", "may be absent"),
        ("^a", r"except a \$ at the end"),
        ("a$b", "anchors"),
        ("(a$)", "anchors"),
        ("a$*", "anchors"),
        ("$", "no text"),
        (r"\ba", "not supported"),
        (r"(a)\1", "not supported"),
        ("(?=a)b", r"\(\?:"),
        ("(?i)a", r"\(\?:"),
        ("(?P<n>a)", r"\(\?:"),
        ("a++", "possessive"),
        ("[b-a]", "empty"),
        ("[a", "too early"),
        ("a\\", "too early"),
        (r"\x1", "no character"),
    ],
)
def test_what_cannot_be_used_is_told(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        StopPatterns([pattern])


def test_an_expression_may_say_that_the_text_ends_with_it() -> None:
    for pattern in (r"[.!]\s*$", r"x$|[.!]$"):
        assert scan(PatternScanner(StopPatterns([pattern]), False), "Hm. So") == ("Hm", True)


def test_long_expressions_are_read() -> None:
    for pattern in ("(" * 127 + "a" + ")" * 127, "a" * 200, "[" + "ab-c" * 50 + "]"):
        assert StopPatterns([pattern]).patterns == (pattern,)
