"""Reads a call of a tool, a JSON object, from a text that comes in pieces."""

from __future__ import annotations

import json
import re

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Beginning of a call that can be passed on as it comes: the name stands before the arguments."""


class ObjectEnd:
    """Finds the end of a JSON object, whose first character is the first that is given."""

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> int | None:
        """Takes more text; returns how much of it is the object's, None: all, and more follows."""
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

    Its arguments are given as the model writes them where the name stands before them; else
    together, once the object is complete.
    """

    __slots__ = ("_arguments_end", "_end", "_has_all", "name", "rest", "text")

    def __init__(self) -> None:
        self.name = ""
        """Name of the function; empty: not known yet."""
        self.text = ""
        """What was read before the name was known."""
        self.rest: str | None = None
        """Text behind the object; None: it has not ended."""
        self._end, self._arguments_end = ObjectEnd(), ObjectEnd()
        self._has_all = False
        """Whether all arguments were given."""

    def push(self, text: str) -> str:
        """Takes more text, of which the first begins with the object; returns more arguments.

        Raises:
            ValueError: The object has ended and is no call.
        """
        end = self._end.push(text)
        if end is not None:
            text, self.rest = text[:end], text[end:]
        if self.name:
            return self._more_arguments(text)
        self.text += text
        head = _HEAD.match(self.text)
        if head is not None:
            self.name = _name(head.group(1))
            return self._more_arguments(self.text[head.end() :])
        return "" if self.rest is None else self._whole()

    def _more_arguments(self, text: str) -> str:
        if self._has_all:
            return ""
        end = self._arguments_end.push(text)
        self._has_all = end is not None
        return text[:end]

    def _whole(self) -> str:
        """Reads the complete object."""
        try:
            call = json.loads(self.text)
        except RecursionError as error:
            raise ValueError("too deeply nested") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("no name")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)  # Some models write them as JSON in a string.
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        self.name = call["name"]
        return json.dumps(arguments, ensure_ascii=False)


def _name(quoted: str) -> str:
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:  # An escape that JSON does not have.
        return quoted[1:-1]
