"""Regular expressions: which ones mean the same to the compiler as to who wrote them."""

from __future__ import annotations

import re

_UNSPELLABLE = "a pattern that spells a quote, a backslash or a control character is not supported"
_ASSERTIONS = ("(?=", "(?!", "(?<=", "(?<!")
_CONTROL_ESCAPES = "nrtfv0c"
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|(.))", re.DOTALL)
_LEFT_ESCAPES = "dDsSwWnrtfvbB"
"""Escapes by letters that every dialect reads alike, or the compiler refuses."""
_CARETS = re.compile(r"\[(?:\^|\\(?:\^|x5[eE]|u005[eE]))+")
"""The beginning of a class whose first member may be an escaped `^`."""
_GROUP = re.compile(r"\((?:\?(?::|<\w+>))?")


def prepare_regex(regex: str, where: str = "") -> str:
    """Converts a regular expression to the form that the compiler interprets correctly.

    The compiler takes escapes that it does not know for letters, and leaves out anchors that are
    not at an end; to it a point is any character, also a line break.

    Args:
        regex: To be matched by a whole text.
        where: Its place, for the message.

    Raises:
        ValueError: There is no right way to read it.
    """
    parts: list[str] = []
    at_start = [True]
    """Of each open group, the innermost last: whether a text may begin at this place."""
    i = 0
    while i < len(regex):
        begin, character = i, regex[i]
        if character == "(":
            group = _GROUP.match(regex, i)
            i = i + 1 if group is None else group.end()
            at_start.append(at_start[-1])
        elif character == ")":
            i += 1
            at_start = at_start[:-1] or [False]
            at_start[-1] = False
        elif character == "|":
            i += 1
            at_start[-1] = len(at_start) == 1 or at_start[-2]
        elif character == "^":
            i += 1
            _require(at_start[-1], where, begin, "`^` is supported at the beginning alone")
        elif character == "$":
            i += 1
            is_end = not regex[i:].strip(")") or (len(at_start) == 1 and regex[i] == "|")
            _require(is_end, where, begin, "`$` is supported at the end alone")
        else:
            i = _class_end(regex, i) if character == "[" else i + 1
            if character == "\\":
                i = _escape_end(regex, begin, where)
            at_start[-1] = False
        parts.append(_written(regex[begin:i], begin, where))
    return "".join(parts)


def _written(part: str, begin: int, where: str) -> str:
    """A class, an escape or a character, as the compiler reads it rightly."""
    if part == ".":
        return r"[^\n]"
    if part[0] == "[":
        for found in _ESCAPE.finditer(part):
            _escape_end(part, found.start(), where, begin)
        part = _without_first_caret(part, begin, where)
    return _ESCAPE.sub(lambda found: f"\\u{{{found[1]}}}" if found[1] else found[0], part)


def _without_first_caret(part: str, begin: int, where: str) -> str:
    """A class that begins with an escaped `^`, by which the compiler would negate it, as an
    alternative to the rest.
    """
    carets = _CARETS.match(part)
    if carets is None or part[1] == "^" or part[-1] != "]":
        return part
    rest = part[carets.end() :]
    is_range = rest[0] == "-" and rest != "-]"
    _require(not is_range, where, begin, "a range from `^` must not be the first in a class")
    return r"\^" if rest == "]" else rf"(?:\^|[{rest})"


def _class_end(regex: str, begin: int) -> int:
    i = begin + 1
    while i < len(regex) and (regex[i] != "]" or i == begin + 1):
        i += 2 if regex[i] == "\\" else 1
    return i + 1


def _escape_end(regex: str, i: int, where: str, offset: int = 0) -> int:
    """Where the escape at `i` ends; refuses one that dialects read differently."""
    found = _ESCAPE.match(regex, i)
    kind = "" if found is None else found[2] or ""
    is_null = kind == "0" and not regex[i + 2 : i + 3].isdigit()
    is_read_alike = kind in _LEFT_ESCAPES or is_null or not (kind.isascii() and kind.isalnum())
    _require(found is not None and is_read_alike, where, offset + i, "this escape is not supported")
    assert found is not None
    return found.end()


def _require(is_right: bool, where: str, position: int, message: str) -> None:
    if not is_right:
        place = f"at {where}, position {position}" if where else f"at position {position}"
        raise ValueError(f"{place}: {message}")


def prepare_pattern(pattern: str, where: str) -> str:
    """Converts a schema's pattern as `prepare_regex` does.

    It is matched against the string as it is written: a literal that JSON has to escape would break
    the JSON. Classes of characters leave such characters out (`string_patterns`).

    Args:
        pattern: Regular expression of ECMA-262.
        where: Its place, for the message.

    Raises:
        ValueError: There is no right way to read it.
    """
    _check_pattern(pattern, where)
    return prepare_regex(pattern, where)


def placeholder(number: int) -> str:
    """What stands for a pattern in the schema that is compiled."""
    return f"pattern{number}"


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
