"""Collects the vectors of one prompt, as its owner sends them."""

from __future__ import annotations

from weft.v1 import decode_pb2

_NUMBER_BYTES = 4


class PromptVectors:
    """Vectors of one prompt, which come in order. An owner that begins anew sends the first ones
    again, which are not taken then.

    Args:
        num_rows: How many are to come, at least 1.
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
        """Begins anew, with another owner, unless all have come."""
        if not self.is_complete:
            self._parts.clear()
            self._num_received = self.width = 0

    def add(self, event: decode_pb2.SessionEvent.Vectors) -> str:
        """Takes the next ones.

        Returns:
            What is wrong with them, after which none of them is taken; empty: nothing.
        """
        count, rest = divmod(len(event.values), _NUMBER_BYTES * max(1, event.width))
        told = f"vectors {event.first_row} to {event.first_row + count - 1}"
        if not event.width or rest or not count or event.width != (self.width or event.width):
            return f"{told} of {event.width} numbers in {len(event.values)} bytes"
        if event.first_row > self._num_received or event.first_row + count > self._num_rows:
            return f"{told}, of {self._num_rows}, behind {self._num_received}"
        num_known = self._num_received - event.first_row
        if num_known >= count:
            return ""  # Told once more.
        self.width = event.width
        self._num_received += count - num_known
        self._parts.append(event.values[num_known * event.width * _NUMBER_BYTES :])
        return ""
