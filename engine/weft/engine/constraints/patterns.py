"""Regular expressions inside JSON strings: which patterns a schema may contain."""

from __future__ import annotations

import re

_UNSPELLABLE = "a pattern that spells a quote, a backslash or a control character is not supported"
_ASSERTIONS = ("(?=", "(?!", "(?<=", "(?<!")
_NOT_ASCII = re.compile(r"\\?([^\x00-\x7f])")
_CONTROL_ESCAPES = "nrtfv0c"


def prepare_pattern(pattern: str, where: str) -> str:
    """Converts a schema's pattern to the form that the compiler interprets correctly.

    It matches patterns against the string as it is written: a literal that JSON has to escape would
    break the JSON. Classes of characters leave such characters out, but only while all of the
    pattern is ASCII. What looks around is ignored.

    Args:
        pattern: Regular expression of ECMA-262.
        where: Its place, for the message.

    Raises:
        ValueError: There is no right way to read it.
    """
    _check_pattern(pattern, where)
    return _NOT_ASCII.sub(lambda found: f"\\u{{{ord(found[1]):X}}}", pattern)


def _check_pattern(pattern: str, where: str) -> None:
    for assertion in _ASSERTIONS:
        if assertion in pattern:
            raise ValueError(f"at {where}: looking around ({assertion}...) is not supported")
    i = 0
    while i < len(pattern):
        character = pattern[i]
        if character == "[":
            i = _check_class(pattern, i, where)
            continue
        if character == "\\":
            if pattern[i + 1 : i + 2] in ("b", "B"):
                raise ValueError(f"at {where}: word boundaries are not supported")
            spelled, i = _escaped(pattern, i)
        else:
            spelled, i = character, i + 1
        if _must_be_escaped(spelled):
            raise ValueError(f"at {where}: {_UNSPELLABLE}")


def _check_class(pattern: str, begin: int, where: str) -> int:
    """Checks the class that begins at `begin`; returns where it ends."""
    i = begin + 1
    members: list[str] = []
    while i < len(pattern) and (pattern[i] != "]" or i == begin + 1):
        if pattern[i] == "\\":
            spelled, i = _escaped(pattern, i)
        else:
            spelled, i = pattern[i], i + 1
        members.append(spelled)
    # A class of one character is read as that character.
    if members and all(_must_be_escaped(member) for member in members):
        raise ValueError(f"at {where}: {_UNSPELLABLE}")
    return i + 1


def _escaped(pattern: str, i: int) -> tuple[str, int]:
    """The character that the escape at `i` stands for ("" for a character class), and its end."""
    kind = pattern[i + 1 : i + 2]
    width = {"x": 2, "u": 4}.get(kind, 0)
    digits = pattern[i + 2 : i + 2 + width]
    if width and len(digits) == width and all(d in "0123456789abcdefABCDEF" for d in digits):
        return chr(int(digits, 16)), i + 2 + width
    if kind and kind in _CONTROL_ESCAPES:
        return "\n", i + 2
    return ("" if kind.isalpha() else kind), i + 2


def _must_be_escaped(spelled: str) -> bool:
    return spelled in ('"', "\\") or (len(spelled) == 1 and spelled < " ")
