"""Calls of tools whose parameters are tags, as Qwen3-Coder, GLM and MiniMax write them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.gateway.text.answer.call_reader import BLANKS, encodable, loads
from weft.gateway.text.answer.syntaxes import NAME_BEGIN, Begun, Tools

_MAX_DEPTH = 6
"""Most references and alternatives that are followed to a type."""
_MAX_TAG = 1024
"""No name and no tag of a parameter has so many characters."""
_MAX_NULL = 64
"""A longer value is no null."""


@dataclass(frozen=True)
class TagSyntax:
    """A call that consists of a name and a tag for each parameter, or of a name and an object.

    Values are texts, which are passed on as they come. If a parameter is no string in the tool's
    schema, its value is read as JSON, or as Python's spelling of it, once it is complete.
    """

    opener: str
    """Mark that begins the call and is a part of it; empty: the function's name begins it."""
    closer: str
    name: str
    """Regular expression of how a call begins, with a group `name`."""
    parameter: str
    """Regular expression of the tag of a parameter, with a group `key`, and maybe `string`: "true"
    or "false", which then decides instead of the schema.
    """
    ends: tuple[str, ...]
    """Marks that end a value: its own closing tag, then those that begin another parameter."""
    leaves_closer: bool = False
    """Whether the closing mark is not the call's own but its format's."""
    has_line_breaks: bool = False
    """Whether the model writes a line break before and after each value, which the value does not
    contain.
    """

    @cached_property
    def head_end(self) -> re.Pattern[str]:
        """Where the part that `name` describes ends."""
        if self.opener:
            return re.compile(">")
        marks = "|".join(map(re.escape, (*self.ends[1:], self.closer, "{")))
        return re.compile(f"(?={marks})")

    @cached_property
    def head(self) -> re.Pattern[str]:
        return re.compile(self.name, re.ASCII if not self.opener else 0)

    @cached_property
    def next(self) -> re.Pattern[str]:
        """The next tag of a parameter, or the call's end."""
        return re.compile(f"{self.parameter}|{re.escape(self.closer)}")

    def begin(self, text: str, tools: Tools, marks: Sequence[str]) -> Begun | None:
        is_begun = text.startswith(self.opener) if self.opener else NAME_BEGIN.match(text)
        return Begun(TagReader(self, tools), text) if is_begun else None

    def may_begin(self, text: str) -> bool:
        return not text or (len(text) < len(self.opener) and self.opener.startswith(text))


class TagReader:
    """Reads one call of `TagSyntax`."""

    def __init__(self, syntax: TagSyntax, tools: Tools) -> None:
        self._syntax = syntax
        self._tools = tools
        self.name = self.id = ""
        self.rest: str | None = None
        self._held = ""
        """Text whose meaning is not known yet."""
        self._state: Callable[[list[str]], bool] = self._head
        self._schemas: Mapping[str, Any] = {}
        self._whole: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._types: set[str] = set()
        self._is_streamed = self._is_first = self._has_break = False
        self._pieces: list[str] = []
        """The value so far, if it is not passed on as it comes."""

    @property
    def text(self) -> str:
        return self._held

    def push(self, text: str) -> str:
        self._held += text
        given: list[str] = []
        while self._state(given):
            pass
        return "".join(given)

    def finish(self) -> str:
        return ""

    # Each state consumes what it can of the text, and returns whether another state continues.

    def _head(self, given: list[str]) -> bool:
        found = self._syntax.head_end.search(self._held[:_MAX_TAG])
        if found is None and len(self._held) < _MAX_TAG:
            return False
        end = _MAX_TAG if found is None else found.end()
        head = self._syntax.head.fullmatch(self._held[:end])
        name = "" if head is None else head["name"].strip()
        if not name:
            self._held, self.rest = self._held[:end], self._held[end:]
            raise ValueError("no name")
        self.name, self._held = encodable(name), self._held[end:]
        self._schemas, self._whole = _parameters_of(self._tools, name)
        given.append("{")
        self._state = self._body
        return True

    def _body(self, given: list[str]) -> bool:
        self._held = self._held.lstrip(BLANKS)
        self._state = self._object if self._held.startswith("{") else self._between
        if not self._held:
            self._state = self._body
        return bool(self._held)

    def _object(self, given: list[str]) -> bool:
        text, is_whole = self._before((self._syntax.closer,))
        self._pieces.append(text)
        if not is_whole:
            return False
        try:
            value = loads("".join(self._pieces).strip())
        except ValueError:
            value = None
        if isinstance(value, dict):
            given.append(_json(value)[1:-1])
        self._state = self._between
        return True

    def _between(self, given: list[str]) -> bool:
        found = self._syntax.next.search(self._held)
        if found is None:
            self._held = self._held[-_MAX_TAG:]
            return False
        if found["key"] is None:
            given.append("}")
            end = found.start() if self._syntax.leaves_closer else found.end()
            self.rest, self._held = self._held[end:], ""
            self._state = lambda _: False
            return False
        key, told = found["key"].strip(), found.groupdict().get("string")
        self._types = _types(self._schemas.get(key), self._whole)
        if told is not None:
            self._types = {"string"} if told == "true" else {"object"}
        given.append(f"{', ' if self._num_parameters else ''}{_json(key)}: ")
        self._num_parameters += 1
        self._pieces, self._is_first, self._has_break = [], True, False
        self._is_streamed = self._is_text and "null" not in self._types
        given.append('"' if self._is_streamed else "")
        self._held, self._state = self._held[found.end() :], self._value
        return True

    @property
    def _is_text(self) -> bool:
        return not self._types or "string" in self._types

    def _value(self, given: list[str]) -> bool:
        ends = (*self._syntax.ends, self._syntax.closer)
        text, is_whole = self._before(ends)
        text = self._without_breaks(text, is_whole)
        if self._is_streamed:
            given.append(_json(text)[1:-1])
        else:
            self._pieces.append(text)
            if self._is_text and len(bare := "".join(self._pieces)) > _MAX_NULL:
                # It cannot be a null any more.
                self._is_streamed, self._pieces = True, []
                given.append(_json(bare)[:-1])
        if not is_whole:
            return False
        given.append('"' if self._is_streamed else _json(_read("".join(self._pieces), self._types)))
        self._held = self._held.removeprefix(ends[0])
        self._state = self._between
        return True

    def _without_breaks(self, text: str, is_whole: bool) -> str:
        """Removes the line breaks next to the tags of a value."""
        if not self._syntax.has_line_breaks:
            return text
        if text and self._is_first:
            self._is_first, text = False, text.removeprefix("\n")
        text = "\n" * self._has_break + text
        self._has_break = text.endswith("\n")
        return text[:-1] if self._has_break else text

    def _before(self, marks: Sequence[str]) -> tuple[str, bool]:
        """Takes the text that is certainly before all marks, and says whether one follows."""
        places = [at for mark in marks if (at := self._held.find(mark)) >= 0]
        end = min(places, default=len(self._held))
        if not places:
            at = self._held.rfind("<", -max(map(len, marks)))
            if at >= 0 and any(mark.startswith(self._held[at:]) for mark in marks):
                end = at
        text, self._held = self._held[:end], self._held[end:]
        return text, bool(places)


class WholeReader:
    """Reads a call that may turn out to be none: it is passed on once it is complete, if it is one
    of the tools `names`; empty: of any tool.
    """

    id = ""

    def __init__(self, inner: TagReader, names: Collection[str]) -> None:
        self._inner = inner
        self._names = names
        self.name = ""
        self.rest: str | None = None
        self._pieces: list[str] = []
        self._arguments: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, text: str) -> str:
        self._pieces.append(text)
        inner = self._inner
        try:
            self._arguments.append(inner.push(text))
            if inner.name and self._names and inner.name not in self._names:
                raise ValueError("no tool of this name")
        except ValueError:
            whole = self.text
            end = whole.find(">") + 1 or len(whole) - len(inner.rest or "")
            self._pieces, self.rest = [whole[:end]], whole[end:]
            raise
        if inner.rest is None:
            return ""
        self.name, self.rest = inner.name, inner.rest
        return "".join(self._arguments)

    def finish(self) -> str:
        return ""


def _json(value: Any) -> str:
    return encodable(json.dumps(value, ensure_ascii=False))


def _parameters_of(tools: Tools, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            whole = function.get("parameters") or {}
            schemas = whole.get("properties")
            if isinstance(schemas, Mapping):
                return schemas, whole
    return {}, {}


def _types(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    followed: set[str] = set()
    level = [schema]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if not isinstance(one, Mapping):
                continue
            given = one.get("type")
            given = given if isinstance(given, list) else [given]
            found |= {kind for kind in given if isinstance(kind, str)}
            for name in ("anyOf", "oneOf"):
                branches = one.get(name)
                below += branches if isinstance(branches, list) else ()
            reference = one.get("$ref")
            if not isinstance(reference, str) or reference in followed:
                continue
            followed.add(reference)
            if reference.startswith("#/"):
                there: Any = whole
                for step in reference[2:].split("/"):
                    there = there.get(step) if isinstance(there, Mapping) else None
                below.append(there)
        level = below
    return found


def _read(text: str, types: set[str]) -> Any:
    """A text unless the types say otherwise."""
    bare = text.strip()
    if not types:
        return text
    if "null" in types and bare.lower() in ("null", "none"):
        return None
    if "string" in types:
        return text
    try:
        return loads(bare.lower() if bare in ("True", "False") else bare)
    except ValueError:
        found = _python(bare)
        return text if found is None else found


def _python(text: str) -> Any:
    """A list or an object in Python's spelling, such as `['a', True, None]`; None: it is none."""
    if not text.startswith(("[", "{", "(")):
        return None
    try:
        value = ast.literal_eval(text)
        return loads(json.dumps(value))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
