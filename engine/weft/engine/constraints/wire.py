"""What an engine and its compiler process tell each other: length-prefixed msgpack."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar, cast

from weft.engine.request import Constraint

TOKENIZER_FILE = "tokenizer.json"
"""In the model's directory."""
WALL_FACTOR = 6
"""The clock may show so many times the processor's time: the machine may be busy."""
_HEADER = struct.Struct("<I")
T = TypeVar("T")


class PeerClosed(Exception):
    """The other end of the socket is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerConfig:
    """The first message to the process."""

    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    timeout_s: float
    """Processor time that one grammar may take to compile."""
    max_memory_bytes: int
    """That compiling one grammar may take, beyond what the process has."""
    max_grammar_bytes: int
    """Of a compiled grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The second message to the process: what the model's tokens spell."""

    text: str
    """As xgrammar serialises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOrder:
    """A constraint to be compiled."""

    number: int
    constraint: Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """What became of an order: a grammar, or a problem of the constraint."""

    number: int
    grammar: str = ""
    """As xgrammar serialises it."""
    problem: str = ""
    """Why the constraint cannot be used, and where in it."""


def _msgpack() -> ModuleType:
    """Imported when a constraint comes: without any, an engine runs where msgspec is missing."""
    import msgspec.msgpack

    return msgspec.msgpack


def encode(message: CompilerConfig | Vocabulary | CompileOrder | CompileResult) -> bytes:
    """A frame."""
    body: bytes = _msgpack().encode(message)
    return _HEADER.pack(len(body)) + body


def decode(frame: bytes, kind: type[T]) -> T | None:
    """The message of a whole frame; None when it is cut off."""
    body = frame[_HEADER.size :]
    if len(frame) < _HEADER.size or len(body) != _HEADER.unpack_from(frame)[0]:
        return None
    return cast(T, _msgpack().decode(body, type=kind))


def receive(sock: socket.socket, kind: type[T]) -> T:
    """Waits for one message.

    Raises:
        PeerClosed: There will be none.
    """
    (length,) = _HEADER.unpack(_read(sock, _HEADER.size))
    return cast(T, _msgpack().decode(_read(sock, length), type=kind))


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            part = sock.recv(min(num_bytes - len(data), 1 << 20))
        except ConnectionError as error:
            raise PeerClosed from error
        if not part:
            raise PeerClosed
        data += part
    return bytes(data)
