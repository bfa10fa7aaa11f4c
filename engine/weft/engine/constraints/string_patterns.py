"""Patterns of strings in a grammar that was made from a JSON schema.

The compiler has an automaton of its own for them, which takes texts that do not match: for
`(ab+)?` also "b", for `([ab]){1,2}|[ab]` also "aaa". Its rules for a regular expression by itself
are right; so these are put in the place of the automaton, with what JSON has to escape left out of
their classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import xgrammar

_AUTOMATON = re.compile(r'^(\w+) ::= Regex\("pattern(\d+)", json_string=true\)$')
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\w+')
"""A literal, a class, or the name of a rule."""
_MEMBER = re.compile(r"\\x(..)|\\u(.{4})|\\U(.{8})|\\(.)|(.)", re.DOTALL)
_ESCAPED = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7, "b": 8, "e": 27, "0": 0}
_NEVER = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
"""Characters that a JSON string escapes, or that are none."""
_NEVER_WRITTEN = r"\0-\x1f\"\\\uD800-\uDFFF"

Range = tuple[int, int]


def with_patterns(grammar: str, patterns: Sequence[str]) -> str:
    """Puts rules in the place of automata.

    Args:
        grammar: In the compiler's own form of EBNF.
        patterns: Regular expressions, prepared; a `placeholder` holds the place of each.

    Raises:
        ValueError: A class has no character that a string may have.
    """
    lines: list[str] = []
    for line in grammar.splitlines():
        found = _AUTOMATON.match(line)
        lines += [line] if found is None else _rules(found[1], patterns[int(found[2])])
    return "\n".join(lines)


def _rules(name: str, pattern: str) -> list[str]:
    """The rules of a pattern, the first of which has the given name."""

    def renamed(found: re.Match[str]) -> str:
        piece = found[0]
        if piece[0] == "[":
            return _within_strings(piece, pattern)
        if piece[0] == '"' or not piece.startswith("root"):
            return piece
        return name if piece == "root" else f"{name}_matched{piece.removeprefix('root')}"

    plain = str(xgrammar.Grammar.from_regex(pattern))
    return [_PIECE.sub(renamed, line) for line in plain.splitlines()]


def _within_strings(written: str, pattern: str) -> str:
    """A class, without what a JSON string has not as it is."""
    if written[1] == "^":
        return f"{written[:-1]}{_NEVER_WRITTEN}]"
    kept = list(_ranges(written[1:-1]))
    for low, high in _NEVER:
        kept = [
            part
            for begin, end in kept
            for part in ((begin, min(end, low - 1)), (max(begin, high + 1), end))
            if part[0] <= part[1]
        ]
    if not kept:
        raise ValueError(f"no string may have a character of a class of the pattern {pattern!r}")
    return "[" + "".join(f"\\U{begin:08x}-\\U{end:08x}" for begin, end in kept) + "]"


def _ranges(members: str) -> list[Range]:
    """The ranges of a class."""
    ranges: list[Range] = []
    found = list(_MEMBER.finditer(members))
    i = 0
    while i < len(found):
        is_range = i + 2 < len(found) and found[i + 1][0] == "-"
        last = i + 2 if is_range else i
        ranges.append((_code(found[i]), _code(found[last])))
        i = last + 1
    return ranges


def _code(member: re.Match[str]) -> int:
    digits = member[1] or member[2] or member[3]
    if digits:
        return int(digits, 16)
    return _ESCAPED.get(member[4], ord(member[4])) if member[4] else ord(member[5])
