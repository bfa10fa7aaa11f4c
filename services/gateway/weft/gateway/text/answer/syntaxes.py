"""The syntaxes of one tool call, and the readers of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from weft.gateway.text.answer.call_reader import CallReader, encodable

MAX_HEAD = 512
"""Most characters before the arguments of a call: names of functions are short."""
NAME_BEGIN = re.compile(r"[\w.-]")

Tools = Sequence[Mapping[str, Any]]
"""Tools that may be called, of OpenAI's form."""
Parse = Callable[[str, Tools], tuple[str, Mapping[str, Any]]]
"""Reads a complete call: its function's name and arguments. Raises ValueError if the text is no
call.
"""


class Reader(Protocol):
    """Reads one call from a text that comes in pieces."""

    @property
    def name(self) -> str:
        """Name of the function; empty: not known yet."""
        ...

    @property
    def id(self) -> str:
        """The call's id, if the model gives one; else empty."""
        ...

    @property
    def rest(self) -> str | None:
        """Text after the call; None: it has not ended."""
        ...

    @property
    def text(self) -> str:
        """The text that was read before the name was known."""
        ...

    def push(self, text: str) -> str:
        """Takes more text, the first of which begins the call; returns further arguments.

        Raises:
            ValueError: The call has ended and is not valid.
        """
        ...

    def finish(self) -> str:
        """Ends the text; returns further arguments, and may set `rest`."""
        ...


class Begun(NamedTuple):
    """A call that has begun."""

    reader: Reader
    text: str
    """The text that the reader must get first."""


class Syntax(Protocol):
    """How a call may be written."""

    def begin(self, text: str, tools: Tools, marks: Sequence[str]) -> Begun | None:
        """A reader of the call with which a text begins; None if it begins with no call. `marks`
        are texts of the format that end a call whose own end is missing.
        """
        ...

    def may_begin(self, text: str) -> bool:
        """Whether more of a text, which begins with no call, could make it begin with one."""
        ...


@dataclass(frozen=True)
class JsonObject:
    """An object with `name`, and `arguments` or `parameters`."""

    names_decide: bool = False
    """Whether an object is a call only if it names a tool."""

    def begin(self, text: str, tools: Tools, marks: Sequence[str]) -> Begun | None:
        names = names_of(tools) if self.names_decide and tools else None
        return Begun(CallReader(marks=marks, names=names), text) if text.startswith("{") else None

    def may_begin(self, text: str) -> bool:
        return not text


@dataclass(frozen=True)
class NamedJson:
    """The function's name, then its arguments as an object."""

    head: str
    """Regular expression of what comes before the object, with a group `name`, and maybe `id`."""

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(self.head + r"(?=\{)", re.ASCII)

    def begin(self, text: str, tools: Tools, marks: Sequence[str]) -> Begun | None:
        found = self._head.match(text[: MAX_HEAD + 1])
        if found is None:
            return None
        groups = found.groupdict()
        reader = CallReader(groups["name"], groups.get("id", ""), marks=marks)
        return Begun(reader, text[found.end() :])

    def may_begin(self, text: str) -> bool:
        return len(text) <= MAX_HEAD and "{" not in text


@dataclass(frozen=True)
class Collected:
    """A text between two marks, which is read once it is complete."""

    opener: str
    """Mark that begins the call and is a part of it; empty: the function's name begins it."""
    closer: str
    parse: Parse
    leaves_closer: bool = False
    """Whether the closing mark is not the call's own but its format's."""

    def begin(self, text: str, tools: Tools, marks: Sequence[str]) -> Begun | None:
        is_begun = text.startswith(self.opener) if self.opener else NAME_BEGIN.match(text)
        return Begun(CollectedReader(self, tools), text) if is_begun else None

    def may_begin(self, text: str) -> bool:
        return not text or (len(text) < len(self.opener) and self.opener.startswith(text))


def names_of(tools: Tools) -> frozenset[str]:
    """Names of functions."""
    return frozenset(tool["function"]["name"] for tool in tools)


class CollectedReader:
    """Reads a call that is passed on once it is complete."""

    def __init__(self, syntax: Collected, tools: Tools) -> None:
        self._syntax = syntax
        self._tools = tools
        self.name = self.id = ""
        self.rest: str | None = None
        self._pieces: list[str] = []
        self._end = ""
        """The last characters of the earlier text, in which the closing mark may have begun."""

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, text: str) -> str:
        closer = self._syntax.closer
        seen = self._end + text
        self._end = seen[1 - len(closer) :]
        self._pieces.append(text)
        if closer not in seen:
            return ""
        call, _, rest = self.text.partition(closer)
        if self._syntax.leaves_closer:
            self._pieces, self.rest = [call], closer + rest
        else:
            self._pieces, self.rest = [call + closer], rest
        name, arguments = self._syntax.parse(call, self._tools)
        given = encodable(json.dumps(arguments, ensure_ascii=False))
        if not name:
            raise ValueError("no name")
        self.name = encodable(name)
        return given

    def finish(self) -> str:
        return ""
