"""Reads a call of a tool, a JSON object, from a text that comes in pieces."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]<]')
_INSIDE_STRINGS = re.compile(r'["\\<]')
_MAX_MARK = 64
_MAX_DEPTH = 200
"""Most levels of lists and objects in a call, as many as in a request's body. The code that reads
the value later recurses once for each level.
"""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Beginning of a call whose name comes before the arguments, so that these can be passed on as they
arrive.
"""
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""Members that calls have."""
_FIRST = re.compile(r'\{\s*+"((?:[^"\\]|\\.)*+)"\s*+:\s*+("(?:[^"\\]|\\.)++")?')
"""The first member of an object, with its value if this is a text."""
_MAX_HEAD = 512
"""Longest beginning that `_HEAD` may match. Names of functions are short, and each piece of text is
matched from the beginning.
"""
BLANKS = " \t\r\n"


class ObjectEnd:
    """Finds the end of a JSON object, or the mark that ends a call whose object is not closed.

    Outside of strings such a mark ends the object. Within a string it may belong to the value, so
    the text from there on is held back until the object or the whole text has ended.

    Args:
        marks: Texts that end a call; only those count that begin with `<`, which JSON does not have
            outside of strings.
        opened: The object's brackets that were opened before the first text.
    """

    __slots__ = ("_at_mark", "_held", "_in_string", "_is_escaped", "_marks", "_open", "_suspect")

    def __init__(self, marks: Sequence[str] = (), opened: str = "") -> None:
        self._marks = tuple(mark for mark in marks if mark.startswith("<"))
        self._open = list(opened)
        self._in_string = self._is_escaped = False
        self._held = ""
        """Text that may begin a mark."""
        self._suspect: list[str] | None = None
        """The text from a mark within a string on; None: there was none."""
        self._at_mark = ""
        """The brackets and quotes that close the object as it was before that mark."""

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str | None]:
        """Takes more text; returns more of the object, and the text after it; None: the object goes
        on.
        """
        text, self._held, at = self._held + text, "", 0
        shown = ""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_INSIDE_STRINGS if self._in_string else _OUTSIDE_STRINGS).search(text, at)
            if found is None:
                break
            mark, at = found.group(), found.end()
            if mark == "<":
                if self._suspect is not None:
                    continue
                rest = text[at - 1 : at - 1 + _MAX_MARK]
                if rest.startswith(self._marks):
                    if not self._in_string:
                        return shown + text[: at - 1] + self._closing(), text[at - 1 :]
                    self._suspect, self._at_mark = [], self._closing()
                    shown, text, at = shown + text[: at - 1], text[at - 1 :], 1
                elif not is_last and any(one.startswith(rest) for one in self._marks):
                    self._held = rest
                    return shown + text[: at - 1], None
            elif mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            elif mark in "{[":
                self._open.append(mark)
            else:
                del self._open[-1:]
                if not self._open:
                    return shown + self._all(text[:at]), text[at:]
        if self._suspect is not None:
            self._suspect.append(text)
            text = ""
        return shown + text, None

    def finish(self) -> tuple[str, str | None]:
        """Ends the text; returns what `push` does."""
        if self._suspect is None:
            return self.push("", is_last=True)
        return self._at_mark, "".join(self._suspect)

    def _all(self, text: str) -> str:
        return "".join(self._suspect or ()) + text

    def _closing(self) -> str:
        brackets = "".join("}" if one == "{" else "]" for one in reversed(self._open))
        return '"' * self._in_string + brackets


class CallReader:
    """Reads one call: an object with `name`, and `arguments` or `parameters`.

    If the name comes before the arguments, these are returned as the model writes them; otherwise
    all at once, when the object is complete.

    Args:
        given_name: Name of the function, so that only the arguments are read; empty: the whole
            object is read.
        given_id: Id of the call; empty: it has none.
        marks: Texts that end a call.
        names: Functions that may be called; None: any. With names, an object is no call if it has
            no arguments but members that calls do not have.
    """

    __slots__ = (
        "_end",
        "_given_name",
        "_is_bare",
        "_is_in_arguments",
        "_is_streamed",
        "_marks",
        "_names",
        "_num_chars",
        "_pieces",
        "_tail",
        "id",
        "name",
        "rest",
    )

    def __init__(
        self,
        given_name: str = "",
        given_id: str = "",
        *,
        marks: Sequence[str] = (),
        names: Collection[str] | None = None,
    ) -> None:
        self._given_name = given_name
        self._marks = marks
        self._names = names
        self.id = given_id
        self.name = ""
        """Name of the function; empty: not known yet."""
        self.rest: str | None = None
        """Text after the object; None: it has not ended."""
        self._pieces: list[str] = []
        self._num_chars = 0
        self._end = ObjectEnd(marks)
        """Finds the end of the object, or of its arguments while these are passed on."""
        self._is_bare = self._is_streamed = self._is_in_arguments = bool(given_name)
        self._tail: str | None = ""
        """Text after the arguments, until it is known whether the object goes on."""

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
            return self._more(text)
        self._pieces.append(text)
        # If the head does not come soon, the call is read once the object is complete.
        head = None
        if self._num_chars <= _MAX_HEAD:
            head = _HEAD.match(whole := self.text)
            self._check_beginning(whole)
        self._num_chars += len(text)
        if head is not None:
            self.name = self._checked(_name(head.group(1)))
            self._is_streamed = self._is_in_arguments = True
            self._pieces, self._end = [], ObjectEnd(self._marks)
            return self._more(whole[head.end() :])
        _, rest = self._end.push(text)
        return "" if rest is None else self._whole(rest)

    def finish(self) -> str:
        """Ends the text; returns further arguments."""
        if not self._is_streamed or not self._is_in_arguments:
            return ""
        return self._note(*self._end.finish())

    def _check_beginning(self, text: str) -> None:
        """Raises ValueError as soon as a beginning shows that the object is no call of a known
        tool.
        """
        if self._names is None or (first := _FIRST.match(text)) is None:
            return
        key, value = first.groups()
        if key not in _KEYS or (key == "name" and value and _name(value) not in self._names):
            raise ValueError("no call of a given tool")

    def _checked(self, name: str) -> str:
        if self._names is not None and name not in self._names:
            raise ValueError("no function of this name")
        return name

    def _more(self, text: str) -> str:
        if self._is_in_arguments:
            return self._note(*self._end.push(text))
        if self._is_bare:
            self.rest = text
        else:
            self._find_end(text)
        return ""

    def _note(self, arguments: str, rest: str | None) -> str:
        if rest is not None:
            self._is_in_arguments = False
            self._more(rest)
        return arguments

    def _find_end(self, text: str) -> None:
        """The object's bracket may be missing after its arguments."""
        if self._tail is not None:
            text = (self._tail + text).lstrip(BLANKS)
            self._tail = text
            if not text:
                return
            if not text.startswith((",", "}")):
                self.rest = text
                return
            self._tail, self._end = None, ObjectEnd(self._marks, "{")
        _, self.rest = self._end.push(text)

    def _whole(self, rest: str) -> str:
        whole = self.text
        self._pieces, self.rest = [whole[: len(whole) - len(rest)]], rest
        call = loads(self.text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError("no name")
        if self._names is not None and not (name in self._names and call.keys() <= _KEYS):
            raise ValueError("no call of a given tool")
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            arguments = loads(arguments)  # Some models write them as a string.
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        self.name = self._checked(encodable(name))
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
        ValueError: The text is not JSON, or is too deeply nested.
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
        ValueError: The text is not JSON, is too deeply nested, or has lone surrogates.
    """
    _check_depth(text)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a character, a lone surrogate") from error
    return value
