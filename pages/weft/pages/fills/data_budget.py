"""Limit on the bytes that a filler copies into streams before the streams pass them on."""

from __future__ import annotations

from weft.pages.transfer.chunks import SLOT_BYTES

MAX_BYTES = 128 << 20
"""Limit over all streams. It also bounds the messages of one turn, which travel together."""


NUM_SLOTS = MAX_BYTES // SLOT_BYTES


class DataSlots:
    """Places of chunks in the memory from which the server process sends data. A place is free when
    its chunk is written and the stream has passed it on, in any order.
    """

    def __init__(self, count: int = NUM_SLOTS) -> None:
        self._free = list(range(count))
        self._open: dict[int, tuple[int, bool]] = {}
        """By place: the stream, and whether the chunk is written."""
        self._of_stream: dict[int, int] = {}

    def take(self, stream: int, num_bytes: int) -> int | None:
        """A place for a stream's next chunk; None: it does not fit, or none is free."""
        if num_bytes > SLOT_BYTES or not self._free or stream in self._of_stream:
            return None
        slot = self._free.pop()
        self._open[slot], self._of_stream[stream] = (stream, False), slot
        return slot

    def written(self, slot: int) -> None:
        """Notes that nothing more is written to a place."""
        stream, _ = self._open[slot]
        self._open[slot] = stream, True
        if self._of_stream.get(stream) != slot:
            self._give(slot)

    def taken(self, stream: int) -> None:
        """Notes that a stream has passed on its chunk, or has ended."""
        slot = self._of_stream.pop(stream, None)
        if slot is not None and self._open[slot][1]:
            self._give(slot)

    def _give(self, slot: int) -> None:
        del self._open[slot]
        self._free.append(slot)


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
