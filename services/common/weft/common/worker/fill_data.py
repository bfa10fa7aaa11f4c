"""Data of fills on their way between gRPC and the memory that a worker's two processes share.

A message of data is up to 1 MiB. As an ordinary message each byte would be copied three times here
and five times more on the way from or to the engine, which takes most of the time.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from weft.contract.clock import monotonic
from weft.contract.codec.pairs import event_from_proto, event_to_proto
from weft.contract.handle import DATA_CHUNK_BYTES, FillEvent, KvHandle, SharedTargetInfo
from weft.pages.transfer.nixl_wire import TransferError
from weft.pages.transfer.shared import SharedPeer
from weft.v1 import kv_pb2

logger = logging.getLogger(__name__)

TELL_INTERVAL_S = 0.1
"""Seconds after which the engine is told of data at the latest: they are a filler's progress."""
_DATA = kv_pb2.FillEvent.DATA_FIELD_NUMBER << 3 | 2
_DATA_BYTES = kv_pb2.FillEvent.Data.DATA_FIELD_NUMBER << 3 | 2
_VARINT, _LENGTH = 0, 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_FREE_BYTES = 32 << 20
_LARGEST_MESSAGE_BYTES = 4 << 20


def keep_message_memory() -> None:
    """Lets this process's C allocator use the memory of one message of data for the next.

    glibc would give a megabyte that is freed back to the system, which clears it before it gives it
    out again, page by page. That takes longer than all copies of the message. Up to 32 MiB of free
    memory are kept for each of the allocator's arenas. With another C library nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)


def map_memory(target: SharedTargetInfo | None) -> NDArray[np.uint8] | None:
    """The memory that this worker's engine offers, uint8 `[places, bytes]`; None: there is none."""
    if target is None:
        return None
    try:
        peer = SharedPeer(target)
    except TransferError as error:
        logger.warning("data reach the engine in messages: %s", error)
        return None
    _engines.append(peer)  # The engine sees by the connection that its memory is mapped.
    return peer.pages


_engines: list[SharedPeer] = []


def data_to_wire(event: FillEvent, memory: NDArray[np.uint8]) -> bytes:
    """A serialised `FillEvent` message with an event's data from the memory for outgoing ones."""
    head = event_to_proto(event).data.SerializeToString()
    held = memory.reshape(-1)[event.held_at : event.held_at + event.num_held]
    size = _varint(event.num_held)
    inner = len(head) + 1 + len(size) + event.num_held
    parts = (_tag(_DATA), _varint(inner), head, _tag(_DATA_BYTES), size, held.data)
    return b"".join(parts)


def event_to_wire(event: kv_pb2.FillEvent | bytes) -> bytes:
    """Serialises an event, unless it is."""
    return event if isinstance(event, bytes) else event.SerializeToString()


def event_from_wire(wire: bytes) -> tuple[FillEvent, memoryview]:
    """Parses a serialised `FillEvent`. Data are returned beside the event, as a view.

    Raises:
        google.protobuf.message.DecodeError: It is none; gRPC ends the call.
    """
    begin = _data_at(wire)
    if begin is None:
        event = event_from_proto(kv_pb2.FillEvent.FromString(wire))
        data, event.data = event.data, b""
        return event, memoryview(data)
    inner, at, end = begin
    head = kv_pb2.FillEvent.Data.FromString(wire[inner:at])
    return event_from_proto(kv_pb2.FillEvent(data=head)), memoryview(wire)[end:]


class IncomingData:
    """Puts data of one fill where its handle says, in the memory in which fills land.

    Data that come after a part of the fill was reported as written, or after it was stopped, are
    not its any more: the engine may have given the pages to another.
    """

    def __init__(self, memory: NDArray[np.uint8], handle: KvHandle) -> None:
        self._memory = memory
        self._handle = handle
        self._begin = handle.start_token
        self._num_pages = len(handle.pages)
        self.is_stopped = False
        self._untold: FillEvent | None = None
        self._told_at = monotonic()

    def put(self, event: FillEvent, data: memoryview) -> list[FillEvent]:
        """Copies the event's data, or leaves them in the event if they do not fit. Returns what the
        engine is to be told now: events of data that were put are joined.
        """
        handle = self._handle
        index, odd = divmod(event.start_token - handle.start_token, handle.page_size)
        is_sound = (
            not odd
            and event.start_token >= self._begin
            and index < self._num_pages
            and handle.pages[index] < len(self._memory)
            and 0 < len(data) <= DATA_CHUNK_BYTES
            and 0 <= event.offset <= self._memory.shape[1] - len(data)
        )
        if self.is_stopped or not is_sound:
            event.data = bytes(data)  # The engine says what is wrong.
            return [*self.untold(), event]
        row = self._memory[handle.pages[index]]
        row[event.offset : event.offset + len(data)] = np.frombuffer(data, np.uint8)
        told = self._told_at <= monotonic() - TELL_INTERVAL_S
        if self._untold is None:
            self._untold = replace(event, num_held=0)
        self._untold.num_held += len(data)
        return self.untold() if told else []

    def untold(self) -> list[FillEvent]:
        """What the engine was not told of data that were put, at most one event. It precedes every
        other event of the fill.
        """
        self._told_at = monotonic()
        event, self._untold = self._untold, None
        return [] if event is None else [event]

    def accepted(self, end_token: int) -> None:
        """Notes that the filler writes up to a position only."""
        if end_token < self._handle.end_token:
            size = self._handle.page_size
            self._num_pages = max(0, end_token - self._handle.start_token) // size

    def written(self, end_token: int) -> None:
        """Notes that the pages before a position are the engine's now."""
        self._begin = max(self._begin, end_token)


def _tag(number: int) -> bytes:
    return bytes((number,))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(wire: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises IndexError or ValueError if there is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = wire[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of over ten bytes")


def _data_at(wire: bytes) -> tuple[int, int, int] | None:
    """Of a message of data: where its fields begin, where the field of bytes does, and its content.
    None: it is another message, or the bytes are not its end.
    """
    try:
        if wire[0] != _DATA:
            return None
        size, inner = _read_varint(wire, 1)
        if inner + size != len(wire):
            return None
        at = inner
        while at < len(wire):
            tag, after = _read_varint(wire, at)
            value, end = _read_varint(wire, after)
            if tag == _DATA_BYTES:
                return (inner, at, end) if end + value == len(wire) else None
            if tag & 7 not in (_VARINT, _LENGTH):
                return None
            at = end + value if tag & 7 == _LENGTH else end
    except (IndexError, ValueError):
        pass
    return None
