"""Limit on the bytes that a filler copies into streams before the streams pass them on."""

from __future__ import annotations

MAX_BYTES = 128 << 20
"""Limit over all streams. It also bounds the messages of one turn, which travel together."""


class DataBudget:
    """Bytes of pages sent as messages, by stream. Streams that must wait take turns."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        """A chunk of more than `most` bytes goes alone."""
        self._most = most
        self._total = 0
        self._given: dict[int, int] = {}
        self._waiting: dict[int, None] = {}

    @property
    def first_waiting(self) -> int | None:
        """The stream whose turn it is; None: none is waiting."""
        return next(iter(self._waiting), None)

    def ask(self, stream: int, num_bytes: int) -> bool:
        """Whether a stream may take this many bytes now; if not, it waits for its turn."""
        is_next = self.first_waiting in (None, stream)
        if not is_next or (self._total and self._total + num_bytes > self._most):
            self._waiting[stream] = None
            return False
        self._waiting.pop(stream, None)
        self._given[stream] = self._given.get(stream, 0) + num_bytes
        self._total += num_bytes
        return True

    def leave(self, stream: int) -> None:
        self._waiting.pop(stream, None)

    def taken(self, stream: int) -> None:
        """Notes that a stream has passed on all of its bytes, or has ended."""
        self._total -= self._given.pop(stream, 0)
