"""Regular expressions that end a text, matched character by character in bounded time.

An expression becomes a non-deterministic automaton (Thompson, 1968) of at most `MAX_STATES` states
and `MAX_EDGES` edges. The scanner follows all states at once, so a character costs at most one look
at each edge, whatever the expression and the text. Features that need more, such as references to
groups, look-around and anchors, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from string import hexdigits
from typing import NamedTuple

from weft.gateway.text.stops import StopScanner

MAX_STATES = 512
"""Most states of the expressions of a request."""
MAX_EDGES = 1024
"""Most edges from one state over a character to another: `(a?){200}` has 20,000 of them."""
_MAX_KNOWN_CHARS = 512
"""Number of characters whose matching states are cached."""
_MAX_STEPS = 4096
"""Most steps of building an automaton, which bounds repetitions of empty expressions."""
_MAX_REPEATS = 256
_MAX_DEPTH = 128
"""Most groups inside one another."""
MAX_HELD_CHARS = 1024
"""Most characters that are held back because a match may have begun there."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PatternError(ValueError):
    """An expression that cannot be used; the message says why."""


class CharSet(NamedTuple):
    """A set of characters."""

    singles: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    kinds: str = ""
    """Letters of the escapes for classes: d, w, s, and D, W, S for their complements."""
    is_negated: bool = False

    def has(self, char: str) -> bool:
        """Whether a character belongs to it."""
        is_listed = (
            char in self.singles
            or any(first <= char <= last for first, last in self.ranges)
            or any(_is_of(kind, char) for kind in self.kinds)
        )
        return is_listed != self.is_negated


def _is_of(kind: str, char: str) -> bool:
    lower = kind.lower()
    if lower == "d":
        is_of = char.isdecimal()
    elif lower == "w":
        is_of = char.isalnum() or char == "_"
    else:
        is_of = char.isspace()
    return is_of == (kind == lower)


class _Repeat(NamedTuple):
    node: _Node
    least: int
    most: int | None
    """None: any number."""


class _All(NamedTuple):
    nodes: list[_Node]
    """All of these, in this order."""


class _Any(NamedTuple):
    nodes: list[_Node]
    """One of these."""


_Node = CharSet | _Repeat | _All | _Any


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            raise PatternError(f"unbalanced ) at position {self._at}")
        return node

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("it ends too early")
        self._at += 1
        return char

    def _alternatives(self) -> _Node:
        nodes = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else _Any(nodes)

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self._peek() and self._peek() not in "|)":
            nodes.append(self._repeated(self._atom()))
        return _All(nodes)

    def _atom(self) -> _Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char == ".":
            return CharSet("\n", is_negated=True)
        if char in "*+?":
            raise PatternError(f"nothing to repeat at position {self._at - 1}")
        if char == "$" and self._depth == 0 and self._peek() in ("", "|"):
            return _All([])  # a text ends where a match does
        if char in "^$":
            raise PatternError(
                f"anchors such as {char} are not supported, except a $ at the end, which changes "
                "nothing"
            )
        return CharSet(char)

    def _group(self) -> _Node:
        if self._peek() == "?":
            if self._pattern[self._at : self._at + 2] != "?:":
                raise PatternError("of the groups that begin with (? only (?: is supported")
            self._at += 2
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"more than {_MAX_DEPTH} groups within each other")
        node = self._alternatives()
        self._depth -= 1
        if self._peek() != ")":
            raise PatternError("a group is not closed")
        self._at += 1
        return node

    def _repeated(self, node: _Node) -> _Node:
        while (char := self._peek()) and char in "*+?{":
            bounds = self._bounds()
            if bounds is None:
                break
            node = _Repeat(node, *bounds)
            if self._peek() == "+":
                raise PatternError("possessive repetitions are not supported")
            if self._peek() == "?":
                # Lazy or not makes no difference, since the first complete match counts.
                self._at += 1
        return node

    def _bounds(self) -> tuple[int, int | None] | None:
        char = self._peek()
        if char != "{":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, 0)].partition(",")
        given = [part for part in (low, high) if part]
        if end < 0 or not given or not all(p.isascii() and p.isdigit() for p in given):
            raise PatternError("{ begins a repetition such as {2,5}; write \\{ for the character")
        self._at = end + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > _MAX_REPEATS:
            raise PatternError(f"more than {_MAX_REPEATS} repetitions")
        if most is not None and most < least:
            raise PatternError("a repetition has more at least than at most")
        return least, most

    def _escape(self) -> CharSet:
        char = self._take()
        if char in "dwsDWS":
            return CharSet(kinds=char)
        return CharSet(self._escaped(char))

    def _escaped(self, char: str) -> str:
        if char in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[char]]
            self._at += len(digits)
            is_hex = len(digits) == _HEX_DIGITS[char] and set(digits) <= set(hexdigits)
            if not is_hex or int(digits, 16) > sys.maxunicode:
                raise PatternError(f"\\{char}{digits} is no character")
            return chr(int(digits, 16))
        if char in _ESCAPES:
            return _ESCAPES[char]
        if char.isalnum():
            raise PatternError(f"\\{char} is not supported")
        return char

    def _class(self) -> CharSet:
        is_negated = self._peek() == "^"
        self._at += is_negated
        singles, ranges, kinds = "", list[tuple[str, str]](), ""
        is_first = True
        while (char := self._take()) != "]" or is_first:
            is_first = False
            if char == "\\":
                char = self._take()
                if char in "dwsDWS":
                    kinds += char
                    continue
                char = self._escaped(char)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                last = self._take()
                last = self._escaped(self._take()) if last == "\\" else last
                if last < char:
                    raise PatternError(f"the range {char}-{last} is empty")
                ranges.append((char, last))
            else:
                singles += char
        return CharSet(singles, tuple(ranges), kinds, is_negated)


@lru_cache(maxsize=128)
def stop_patterns(patterns: tuple[str, ...]) -> StopPatterns:
    """The automaton of some expressions; the same one for the same expressions."""
    return StopPatterns(patterns)


class StopPatterns:
    """The expressions of a request as one automaton. Immutable; its samples share it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises PatternError if an expression is not valid, matches no text, or is too large."""
        self.patterns = tuple(patterns)
        self._sets: list[CharSet | None] = []
        """Characters that lead from a state to the next one; None: no character is needed."""
        self._targets: list[tuple[int, ...]] = []
        self._num_steps = 0
        entries = []
        for pattern in patterns:
            entries.append(self._emit(_Parser(pattern).parse(), self._state(None, ())))
        ends = [state for state, targets in enumerate(self._targets) if not targets]
        self.pattern_of = dict(zip(ends, patterns, strict=True))
        """The expression that is matched in a state."""
        self._closures: dict[int, frozenset[int]] = {}
        self.first = frozenset[int]().union(*map(self._closure, entries))
        if self.first & self.pattern_of.keys():
            raise PatternError("it matches where there is no text")
        self._by_set: dict[CharSet, list[int]] = {}
        self._fitting: dict[str, frozenset[int]] = {}
        self.behind: dict[int, frozenset[int]] = {}
        """The states that follow each state that takes a character."""
        self._connect()

    @property
    def num_states(self) -> int:
        """Number of states. A character costs at most one look at each."""
        return len(self._sets)

    def fitting(self, char: str) -> frozenset[int]:
        """The states that take a character."""
        found = self._fitting.get(char)
        if found is None:
            if len(self._fitting) >= _MAX_KNOWN_CHARS:
                self._fitting.clear()
            fitting = (states for wanted, states in self._by_set.items() if wanted.has(char))
            found = self._fitting[char] = frozenset(chain.from_iterable(fitting))
        return found

    def _connect(self) -> None:
        num_edges = 0
        for state, wanted in enumerate(self._sets):
            if wanted is None:
                continue
            self._by_set.setdefault(wanted, []).append(state)
            (target,) = self._targets[state]
            self.behind[state] = self._closure(target)
            num_edges += len(self.behind[state])
            if num_edges > MAX_EDGES:
                raise PatternError("its repetitions of what may be absent are too large")

    def _state(self, wanted: CharSet | None, targets: tuple[int, ...]) -> int:
        if len(self._sets) >= MAX_STATES:
            raise PatternError(f"it is too large: more than {MAX_STATES} states")
        self._sets.append(wanted)
        self._targets.append(targets)
        return len(self._sets) - 1

    def _emit(self, node: _Node, follow: int) -> int:
        """Adds the states of a node that leads to `follow`; returns its first one."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise PatternError("its repetitions are too large")
        if isinstance(node, CharSet):
            return self._state(node, (follow,))
        if isinstance(node, _All):
            for one in reversed(node.nodes):
                follow = self._emit(one, follow)
            return follow
        if isinstance(node, _Any):
            return self._state(None, tuple(self._emit(one, follow) for one in node.nodes))
        entry = follow
        if node.most is None:
            entry = self._state(None, (follow,))
            self._targets[entry] = (self._emit(node.node, entry), follow)
        for _ in range((node.most or node.least) - node.least):
            entry = self._state(None, (self._emit(node.node, entry), follow))
        for _ in range(node.least):
            entry = self._emit(node.node, entry)
        return entry

    def _closure(self, state: int) -> frozenset[int]:
        """States that take a character or end, reached without one."""
        if state in self._closures:
            return self._closures[state]
        found, waiting = {state}, [state]
        while waiting:
            at = waiting.pop()
            if self._sets[at] is None:
                new = set(self._targets[at]) - found
                found |= new
                waiting += new
        closure = frozenset(
            one for one in found if self._sets[one] is not None or not self._targets[one]
        )
        self._closures[state] = closure
        return closure


class _Match(NamedTuple):
    """A match whose last character was the latest."""

    start: int
    """Position in the text."""
    pattern: str


class PatternScanner:
    """Cuts one sample's text at the first complete match; of several, at the longest.

    Text in which a match may have begun is held back, up to `MAX_HELD_CHARS`.
    """

    def __init__(self, patterns: StopPatterns, include_stop: bool) -> None:
        self._patterns = patterns
        self._include_stop = include_stop
        self._threads: dict[int, int] = {}
        """States with the position at which their match begins."""
        self._held = ""
        self._position = 0
        """Characters before the held ones."""
        self.found = ""
        """The expression that was matched; empty: none."""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        whole = self._held + text
        for index in range(len(self._held), len(whole)):
            ended = self._step(whole[index], self._position + index)
            if ended is not None and counts:
                start = max(0, ended.start - self._position)
                self.found = ended.pattern
                self._held, self._threads = "", {}
                return whole[: index + 1 if self._include_stop else start], True
        begun = min(self._threads.values(), default=self._position + len(whole))
        safe = max(0, begun - self._position, len(whole) - MAX_HELD_CHARS)
        self._held = whole[safe:]
        self._position += safe
        return whole[:safe], False

    def _step(self, char: str, position: int) -> _Match | None:
        """The longest match that ends with this character, if any."""
        patterns, after = self._patterns, dict[int, int]()
        for state in patterns.first:
            self._threads.setdefault(state, position)
        for state in patterns.fitting(char) & self._threads.keys():
            start = self._threads[state]
            for following in patterns.behind[state]:
                if start < after.get(following, position + 1):
                    after[following] = start
        self._threads = after
        ends = after.keys() & patterns.pattern_of.keys()
        matches = [_Match(after.pop(end), patterns.pattern_of[end]) for end in ends]
        return min(matches, default=None)

    def finish(self) -> str:
        """Returns the text that was held back and did not become a match."""
        held, self._held, self._threads = self._held, "", {}
        return held


class ScannerChain:
    """Stop strings and expressions of one sample. Expressions see the text that the stop strings
    let pass.
    """

    def __init__(self, strings: StopScanner, patterns: PatternScanner) -> None:
        self._strings = strings
        self._patterns = patterns

    @property
    def found(self) -> str:
        """The stop string or the expression that was found; empty: none."""
        return self._patterns.found or self._strings.found

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        left, is_cut = self._strings.push(text, counts=counts)
        shown, is_stopped = self._patterns.push(left, counts=counts)
        if is_cut and not is_stopped:
            shown += self._patterns.finish()
        return shown, is_cut or is_stopped

    def finish(self) -> str:
        shown, is_stopped = self._patterns.push(self._strings.finish())
        return shown if is_stopped else shown + self._patterns.finish()
