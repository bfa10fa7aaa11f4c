"""Collects what an owner sends of a prompt itself: its tokens' log-probabilities, or vectors."""

from __future__ import annotations

from weft.v1 import common_pb2, decode_pb2

_NUMBER_BYTES = 4


class PromptScores:
    """Log-probabilities of all tokens of a prompt but the first, which has none.

    They arrive in order, before the first generated token. After a resubmission the new owner sends
    all of them again.
    """

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self.entries: list[common_pb2.TokenLogprob] = []
        """Received log-probabilities; the first one belongs to the prompt's second token."""
        self.is_complete = len(ids) < 2
        """Whether all log-probabilities have arrived."""

    @property
    def missing(self) -> str:
        """The missing part, for error messages; empty: none."""
        if self.is_complete:
            return ""
        first, last = len(self.entries) + 1, len(self._ids) - 1
        return f"log-probabilities of prompt tokens {first} to {last} are missing"

    def restart(self) -> None:
        """Starts over, with another owner, unless all have come."""
        if not self.is_complete:
            self.entries.clear()

    def add(self, event: decode_pb2.SessionEvent.PromptLogprobs) -> str:
        """Takes the next ones. Returns what is wrong with the entries, of which then none is taken;
        empty if they were taken.
        """
        first, count = event.first_position, len(event.logprobs)
        given = [entry.token_id for entry in event.logprobs]
        are_own = first > 0 and given == self._ids[first : first + count]
        if are_own and first + count <= 1 + len(self.entries):
            return ""  # The owner has sent it before.
        told = f"log-probabilities of prompt tokens {first} to {first + count - 1}"
        expected = len(self.entries) + 1
        if self.is_complete or first != expected or first + count > len(self._ids):
            return f"{told}, expected " + (f"from {expected}" if not self.is_complete else "none")
        if not are_own:
            return f"{told} are of other tokens"
        self.entries.extend(event.logprobs)
        self.is_complete = len(self.entries) == len(self._ids) - 1
        return ""


class PromptVectors:
    """Vectors of one prompt, `num_rows` of them, at least 1. They come in order. An owner that
    starts over sends the first ones again, which are not taken then.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._parts: list[bytes] = []
        self._num_received = 0
        self.width = 0
        """Numbers in each; 0: none has come."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._num_received == self._num_rows

    @property
    def values(self) -> bytes:
        """float32, little-endian, one vector after another."""
        return b"".join(self._parts)

    @property
    def num_rows(self) -> int:
        """Number of vectors received."""
        return self._num_received

    def restart(self) -> None:
        """Starts over, with another owner, unless all have come."""
        if not self.is_complete:
            self._parts.clear()
            self._num_received = self.width = 0

    def add(self, event: decode_pb2.SessionEvent.Vectors) -> str:
        """Takes the next ones. Returns what is wrong with them, of which then none is taken; empty
        if they were taken.
        """
        count, rest = divmod(len(event.values), _NUMBER_BYTES * max(1, event.width))
        told = f"vectors {event.first_row} to {event.first_row + count - 1}"
        if not event.width or rest or not count or event.width != (self.width or event.width):
            return f"{told} of {event.width} numbers in {len(event.values)} bytes"
        if event.first_row > self._num_received or event.first_row + count > self._num_rows:
            return f"{told}, of {self._num_rows}, behind {self._num_received}"
        num_known = self._num_received - event.first_row
        if num_known >= count:
            return ""  # The owner has sent it before.
        self.width = event.width
        self._num_received += count - num_known
        self._parts.append(event.values[num_known * event.width * _NUMBER_BYTES :])
        return ""
