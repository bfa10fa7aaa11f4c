"""Converts grammars in GBNF, llama.cpp's notation, to that of llguidance.

llguidance divides a text into terminals, each as long as possible, before it looks at rules. Rules
that do not lead back to themselves are written as terminals, which are regular expressions; a
grammar of nothing else is a single one, and exact. In others, a terminal goes on as long as it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_DEPTH = 100
"""Most groups within one another, and rules that lead to one another."""
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)+")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\n]*)+")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_DEFINED = re.compile(r"\s*::=")
_TIMES = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_ESCAPES |= {"^": "^", "/": "/", "'": "'"}


class _Reference(NamedTuple):
    name: str


_Part = str | _Reference
"""What is written as it is, or the name of a rule."""


def convert_gbnf(text: str) -> str:
    """The grammar in the notation of llguidance; `root` is its beginning.

    Raises:
        ValueError: It is malformed; the message says where.
    """
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise ValueError("has no rule `root`")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}{i}" for i, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, parts in rules.items():
        body = " ".join(p if isinstance(p, str) else names[p.name] for p in parts)
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines)


def _terminals(rules: dict[str, list[_Part]]) -> set[str]:
    """Rules that do not lead back to themselves, nor to others that do."""
    left = {
        name: {part.name for part in parts if isinstance(part, _Reference)}
        for name, parts in rules.items()
    }
    found: set[str] = set()
    for _ in range(MAX_DEPTH):
        more = {name for name, needed in left.items() if needed <= found and name not in found}
        found |= more
        if not more:
            return found
    raise ValueError(f"more than {MAX_DEPTH} rules lead to one another")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, list[_Part]]:
        """The rules by name."""
        found: dict[str, list[_Part]] = {}
        used: dict[str, int] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name()
            if self._take(_DEFINED) is None:
                raise self._error("`::=` is expected")
            if name in found:
                raise self._error(f"`{name}` is defined twice")
            self._skip(_SPACE_AND_LINES)
            parts = list(self._alternatives(used, 0))
            found[name] = parts
            self._skip(_SPACE_AND_LINES)
        for name, at in used.items():
            if name not in found:
                self._at = at
                raise self._error(f"there is no rule `{name}`")
        return found

    def _alternatives(self, used: dict[str, int], depth: int) -> Iterator[_Part]:
        if depth > MAX_DEPTH:
            raise self._error("is nested too deeply")
        is_empty = True
        while self._at < len(self._text):
            self._skip(_SPACE_AND_LINES if depth else _SPACE)
            character = self._text[self._at : self._at + 1]
            if character == "|":
                if is_empty:
                    yield '""'
                yield "|"
                self._at += 1
                self._skip(_SPACE_AND_LINES)
                is_empty = True
                continue
            if character in ("", "\n", "\r") or (character == ")" and depth):
                # A line that begins with `|` goes on with the rule.
                ahead = _SPACE_AND_LINES.match(self._text, self._at)
                if ahead is not None and self._text[ahead.end() : ahead.end() + 1] == "|":
                    self._at = ahead.end()
                    continue
                break
            is_empty = False
            yield from self._item(character, used, depth)
        if is_empty:
            yield '""'

    def _item(self, character: str, used: dict[str, int], depth: int) -> Iterator[_Part]:
        if character == "(":
            self._at += 1
            yield "("
            yield from self._alternatives(used, depth + 1)
            self._skip(_SPACE_AND_LINES)
            if self._text[self._at : self._at + 1] != ")":
                raise self._error("`)` is expected")
            self._at += 1
            yield ")" + self._times()
        elif character == '"':
            yield f"({self._literal()}){self._times()}"
        elif character == "[":
            yield f"{self._class()}{self._times()}"
        elif character == ".":
            self._at += 1
            yield f"/(?s:.)/{self._times()}"
        else:
            at = self._at
            name = self._name()
            used.setdefault(name, at)
            yield "("
            yield _Reference(name)
            yield ")" + self._times()

    def _times(self) -> str:
        self._skip(_SPACE)
        found = self._take(_TIMES)
        if found is None:
            return ""
        if found[1] is None:
            return found[0]
        return "{" + found[1] + (f",{found[3] or ''}" if found[2] else "") + "}"

    def _literal(self) -> str:
        self._at += 1
        codes = []
        while (code := self._character('"')) is not None:
            codes.append(code)
        return f"/{''.join(map(_spelled, codes))}/" if codes else '""'

    def _class(self) -> str:
        self._at += 1
        is_negated = self._text[self._at : self._at + 1] == "^"
        self._at += is_negated
        members = []
        while (first := self._character("]")) is not None:
            last: int | None = first
            is_range = self._text[self._at : self._at + 1] == "-"
            if is_range and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character("]")
            if last is None or last < first:
                raise self._error("a range of nothing")
            members.append(f"{_spelled(first)}-{_spelled(last)}")
        if not members:
            return r"/[\x{0}-\x{10ffff}]/" if is_negated else r"/[^\x{0}-\x{10ffff}]/"
        return f"/[{'^' if is_negated else ''}{''.join(members)}]/"

    def _character(self, end: str) -> int | None:
        """The next character's code; None at the end."""
        if self._at >= len(self._text) or self._text[self._at] == "\n":
            raise self._error(f"`{end}` is expected")
        if self._text[self._at] == end:
            self._at += 1
            return None
        code = ord(self._text[self._at])
        if self._text[self._at] == "\\":
            escaped = self._take(_CODE)
            if escaped is not None:
                code = int(escaped[1] or escaped[2] or escaped[3], 16)
            else:
                kind = self._text[self._at + 1 : self._at + 2]
                if kind not in _ESCAPES or not kind:
                    raise self._error("this escape is not known")
                code = ord(_ESCAPES[kind])
                self._at += 2
        else:
            self._at += 1
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error("half a character")
        return code

    def _name(self) -> str:
        found = self._take(_NAME)
        if found is None:
            raise self._error("a name is expected")
        return found[0]

    def _take(self, what: re.Pattern[str]) -> re.Match[str] | None:
        found = what.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip(self, what: re.Pattern[str]) -> None:
        self._take(what)

    def _error(self, message: str) -> ValueError:
        before = self._text[: self._at]
        line = before.count("\n") + 1
        return ValueError(f"at line {line}, column {self._at - before.rfind(chr(10))}: {message}")


def _spelled(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
