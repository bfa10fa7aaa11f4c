"""Untrusted regular expressions: refuses slow forms, and limits the time of a match.

Python's `re` holds the GIL while it matches: an expression that backtracks for ever would stop the
whole engine, not only the load of its adapter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import regex
from weft.contract.errors import AdapterError

MATCH_S = 0.2
"""Seconds that a match may take; matching a name takes a few microseconds."""
_MAX_LENGTH = 4096
_MAX_DEGREE = 6
_REPEAT = re.compile(r"(?:[*+?]|\{\d*,?\d*\})[?+]?")
_GROUP_HEAD = re.compile(r"\(\?(?:P<\w+>|[aiLmsux-]*:|<?[=!]|>)?")


@dataclass(slots=True)
class _Group:
    """The part of an open parenthesis group seen so far."""

    degree: int = 0
    """Consecutive repeats in the alternative that is being read."""
    highest: int = 0
    """Highest such number among the alternatives before it."""
    has_alternatives: bool = False

    def total(self) -> int:
        return max(self.degree, self.highest)


def match(pattern: str, name: str, *, is_whole: bool = False) -> regex.Match[str] | None:
    """Matches the beginning of a name as `re.match` does, or the whole name; releases the GIL.
    Raises AdapterError if the match takes longer than MATCH_S.
    """
    try:
        matched = regex.fullmatch if is_whole else regex.match
        return matched(pattern, name, timeout=MATCH_S, concurrent=True)
    except TimeoutError as error:
        raise AdapterError(
            f"adapter_config.json: {pattern[:80]!r} takes longer than {MATCH_S} s to match "
            f"{name[:80]!r}"
        ) from error
    except regex.error as error:
        raise AdapterError(f"adapter_config.json: {pattern[:80]!r}: {error}") from error


def is_quick(pattern: str) -> bool:
    """Whether matching a name takes time bounded by a small power of its length.

    False for repeats of groups that contain repeats or alternatives (exponential time), and for
    more than a few repeats in a row (each adds a power of the length).
    """
    if len(pattern) > _MAX_LENGTH:
        return False
    stack = [_Group()]
    i = 0
    while i < len(pattern):
        i, inner = _item(pattern, i, stack)
        if inner is None:
            continue
        found = _REPEAT.match(pattern, i)
        if found is None:
            stack[-1].degree += inner.total()
            continue
        is_optional = found[0] in ("?", "??")
        if not is_optional and (inner.total() or inner.has_alternatives):
            return False
        stack[-1].degree += inner.total() + 1
        i = found.end()
    return max(group.total() for group in stack) <= _MAX_DEGREE


def _item(pattern: str, i: int, stack: list[_Group]) -> tuple[int, _Group | None]:
    """Returns the end of the item that begins at `i`. The item itself is None if no repeat may
    follow it.
    """
    character = pattern[i]
    if character == "\\":
        return i + 2, _Group()
    if character == "[":
        return _class_end(pattern, i), _Group()
    if character == "(":
        head = _GROUP_HEAD.match(pattern, i)
        stack.append(_Group())
        return (head.end() if head else i + 1), None
    if character == ")" and len(stack) > 1:
        return i + 1, stack.pop()
    if character == "|":
        group = stack[-1]
        group.highest, group.degree, group.has_alternatives = group.total(), 0, True
        return i + 1, None
    return i + 1, _Group()


def _class_end(pattern: str, begin: int) -> int:
    i = begin + 1
    if pattern[i : i + 1] == "^":
        i += 1
    # A bracket in first place stands for itself.
    i += 1
    while i < len(pattern) and pattern[i - 1 : i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i
