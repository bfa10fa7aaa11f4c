"""Reads a call of a tool, a JSON object, from a text that comes in pieces."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')
_MAX_DEPTH = 200
"""Most levels of lists and objects in a call, as many as in a request's body. The code that reads
the value later recurses once for each level.
"""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Beginning of a call whose name stands before the arguments, so that these can be passed on as
they arrive.
"""
_MAX_HEAD = 512
"""Longest such beginning. Names of functions are short, and each piece of text is matched from the
beginning.
"""
_BLANKS = " \t\r\n"


class ObjectEnd:
    """Finds the end of a JSON object.

    Args:
        depth: Number of the object's brackets that were opened before the first text.
    """

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> int | None:
        """Takes more text; returns how many of its characters belong to the object. None: all, and
        more follow.
        """
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, at)
            if found is None:
                return None
            mark, at = found.group(), found.end()
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class CallReader:
    """Reads one call: an object with `name`, and `arguments` or `parameters`.

    If the name stands before the arguments, these are returned as the model writes them; else
    together, once the object is complete.

    Args:
        given_name: Name of the function, so that only the arguments are read; empty: the whole
            object is read.
        given_id: Id of the call; empty: it has none.
    """

    __slots__ = (
        "_end",
        "_given_name",
        "_is_bare",
        "_is_in_arguments",
        "_is_streamed",
        "_num_chars",
        "_pieces",
        "_tail",
        "id",
        "name",
        "rest",
    )

    def __init__(self, given_name: str = "", given_id: str = "") -> None:
        self._given_name = given_name
        self.id = given_id
        self.name = ""
        """Name of the function; empty: not known yet."""
        self.rest: str | None = None
        """Text behind the object; None: it has not ended."""
        self._pieces: list[str] = []
        self._num_chars = 0
        self._end = ObjectEnd()
        """Finds the end of the object, or of its arguments while these are passed on."""
        self._is_bare = self._is_streamed = self._is_in_arguments = bool(given_name)
        self._tail: str | None = ""
        """Text behind the arguments, until it is known whether the object goes on."""

    @property
    def text(self) -> str:
        """The text that was read before the name was known."""
        return "".join(self._pieces)

    def push(self, text: str) -> str:
        """Takes more text, beginning with the object's own; returns further arguments.

        Raises:
            ValueError: The object has ended and is no call.
        """
        self.name, self._given_name = self.name or self._given_name, ""
        if self._is_streamed:
            return self._more_arguments(text)
        self._pieces.append(text)
        # If the head does not come soon, the call is read once the object is complete.
        head = None
        if self._num_chars <= _MAX_HEAD:
            head = _HEAD.match(whole := self.text)
        self._num_chars += len(text)
        if head is not None:
            self.name = _name(head.group(1))
            self._is_streamed = self._is_in_arguments = True
            self._pieces, self._end = [], ObjectEnd()
            return self._more_arguments(whole[head.end() :])
        end = self._end.push(text)
        if end is None:
            return ""
        self._pieces[-1], self.rest = text[:end], text[end:]
        return self._whole()

    def _more_arguments(self, text: str) -> str:
        arguments = ""
        if self._is_in_arguments:
            end = self._end.push(text)
            arguments = text[:end]
            if end is None:
                return arguments
            self._is_in_arguments, text = False, text[end:]
        if self._is_bare:
            self.rest = text
        else:
            self._find_end(text)
        return arguments

    def _find_end(self, text: str) -> None:
        """Finds the end of the object behind its arguments, where its bracket may be missing."""
        if self._tail is not None:
            text = (self._tail + text).lstrip(_BLANKS)
            self._tail = text
            if not text:
                return
            if not text.startswith((",", "}")):
                self.rest = text
                return
            self._tail, self._end = None, ObjectEnd(1)
        end = self._end.push(text)
        if end is not None:
            self.rest = text[end:]

    def _whole(self) -> str:
        """Reads the complete object."""
        call = loads(self.text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError("no name")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = loads(arguments)  # Some models write them as a string.
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        self.name = encodable(name)
        return encodable(json.dumps(arguments, ensure_ascii=False))


def _name(quoted: str) -> str:
    try:
        return encodable(str(json.loads(quoted, strict=False)))
    except ValueError:  # An escape that JSON does not have.
        return quoted[1:-1]


def encodable(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates, which JSON's escapes can name."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def loads(text: str) -> Any:
    """Reads JSON as models write it, with line breaks in strings. Numbers that JSON cannot write,
    such as NaN, are refused.

    Raises:
        ValueError: It is none, or is too deeply nested.
    """
    _check_depth(text)
    return json.loads(text, strict=False, parse_constant=_number, parse_float=_number)


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        mark = found[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is too deeply nested: more than {_MAX_DEPTH} levels")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number")
    return value


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: The text is no JSON, is too deeply nested, or names lone surrogates.
    """
    _check_depth(text)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a character, a lone surrogate") from error
    return value
