"""Reads a call of a tool as Gemma 4 writes it: `call:NAME{key:<|"|>text<|"|>,other:[1,true]}`.
Smaller models also write Python's quotes and `=`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.gateway.text.answer.call_reader import loads

_HEAD = re.compile(r"call:\s*([\w.-]{1,256})\s*(?=\{)", re.ASCII)
_QUOTE = '<|"|>'
_PYTHON_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*+)'(?=\s*+[,}\]:=])", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_KEY = re.compile(r"[^:=,{}\[\]]{1,256}")
_BARE = re.compile(r"[^,{}\[\]]+")
_MAX_DEPTH = 64


def parse_gemma(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The name and the arguments of a call. `tools` are not used, since values show their types.

    Raises:
        ValueError: The text is no call.
    """
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("no name")
    reading = _Reading(text, head.end())
    arguments = reading.value(0)
    if text[reading.at :].strip() or not isinstance(arguments, dict):
        raise ValueError("text behind the arguments")
    return head[1], arguments


class _Reading:
    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("too deeply nested")
        self._skip_blanks()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        if self._takes(_QUOTE):
            return self._quoted()
        if self._text.startswith('"', self.at):
            return self._json_string()
        found = self._python_string()
        return self._bare() if found is None else found

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._takes_end("}", bool(found)):
            key = self._key()
            self._skip_blanks()
            if not self._takes(":") and not self._takes("="):
                raise ValueError("no colon behind a key")
            found[key] = self.value(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._takes_end("]", bool(found)):
            found.append(self.value(depth + 1))
        return found

    def _takes_end(self, bracket: str, is_behind: bool) -> bool:
        """Consumes the separator before the next member; returns True if there is no further
        member.
        """
        self._skip_blanks()
        if self._takes(bracket):
            return True
        if is_behind:
            if not self._takes(","):
                raise ValueError("no comma")
            self._skip_blanks()
            return self._takes(bracket)
        return False

    def _key(self) -> str:
        if self._takes(_QUOTE):
            return self._quoted()
        if self._text.startswith('"', self.at):
            return self._json_string()
        if (quoted := self._python_string()) is not None:
            return quoted
        found = _KEY.match(self._text, self.at)
        if found is None:
            raise ValueError("no key")
        self.at = found.end()
        return found[0].strip()

    def _quoted(self) -> str:
        end = self._text.find(_QUOTE, self.at)
        if end < 0:
            raise ValueError("a text that does not end")
        found, self.at = self._text[self.at : end], end + len(_QUOTE)
        return found

    def _json_string(self) -> str:
        value, self.at = json.JSONDecoder(strict=False).raw_decode(self._text, self.at)
        return str(value)

    def _python_string(self) -> str | None:
        found = _PYTHON_QUOTED.match(self._text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return _ESCAPE.sub(lambda one: _ESCAPED.get(one[1], one[1]), found[1])

    def _bare(self) -> Any:
        found = _BARE.match(self._text, self.at)
        if found is None:
            raise ValueError("no value")
        self.at = found.end()
        text = found[0].strip()
        if text in ("None", "null"):
            return None
        try:
            return loads(text.lower() if text in ("True", "False") else text)
        except ValueError:
            return text

    def _takes(self, mark: str) -> bool:
        is_there = self._text.startswith(mark, self.at)
        self.at += len(mark) if is_there else 0
        return is_there

    def _skip_blanks(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in " \t\r\n":
            self.at += 1
