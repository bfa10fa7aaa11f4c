"""Converts grammars in GBNF, llama.cpp's notation, to that of llguidance.

llguidance divides a text into terminals, each as long as possible, before it looks at rules. This
module writes a rule that is not recursive as a terminal, that is as a regular
expression. If a character that may follow the rule could also continue it, the rule stays a rule of
single characters. A grammar without recursion becomes one terminal.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

from weft.engine.features.constraints.patterns import ANYTHING, NOTHING, spell

MAX_DEPTH = 100
"""Most nested groups, and longest chain of rules that name one another."""
MAX_STEPS = 1_000_000
"""Most looks at parts of rules: about a second. Rules that name one another are looked at until
nothing changes, which for rules written to that end takes time in the cube of their number.
"""
_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)+")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\n]*)+")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_DEFINED = re.compile(r"\s*::=")
_TIMES = re.compile(r"[*+?]|\{\s*+(\d++)\s*+(?:(,)\s*+(\d++)?\s*+)?+\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_ESCAPES |= {"^": "^", "/": "/", "'": "'"}
_LAST = 0x10FFFF


class _Text(NamedTuple):
    regex: str
    firsts: tuple[tuple[int, int], ...]
    """Ranges of the characters that the text can begin with; none: the text is empty."""


class _Reference(NamedTuple):
    name: str


class _Sequence(NamedTuple):
    parts: tuple[_Node, ...]


class _Choice(NamedTuple):
    parts: tuple[_Node, ...]


class _Repeated(NamedTuple):
    part: _Node
    times: str
    is_optional: bool
    comes_again: bool


_Node = _Text | _Reference | _Sequence | _Choice | _Repeated
# What matches nothing is not empty either.
_NEVER = _Text(NOTHING, ((0, 0),))


class _Sets(NamedTuple):
    """Facts about the texts of a node. Each bit represents one class of characters that the grammar
    treats alike.
    """

    firsts: int
    is_empty: bool
    """Whether the node has the empty text."""
    more: int
    """Characters that may extend a text of the node to a longer text of the node."""


def convert_gbnf(text: str, part: str = "") -> str:
    """Writes the grammar in the notation of llguidance, beginning at the rule `root`. Raises
    ValueError if the grammar is malformed, where the message says the place, or too complex.

    Args:
        part: Lower-case beginning of all names, for a grammar that is a part of another one, where
            any text may follow it; empty: it is the whole grammar.
    """
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise ValueError("has no rule `root`")
    return _Writer(rules, part).write()


class _Writer:
    def __init__(self, rules: dict[str, _Node], part: str = "") -> None:
        self._num_steps = 0
        ending = self._ending(rules)
        if "root" not in ending:
            raise ValueError("no text satisfies it that ever ends")
        pruned = {name: _pruned(node, ending) for name, node in rules.items()}
        rules = {name: node for name, node in pruned.items() if node is not None}
        self._rules = rules
        self._part = part
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._terminals = _terminals(rules)
        """Rules without recursion, in themselves or in the rules that they name."""
        firsts = [edge for node in rules.values() for edge in _edges(node)]
        self._edges = sorted({0, *(low for low, _ in firsts), *(high + 1 for _, high in firsts)})
        self._sets = dict.fromkeys(rules, _Sets(0, False, 0))
        before: dict[str, _Sets] = {}
        while before != self._sets:
            before = dict(self._sets)
            # From the last rule, since a rule mostly stands before those that it names.
            for name, node in reversed(rules.items()):
                self._sets[name] = self._of(node)

    def write(self) -> str:
        lifted = set(self._terminals)
        while True:
            follow = self._follow(lifted)
            wrong = {name for name in lifted if self._sets[name].more & follow.get(name, 0)}
            if not wrong:
                break
            lifted -= wrong
        lines = [f"{self._part}start: {self._name('root', lifted)}"]
        for name, node in self._rules.items():
            if name in self._terminals:
                lines.append(
                    f"{self._name(name, self._terminals)}: {self._written(node, self._terminals)}"
                )
            if name not in lifted:
                lines.append(f"{self._name(name, set())}: {self._written(node, lifted)}")
        return "\n".join(lines)

    def _name(self, name: str, lifted: set[str]) -> str:
        written = f"{self._part}{'t' if name in lifted else 'r'}{self._numbers[name]}"
        return written.upper() if name in lifted else written

    def _written(self, node: _Node, lifted: set[str]) -> str:
        if isinstance(node, _Text):
            return f"/{node.regex}/" if node.regex else '""'
        if isinstance(node, _Reference):
            return self._name(node.name, lifted)
        if isinstance(node, _Repeated):
            return f"({self._written(node.part, lifted)}){node.times}"
        parts = [self._written(part, lifted) for part in node.parts]
        if isinstance(node, _Choice):
            return f"({' | '.join(parts)})"
        return " ".join(parts) or '""'

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise ValueError("is too complex: its rules name one another in too many ways")

    def _ending(self, rules: dict[str, _Node]) -> set[str]:
        """Names of the rules that have a text. The others go on for ever."""
        found: set[str] = set()
        num_before = -1
        while num_before < len(found):
            num_before = len(found)
            for name, node in reversed(rules.items()):
                if name not in found and self._ends(node, found):
                    found.add(name)
        return found

    def _ends(self, node: _Node, ending: set[str]) -> bool:
        self._count(1)
        if isinstance(node, _Text):
            return node.regex != NOTHING
        if isinstance(node, _Reference):
            return node.name in ending
        if isinstance(node, _Repeated):
            return node.is_optional or self._ends(node.part, ending)
        parts = (self._ends(part, ending) for part in node.parts)
        return any(parts) if isinstance(node, _Choice) else all(parts)

    def _of(self, node: _Node) -> _Sets:
        self._count(1)
        if isinstance(node, _Text):
            return _Sets(self._mask(node.firsts), not node.firsts, 0)
        if isinstance(node, _Reference):
            return self._sets[node.name]
        if isinstance(node, _Repeated):
            sets = self._of(node.part)
            again = sets.firsts if node.comes_again else 0
            return _Sets(sets.firsts, sets.is_empty or node.is_optional, sets.more | again)
        firsts, is_empty, more = 0, isinstance(node, _Sequence), 0
        for part in reversed(node.parts):
            sets = self._of(part)
            if isinstance(node, _Choice):
                firsts, is_empty, more = (
                    firsts | sets.firsts,
                    is_empty or sets.is_empty,
                    more | sets.more,
                )
                continue
            # If the rest may be empty, its first characters may extend a text.
            more |= (sets.more | firsts) if is_empty else 0
            firsts = sets.firsts | (firsts if sets.is_empty else 0)
            is_empty = is_empty and sets.is_empty
        return _Sets(firsts, is_empty, more)

    def _mask(self, ranges: tuple[tuple[int, int], ...]) -> int:
        self._count(len(ranges))
        mask = 0
        for low, high in ranges:
            begin, end = (bisect_left(self._edges, edge) for edge in (low, high + 1))
            mask |= (1 << end) - (1 << begin)
        return mask

    def _follow(self, lifted: set[str]) -> dict[str, int]:
        follow = {"root": (1 << len(self._edges)) - 1 if self._part else 0}
        before: dict[str, int] = {}
        while before != follow:
            before = dict(follow)
            for name in before:
                if name not in lifted:
                    self._add(self._rules[name], follow[name], follow)
        return follow

    def _add(self, node: _Node, behind: int, follow: dict[str, int]) -> None:
        self._count(1)
        if isinstance(node, _Reference):
            follow[node.name] = follow.get(node.name, 0) | behind
        elif isinstance(node, _Repeated):
            again = self._of(node.part).firsts if node.comes_again else 0
            self._add(node.part, behind | again, follow)
        elif isinstance(node, _Choice):
            for part in node.parts:
                self._add(part, behind, follow)
        elif isinstance(node, _Sequence):
            for part in reversed(node.parts):
                self._add(part, behind, follow)
                sets = self._of(part)
                behind = sets.firsts | (behind if sets.is_empty else 0)


def _edges(node: _Node) -> list[tuple[int, int]]:
    if isinstance(node, _Text):
        return list(node.firsts)
    if isinstance(node, _Repeated):
        return _edges(node.part)
    if isinstance(node, _Reference):
        return []
    return [edge for part in node.parts for edge in _edges(part)]


def _references(node: _Node) -> set[str]:
    if isinstance(node, _Reference):
        return {node.name}
    if isinstance(node, _Repeated):
        return _references(node.part)
    parts = () if isinstance(node, _Text) else node.parts
    return {name for part in parts for name in _references(part)}


def _pruned(node: _Node, ending: set[str]) -> _Node | None:
    """The node without what leads to no text; None: all of it. Otherwise a model could begin what
    it cannot end.

    Args:
        ending: Names of the rules that have a text.
    """
    if isinstance(node, _Text):
        return None if node.regex == NOTHING else node
    if isinstance(node, _Reference):
        return node if node.name in ending else None
    if isinstance(node, _Repeated):
        part = _pruned(node.part, ending)
        if part is not None:
            return node._replace(part=part)
        return _Sequence(()) if node.is_optional else None
    parts = [_pruned(part, ending) for part in node.parts]
    kept = tuple(part for part in parts if part is not None)
    if isinstance(node, _Choice):
        return _Choice(kept) if kept else None
    return _Sequence(kept) if len(kept) == len(parts) else None


def _terminals(rules: dict[str, _Node]) -> set[str]:
    left = {name: _references(node) for name, node in rules.items()}
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
        self._used: dict[str, int] = {}
        """Where each name is used first."""

    def rules(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        self._take(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._name()
            if self._take(_DEFINED) is None:
                raise self._error("`::=` is expected")
            if name in found:
                raise self._error(f"`{name}` is defined twice")
            self._take(_SPACE_AND_LINES)
            found[name] = self._alternatives(0)
            self._take(_SPACE_AND_LINES)
        for name, at in self._used.items():
            if name not in found:
                self._at = at
                raise self._error(f"there is no rule `{name}`")
        return found

    def _alternatives(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self._error("is nested too deeply")
        choices: list[list[_Node]] = [[]]
        while self._at < len(self._text):
            self._take(_SPACE_AND_LINES if depth else _SPACE)
            character = self._text[self._at : self._at + 1]
            if character == "|":
                self._at += 1
                self._take(_SPACE_AND_LINES)
                choices.append([])
            elif character in ("", "\n", "\r") or (character == ")" and depth):
                # A line that begins with `|` continues the rule.
                ahead = _SPACE_AND_LINES.match(self._text, self._at)
                if ahead is None or self._text[ahead.end() : ahead.end() + 1] != "|":
                    break
                self._at = ahead.end()
            else:
                choices[-1].append(self._repeated(self._item(character, depth)))
        sequences = tuple(_Sequence(tuple(parts)) for parts in choices)
        return sequences[0] if len(sequences) == 1 else _Choice(sequences)

    def _item(self, character: str, depth: int) -> _Node:
        if character == "(":
            self._at += 1
            found = self._alternatives(depth + 1)
            self._take(_SPACE_AND_LINES)
            if self._text[self._at : self._at + 1] != ")":
                raise self._error("`)` is expected")
            self._at += 1
            return found
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return _Text(ANYTHING, ((0, _LAST),))
        at = self._at
        name = self._name()
        self._used.setdefault(name, at)
        return _Reference(name)

    def _repeated(self, part: _Node) -> _Node:
        self._take(_SPACE)
        found = self._take(_TIMES)
        if found is None:
            return part
        if found[1] is None:
            return _Repeated(part, found[0], found[0] in "*?", found[0] in "*+")
        most = found[3] if found[2] else found[1]
        if most is not None and int(most) == int(found[1]) == 0:
            return _Sequence(())
        times = "{" + found[1] + (f",{found[3] or ''}" if found[2] else "") + "}"
        return _Repeated(part, times, int(found[1]) == 0, most is None or int(most) > 1)

    def _literal(self) -> _Text:
        self._at += 1
        codes = []
        while (code := self._character('"')) is not None:
            codes.append(code)
        return _Text("".join(map(spell, codes)), tuple((code, code) for code in codes[:1]))

    def _class(self) -> _Text:
        self._at += 1
        is_negated = self._text[self._at : self._at + 1] == "^"
        self._at += is_negated
        members: list[tuple[int, int]] = []
        while (first := self._character("]")) is not None:
            last: int | None = first
            is_range = self._text[self._at : self._at + 1] == "-"
            if is_range and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character("]")
            if last is None or last < first:
                raise self._error("a range of nothing")
            members.append((first, last))
        if is_negated:
            members = _others(members)
        if not members:
            return _NEVER
        spelled = "".join(f"{spell(low)}-{spell(high)}" for low, high in members)
        return _Text(f"[{spelled}]", tuple(members))

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

    def _error(self, message: str) -> ValueError:
        before = self._text[: self._at]
        line = before.count("\n") + 1
        return ValueError(f"at line {line}, column {self._at - before.rfind(chr(10))}: {message}")


def _others(members: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found, begin = [], 0
    for low, high in sorted(members):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found
