"""Regular expressions as clients write them (ECMA-262, Python), in the syntax of llguidance.

The syntaxes agree on most things. Differences are spelled out: classes of characters, escapes, the
characters that a dot matches. A part without an equal in llguidance is refused with its position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SPACES = (
    r"\t\n\x{b}\x{c}\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
)
"""Characters that both ECMA-262 and Python take for white space."""
_MORE_SPACES = rf"{_SPACES}\x{{1c}}-\x{{1f}}\x{{85}}\x{{feff}}"
"""Characters that one of the two takes for white space."""
_SETS = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACES}]",
    "S": f"[^{_MORE_SPACES}]",
}
_SETS_NEGATED = {**_SETS, "s": f"[{_MORE_SPACES}]", "S": f"[^{_SPACES}]"}
"""Sets as members of a negated class. The characters that remain belong to the class in both
dialects.
"""
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
ANYTHING = r"[\x{0}-\x{10ffff}]"
NOTHING = r"[^\x{0}-\x{10ffff}]"
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?(?!\?)")
_IGNORING_CASE = re.compile(r"\(\?i\)")
_REPEATED = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})")
_PROPERTY = re.compile(r"\\[pP]\{[A-Za-z_=]+\}")
_ONE_CLASS = re.compile(r"(\[\^?[^\[\]\\^]+\])\{([0-9]+),[0-9]*\}")
"""A pattern that is one repeated class without anchors."""
_AHEAD = re.compile(
    r"\(\?!\^?\[(?P<others>(?:[^\\\[\]^]|\\.)+)\]\*\$\)"
    r"|\(\?=(?P<ahead>(?:[^()\[\]\\|]|\\.|\[(?:[^\[\]\\]|\\.)+\])+)\)"
)
"""Look-ahead that is a complete pattern: `(?![-+.]*$)`, `(?=.*[A-Z])`."""
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)

_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_SECONDS = r"\d+([.,]\d+)?S"
_WITHOUT_LOOKAHEAD = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T{time})?|T{time})$"
    ).replace("{time}", rf"(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]" + _DOMAIN
    ),
}
"""Patterns of zod, of e-mail addresses and durations, and equal ones without look-ahead."""


def convert_pattern(pattern: str) -> str:
    """Converts the pattern of a JSON schema, which may match anywhere in a string. Raises
    ValueError if some part of it has no equal there.
    """
    pattern = _WITHOUT_LOOKAHEAD.get(pattern, pattern)
    if found := _ONE_CLASS.fullmatch(pattern):
        # A string that has a longer match also has the shortest one, so only that one is required.
        pattern = f"{found[1]}{{{found[2]}}}"
    return _Converter(pattern, keeps_anchors=True).convert()


def convert_regex(regex: str) -> str:
    """Converts a regular expression that a whole text has to match. Raises ValueError if some part
    of it has no equal there.
    """
    return _Converter(regex, keeps_anchors=False).convert()


def without_lookahead(pattern: str) -> list[str]:
    """Patterns that together match the strings that a pattern with look-ahead at its start matches.

    Each look-ahead becomes a separate pattern of the whole text. The opposite of one is known where
    it is a class that is repeated to the end: some character is of no such class.
    """
    if pattern in _WITHOUT_LOOKAHEAD or not pattern.startswith("^"):
        return [pattern]
    found, at = list[str](), 1
    while ahead := _AHEAD.match(pattern, at):
        at = ahead.end()
        others = ahead["others"]
        found.append(f"[^{others}]" if others is not None else f"^(?:{ahead['ahead']})")
    rest = f"^{pattern[at:]}"
    # The look-ahead does not apply to a branch outside of it.
    return [rest, *found] if found and not _has_branches(rest) else [pattern]


def _has_branches(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of all groups and classes."""
    bare = re.sub(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", "", pattern, flags=re.DOTALL)
    depth = 0
    for character in bare:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


class _Converter:
    def __init__(self, text: str, *, keeps_anchors: bool) -> None:
        self._text = text
        self._end = len(text.rstrip(")"))
        """Index after which nothing but the ends of groups follows."""
        self._keeps_anchors = keeps_anchors
        self._at = 0

    def convert(self) -> str:
        parts: list[str] = []
        at_start = [True]
        """For each open group, the innermost last: whether a text may begin at this place."""
        if self._take(_IGNORING_CASE):
            parts.append("(?i)")
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "(":
                self._open()
                parts.append("(?:")
                at_start.append(at_start[-1])
                continue
            if character == ")":
                self._require(len(at_start) > 1, "unmatched `)`")
                at_start.pop()
                at_start[-1] = False
            elif character == "|":
                at_start[-1] = len(at_start) == 1 or at_start[-2]
            elif character in "^$":
                parts.append(self._anchor(character, at_start[-1], len(at_start)))
                continue
            else:
                at_start[-1] = False
                parts.append(self._atom(character))
                continue
            self._at += 1
            parts.append(character)
            if character == ")":
                parts.append(self._repetition())
        self._require(len(at_start) == 1, "unmatched `(`")
        return "".join(parts)

    def _open(self) -> None:
        group = _GROUP.match(self._text, self._at)
        self._require(group is not None, "looking around and flags are not supported")
        assert group is not None
        self._at = group.end()

    def _anchor(self, character: str, is_start: bool, depth: int) -> str:
        """Converts an anchor; at an end of a pattern for a whole text it changes nothing."""
        if not self._keeps_anchors:
            behind = self._at + 1
            is_end = behind >= self._end or (depth == 1 and self._text[behind] == "|")
            self._require(
                is_start if character == "^" else is_end,
                f"`{character}` is supported at the {'beginning' if character == '^' else 'end'} "
                "alone",
            )
        self._at += 1
        self._require(self._take(_REPEATED) is None, "an anchor cannot be repeated")
        return character if self._keeps_anchors else ""

    def _atom(self, character: str) -> str:
        if character == "[":
            atom = self._class()
        elif character == ".":
            atom = _DOT
            self._at += 1
        elif character == "\\":
            found = self._escape()
            atom = found if isinstance(found, str) else spell(found)
        else:
            self._require(self._take(_REPEATED) is None, "nothing to repeat")
            atom = spell(self._character())
        return atom + self._repetition()

    def _repetition(self) -> str:
        found = self._take(_REPEATED)
        if found is None:
            return ""
        if self._text[self._at : self._at + 1] == "?":
            self._at += 1  # Lazy and greedy repetitions match the same texts.
        self._require(self._take(_REPEATED) is None, "a repetition cannot be repeated")
        return found[0]

    def _character(self) -> int:
        code = ord(self._text[self._at])
        self._require(code not in _HIGH and code not in _LOW, "half a character")
        self._at += 1
        return code

    def _escape(self, sets: Mapping[str, str] = _SETS, *, in_class: bool = False) -> str | int:
        """The class or the character that an escape denotes."""
        code = self._code()
        if code is not None:
            return code
        if found := self._take(_PROPERTY):
            return found[0]
        kind = self._text[self._at + 1 : self._at + 2]
        self._require(kind != "", "ends within an escape")
        is_null = kind == "0" and not self._text[self._at + 2 : self._at + 3].isdigit()
        is_itself = not (kind.isascii() and kind.isalnum())
        is_known = kind in _SETS or kind in _CONTROLS or is_null or is_itself
        if kind == "b" and in_class:
            is_known = True
        self._require(is_known, "this escape is not supported")
        self._at += 2
        if kind in _SETS:
            return sets[kind]
        if kind == "b":
            return 0x08
        return 0 if is_null else _CONTROLS.get(kind, ord(kind))

    def _code(self) -> int | None:
        """Two surrogates are one character."""
        found = self._take(_CODE)
        if found is None:
            return None
        code = int(found[1] or found[2] or found[3], 16)
        if code in _HIGH:
            second = self._take(_CODE)
            low = int(second[2] or "0", 16) if second is not None else 0
            self._require(low in _LOW, "half a character")
            code = 0x10000 + ((code - _HIGH.start) << 10) + (low - _LOW.start)
        self._require(code not in _LOW and code <= 0x10FFFF, "half a character")
        return code

    def _class(self) -> str:
        self._at += 1
        is_negated = self._text[self._at : self._at + 1] == "^"
        self._at += is_negated
        sets = _SETS_NEGATED if is_negated else _SETS
        members: list[str] = []
        while self._text[self._at : self._at + 1] != "]":
            self._require(self._at < len(self._text), "unmatched `[`")
            first = self._member(sets)
            is_range = self._text[self._at : self._at + 1] == "-"
            if not is_range or self._text[self._at + 1 : self._at + 2] in ("]", ""):
                members.append(first if isinstance(first, str) else spell(first))
                continue
            self._at += 1
            last = self._member(sets)
            self._require(
                isinstance(first, int) and isinstance(last, int) and first <= last,
                "a range of nothing",
            )
            assert isinstance(first, int)
            assert isinstance(last, int)
            members.append(f"{spell(first)}-{spell(last)}")
        self._at += 1
        if any(sets[one] in members and sets[one.upper()] in members for one in "dws"):
            return NOTHING if is_negated else ANYTHING
        if not members:
            return ANYTHING if is_negated else NOTHING
        return f"[{'^' if is_negated else ''}{''.join(members)}]"

    def _member(self, sets: Mapping[str, str]) -> str | int:
        if self._text[self._at : self._at + 1] == "\\":
            return self._escape(sets, in_class=True)
        self._require(self._at < len(self._text), "unmatched `[`")
        return self._character()

    def _take(self, what: re.Pattern[str]) -> re.Match[str] | None:
        found = what.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _require(self, is_right: bool, message: str) -> None:
        if not is_right:
            raise ValueError(f"at position {self._at}: {message}")


def spell(code: int) -> str:
    """A character as itself, or by its code where it could be taken for something else."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
