"""Compiles constraints for a model's vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from weft.contract.request import Constraint
from weft.engine.features.constraints.domains import (
    MARK,
    MAX_MARKS,
    byte_tokens,
    is_watched,
    watched_places,
)
from weft.engine.features.constraints.excluded import AMBIGUOUS_NUMBERS, AmbiguousNumbers
from weft.engine.features.constraints.gbnf import convert_gbnf
from weft.engine.features.constraints.patterns import convert_regex
from weft.engine.features.constraints.places import Place
from weft.engine.features.constraints.schema import prepare_schema
from weft.engine.features.constraints.tags import convert_tags
from weft.engine.features.constraints.unique import Matcher, UniqueMatcher, Vocabulary

Json = Any

LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits of compiling a constraint (some hundred milliseconds of CPU) and of each mask (about 20
ms), with 100 MB of memory.
"""
_HEAD = '%llguidance {"no_forcing": true}\n'
"""`no_forcing`: a mask allows every token that may come, even where only one text is possible."""
DEFAULT_FORM: dict[str, str | bool] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""The blanks of JSON where a request says nothing about them: at most one after each comma and
each colon. `bench/json_forms.py` compares forms.
"""
# Without `\u` escapes each name has one spelling, so no property can come twice unnoticed.
_ESCAPES = 'nrbtf\\"'
_BLANK_SETS = re.compile(r"\[[^\]]*\]|\\s")
# Clients' grammars are searched with these two patterns, so each must take time in proportion to
# the grammar's length. So `_LARK` skips blanks within one line only. `_LARK_SKIPPED` matches a
# string or expression that is never closed as `open`, so that the search ends there and does not
# try each later quote or slash again. An expression may span lines.
_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start(?:\[[^\]\n]*+\])?\s*+:(?!:=))", re.MULTILINE)
_LARK_SKIPPED = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\]|\\.)++/|//[^\n]*|#[^\n]*'
    r'|(?P<open>"(?:[^"\\\n]|\\.)*+|/(?:[^/\\]|\\.)++)'
)
_LARK_REFUSED = {
    "~": "`~`, which may match half a character",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "stop": "stop",
    "@": "`@`, a reference to another grammar,",
    "<": "`<`, a special token,",
}
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")
_IN_LARK = re.compile(r"\n[^\S\n]*+\d++ \| ")


class GrammarSource:
    """Compiles constraints for one vocabulary; used by any thread. With `is_closed`, objects and
    arrays may have only what their schemas list.
    """

    def __init__(self, tokenizer: LLTokenizer, *, is_closed: bool = True) -> None:
        self.tokenizer = tokenizer
        self._is_closed = is_closed
        self._vocabulary = Vocabulary(tokenizer)

    def compile(self, constraint: Constraint) -> Matcher:
        """Compiles a constraint to a matcher at the beginning of a text, to be copied for each
        sample. Raises ValueError if the constraint cannot be used; the message says why, and where
        in it.
        """
        roots: list[Place] = []
        lark = self._lark(constraint, roots)
        matcher = self._matcher(self.tokenizer, lark, constraint)
        if not roots:
            return matcher
        has_marks = constraint.kind == "structural_tag"
        marked = self._lark(constraint, [], has_marks=True) if has_marks else lark
        by_bytes = self._matcher(byte_tokens(), marked, constraint)
        return UniqueMatcher(matcher, by_bytes, roots, self._vocabulary, has_marks=has_marks)

    def _matcher(self, tokenizer: LLTokenizer, lark: str, constraint: Constraint) -> LLMatcher:
        matcher = LLMatcher(tokenizer, lark, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            # The first mask shows whether any text satisfies the grammar; copies have this mask
            # ready.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(_problem(matcher.get_error(), constraint))
        return matcher

    def _lark(self, constraint: Constraint, roots: list[Place], *, has_marks: bool = False) -> str:
        """Writes the constraint as a grammar of llguidance. `roots` gets the places of schemas that
        have arrays without duplicates; with `has_marks`, a mark stands before each of these
        schemas.
        """
        kind, text = constraint.kind, constraint.text
        form = _form(constraint.whitespace)

        def rule(schema: str) -> str:
            prepared, root = self._prepared(schema, is_whole=kind == "json_schema")
            mark = ""
            if root is not None:
                mark = f"<[{MARK + len(roots)}]> " if has_marks else ""
                roots.append(root)
                if len(roots) > MAX_MARKS:
                    raise ValueError(
                        f"more than {MAX_MARKS} schemas have uniqueItems or exclude numbers"
                    )
            options = {**form, "json_allowed_escapes": _ESCAPES}
            return f"{mark}%json {json.dumps({**prepared, 'x-guidance': options})}"

        if kind == "json_schema":
            return f"{_HEAD}start: {rule(text)}"
        if kind == "regex":
            return f"{_HEAD}start: /{convert_regex(text)}/" if text else f'{_HEAD}start: ""'
        if kind == "structural_tag":
            return _HEAD + convert_tags(text, rule)
        if kind == "choice":
            return f"{_HEAD}start: " + " | ".join(map(json.dumps, constraint.choices))
        return _HEAD + (_checked_lark(text) if _LARK.search(text) else convert_gbnf(text))

    def _prepared(self, schema: str, *, is_whole: bool) -> tuple[dict[str, Json], Place | None]:
        """The rewritten schema, and the place of its text if that has to be watched.

        Args:
            is_whole: Whether the text is nothing but JSON under this schema.
        """
        prepared = prepare_schema(schema, is_closed=self._is_closed)
        if not is_watched(prepared):
            return prepared, None
        try:
            root = watched_places(prepared)
            if root.numbers is not None and not is_whole:
                raise AmbiguousNumbers(f"at {root.marked_at}: {AMBIGUOUS_NUMBERS}")
            return prepared, root
        except AmbiguousNumbers as ambiguous:
            try:
                prepared = prepare_schema(schema, is_closed=self._is_closed, excludes_steps=False)
            except ValueError:
                raise ambiguous from None
            return prepared, watched_places(prepared) if is_watched(prepared) else None


def _form(whitespace: str | None) -> Mapping[str, str | bool]:
    if whitespace is None:
        return DEFAULT_FORM
    if not whitespace:
        return {"whitespace_flexible": False}
    try:
        pattern = convert_regex(_BLANK_SETS.sub(_with_blanks_of_json, whitespace))
    except ValueError as error:
        raise ValueError(f"at the whitespace pattern {whitespace!r}: {error}") from None
    return {"whitespace_pattern": pattern}


def _with_blanks_of_json(found: re.Match[str]) -> str:
    r"""In a class of characters, or in `\s`, makes `\s` the blanks of JSON."""
    return r"[ \t\n\r]" if found[0] == r"\s" else found[0].replace(r"\s", r" \t\n\r")


def _checked_lark(text: str) -> str:
    """Raises ValueError if a client's grammar uses a feature that is not enforced."""
    bare = _LARK_SKIPPED.sub(r"\g<open>", text)
    for name, what in _LARK_REFUSED.items():
        if re.search(rf"\b{name}\s*=" if name.isidentifier() else re.escape(name), bare):
            raise ValueError(f"{what} is not supported in grammars")
    return text


def _problem(error: str, constraint: Constraint) -> str:
    error = error.strip()
    if quoted := _IN_LARK.search(error):
        error = error[: quoted.start()].rstrip()
    if error.startswith("panic"):
        return "cannot be compiled"
    if constraint.kind == "ebnf" and _LARK.search(constraint.text):
        found = re.match(r"(?:at )?(\d+)\((\d+)\): ", error)
        if found:
            return f"at line {int(found[1]) - 1}, column {found[2]}: {error[found.end() :]}"[:500]
        return error[:500]
    error = _PLACE.sub("", error)
    if not error or "NoExtension" in error or "no error message" in error:
        return "no text satisfies it"
    return error[:500]
