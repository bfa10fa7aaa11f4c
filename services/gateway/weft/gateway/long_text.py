"""Long strings of large bodies, such as images in base64, which are not copied.

Python's lock is held while a JSON parser copies a string of 20 MB, and all streams wait. So such
strings are cut out of a body before it is parsed, and are read where they lie.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

LEAST_BYTES = 64 << 10
"""Strings of twice this length are long; of shorter ones some are."""
_PIECE_BYTES = 1 << 20
_FIRST = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
"""How base64 and data URLs begin, and what never follows a string's end in JSON."""


class BodyBytes(NamedTuple):
    """A body within the message that brought it."""

    message: bytes
    start: int
    end: int

    @classmethod
    def of(cls, data: bytes) -> BodyBytes:
        return cls(data, 0, len(data))

    def __len__(self) -> int:
        return self.end - self.start

    def count(self, one: int) -> int:
        """How often a byte occurs. In pieces, since each call holds Python's lock."""
        starts = range(self.start, self.end, _PIECE_BYTES)
        return sum(self.message.count(one, at, min(at + _PIECE_BYTES, self.end)) for at in starts)


class LongText:
    """A string of a body: text without escapes, within the message that brought it."""

    __slots__ = ("_end", "_message", "_start")

    def __init__(self, message: bytes, start: int, end: int) -> None:
        self._message, self._start, self._end = message, start, end

    def __len__(self) -> int:
        """Bytes."""
        return self._end - self._start

    @property
    def within(self) -> BodyBytes:
        """Where its UTF-8 lies."""
        return BodyBytes(self._message, self._start, self._end)

    def head(self, num_bytes: int) -> str:
        """The beginning, with a mark for each byte that is no text."""
        end = min(self._end, self._start + num_bytes)
        return self._message[self._start : end].decode(errors="replace")

    def bytes_from(self, first: int) -> memoryview:
        """Its UTF-8 from a byte on, without a copy."""
        return memoryview(self._message)[self._start + first : self._end]

    def to_str(self) -> str:
        """Raises UnicodeDecodeError if it is no UTF-8."""
        return str(self.bytes_from(0), "utf-8")


class CutBody(NamedTuple):
    """A body whose long strings have names in their places."""

    data: bytes
    prefix: str
    """How the names begin, which no client knows."""
    texts: Sequence[LongText]

    def put_back(
        self,
        value: Any,
        at_images: Iterable[tuple[dict[str, Any], str]],
        on_text: Callable[[LongText], None],
    ) -> Any:
        """The parsed body with strings in the places of their names, and each a `LongText` in the
        fields `at_images`, given by their object and name, and in lists there. `on_text` gets each
        of the others before it is copied; what it raises is raised. Raises UnicodeDecodeError for a
        string that is no text.
        """
        for parent, name in at_images:
            given = parent.get(name)
            if isinstance(given, list):
                given[:] = map(self._found, given)
            elif given is not None:
                parent[name] = self._found(given)
        return self._walked(value, on_text)

    def _found(self, value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith(self.prefix):
            return value
        return self.texts[int(value.removeprefix(self.prefix))]

    def _walked(self, value: Any, on_text: Callable[[LongText], None]) -> Any:
        if isinstance(value, str):
            found = self._found(value)
            if not isinstance(found, LongText):
                return value
            on_text(found)
            return found.to_str()
        if isinstance(value, dict):
            return {
                self._walked(name, on_text): self._walked(one, on_text)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [self._walked(one, on_text) for one in value]
        return value


def cut(body: BodyBytes) -> CutBody:
    """Cuts long strings without escapes out of a body, of which only the rest is copied. What is
    left is valid JSON if and only if the body was, but for control characters within the strings.
    """
    message, _, end = body
    pieces, texts, at = list[bytes](), list[LongText](), body.start
    prefix = f"weft-text-{secrets.token_hex(16)}-"
    window = body.start
    while (after := window + LEAST_BYTES) <= end:
        if message.find(b'"', window, after) >= 0:
            window = after
            continue
        first = message.rfind(b'"', at, window) + 1
        last = _next_quote(message, after, end)
        if last < 0:
            break
        if first > at and _is_plain(message, first, last):
            pieces += [message[at:first], f"{prefix}{len(texts)}".encode()]
            texts.append(LongText(message, first, last))
            at = last
        window = last + 1
    pieces.append(message[at:end])
    return CutBody(b"".join(pieces), prefix, texts)


def _next_quote(message: bytes, at: int, end: int) -> int:
    for start in range(at, end, _PIECE_BYTES):
        found = message.find(b'"', start, min(start + _PIECE_BYTES, end))
        if found >= 0:
            return found
    return -1


def _is_plain(message: bytes, first: int, last: int) -> bool:
    """Whether a string stands between two quotes, and not what is between strings, and has no
    escapes: then the quotes around it are none either.
    """
    if message[first] not in _FIRST or message[first - 2] == ord("\\"):
        return False
    return all(
        message.find(b"\\", at, min(at + _PIECE_BYTES, last)) < 0
        for at in range(first, last, _PIECE_BYTES)
    )
