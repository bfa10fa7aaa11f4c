"""The local socket between a worker's two processes: length-prefixed, schema-checked msgpack."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec
from weft.contract.messages import Inbox, Outbox
from weft.contract.reports import EngineInfo
from weft.contract.submits import Failure
from weft.contract.token_ids import unpacked_ids
from weft.engine.base.config import EngineConfig

MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20
"""Most bytes that the engine reads at a time. It reads once a turn, so the socket has room for as
many: a picture of several megabytes would take a turn for each 200 kB otherwise, and all that is
sent after it too.
"""
HEADER = struct.Struct("<I")


@dataclass(slots=True, kw_only=True)
class EngineMessages:
    """A frame from the engine: exactly one field is set."""

    outbox: Outbox | None = None
    info: EngineInfo | None = None
    """Facts about the engine, sent once, when it is ready."""
    progress: tuple[int, int, str] | None = None
    """(done, total, what in words) while the engine loads."""
    failure: Failure | None = None
    """Why the engine could not start."""


def _encode_other(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, array):
        return memoryview(value).cast("B")
    raise TypeError(f"{type(value).__name__} cannot cross the socket")


def _decode_other(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is array and isinstance(value, bytes):
        return unpacked_ids(value)
    raise TypeError(f"{kind.__name__} cannot cross the socket")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_config_decoder = msgspec.msgpack.Decoder(EngineConfig, dec_hook=_decode_other)
_inbox_decoder = msgspec.msgpack.Decoder(Inbox, dec_hook=_decode_other)
_outbox_decoder = msgspec.msgpack.Decoder(EngineMessages, dec_hook=_decode_other)


def frame(message: EngineConfig | Inbox | EngineMessages) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes")
    return HEADER.pack(len(body)) + body


def parse_config(body: bytes) -> EngineConfig:
    """The first frame to the engine."""
    return _config_decoder.decode(body)


def parse_inbox(body: bytes) -> Inbox:
    """Parses a frame to the engine, after the first."""
    return _inbox_decoder.decode(body)


def parse_from_engine(body: bytes) -> EngineMessages:
    """Parses a frame from the engine."""
    return _outbox_decoder.decode(body)


def merge(first: Inbox, second: Inbox) -> Inbox:
    """Joins two inboxes, `first` before `second` within each kind."""
    for name in first.__dataclass_fields__:
        value = getattr(second, name)
        if isinstance(value, list):
            getattr(first, name).extend(value)
        elif value:
            setattr(first, name, value)
    return first
