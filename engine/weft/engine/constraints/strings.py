"""JSON strings in a grammar: written so that masks are found quickly, and exactly as JSON has them.

The grammar compiler finds the mask of a state at once where a token stays within one rule and what
it leads to; where a rule may end inside a token, it tries tokens one by one. A string of at most n
characters, each a rule that is repeated, ends a rule with every character. So characters are
counted by rules of which each leads to the next.
"""

from __future__ import annotations

import re

BLOCK = 128
"""Characters that are counted one by one; beyond them in blocks of so many. A token that crosses
blocks is tried (20 ms a mask there); each character counted takes 7 ms to compile."""

_CHARACTERS = r"[^\0-\x1f\"\\\r\n"
"""How the compiler begins the class of what stands for itself in a string."""
_NO_SURROGATES = r"\uD800-\uDFFF"
"""The bytes of lone surrogates are no UTF-8."""
_PLAIN = _CHARACTERS + _NO_SURROGATES + "]"
_HEX = "[0-9a-fA-F]"
_UNICODE = f'("u" [0-9a-cA-CefEF] {_HEX} {_HEX} {_HEX}) | ("u" [dD] [0-7] {_HEX} {_HEX})'
_RULES = f"""
basic_escape ::= (([\\"\\\\/bfnrt]) | {_UNICODE})
key_escape ::= (([\\"\\\\bfnrt]))
key_rest ::= (("\\"") | ({_PLAIN} key_rest) | ("\\\\" key_escape key_rest))
"""
"""Escapes that spell no surrogates; and those of names beside which others are described: each name
has one spelling there, so that none comes twice."""
_OTHER_KEY = re.compile(r"^\w+_addl_key(?:_\d+)? ::= ")
_BOUNDED = re.compile(r'"\\"" (\w+)\{(\d+), (-?\d+)\} "\\""')
_BOUNDED_CHARACTERS = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)


def exact_strings(grammar: str) -> str:
    """Rewrites the rules for strings in a grammar that was made from a JSON schema.

    Args:
        grammar: In the compiler's own form of EBNF.

    Returns:
        The grammar, whose strings have at least and at most as many characters, of which an escape
        is one, and are valid JSON and UTF-8.
    """
    counted = {found[1] for found in _BOUNDED_CHARACTERS.finditer(grammar)}
    counts = _Counts()

    def start_of(found: re.Match[str]) -> str:
        if found[1] not in counted:
            return found[0]
        return f'"\\"" {counts.start(int(found[2]), int(found[3]))}'

    lines = []
    for line in grammar.splitlines():
        if line.startswith("basic_escape ::= "):
            continue
        exact = line.replace(_CHARACTERS, _CHARACTERS + _NO_SURROGATES)
        if _OTHER_KEY.match(line):
            exact = exact.replace(" basic_string_sub", " key_rest")
            exact = exact.replace(" basic_escape", " key_escape")
        lines.append(_BOUNDED.sub(start_of, exact))
    return "\n".join([*lines, _RULES, *counts.rules])


class _Counts:
    """Rules of strings by the number of their characters; those of several strings are shared."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._names: set[str] = set()

    def start(self, least: int, most: int) -> str:
        """The rule of what follows a string's first quote.

        Args:
            least: Fewest characters.
            most: Most characters; -1: any number.
        """
        blocks, rest = divmod(least, BLOCK)
        name = f"string_{least}_{most if most >= 0 else 'any'}"
        self._add(name, self._after(blocks, self._least(rest, most - least if most >= 0 else -1)))
        return name

    def _least(self, count: int, more: int) -> str:
        """The rule of `count` characters and then `more` at most."""
        if count == 0:
            return "basic_string_sub" if more < 0 else self._most(more)
        name = f"least_{count}_{more if more >= 0 else 'any'}"
        self._add(name, _characters(self._least(count - 1, more)))
        return name

    def _most(self, count: int) -> str:
        """The rule of at most so many characters."""
        blocks, rest = divmod(count, BLOCK)
        name = f"most_{count}"
        if blocks:
            block, full = self._block(BLOCK), self._most(BLOCK - 1)
            some = f"({block}{{0, {blocks - 1}}} {full})"
            self._add(name, f"({some} | {self._after(blocks, self._most(rest))})")
        elif name not in self._names:
            more = f" | {_characters(self._most(count - 1))}" if count else ""
            self._add(name, f'(("\\""){more})')
        return name

    def _block(self, count: int) -> str:
        """The rule of so many characters."""
        name = f"block_{count}"
        if name not in self._names:
            self._add(name, _characters(self._block(count - 1)) if count else '("")')
        return name

    def _after(self, blocks: int, rule: str) -> str:
        """A rule behind so many blocks."""
        return f"({self._block(BLOCK)}{{{blocks}, {blocks}}} {rule})" if blocks else f"({rule})"

    def _add(self, name: str, body: str) -> None:
        if name not in self._names:
            self._names.add(name)
            self.rules.append(f"{name} ::= ({body})")


def _characters(following: str) -> str:
    """One character and what follows it."""
    return f'({_PLAIN} {following}) | ("\\\\" basic_escape {following})'
