"""Messages between an engine and its compiler process: length-prefixed msgpack."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar, cast

from weft.engine.request import Constraint

TOKENIZER_FILE = "tokenizer.json"
"""Name of the tokenizer's file in the model's directory."""
WALL_FACTOR = 6
"""Factor by which wall-clock time may exceed processor time, since the machine may be busy."""
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
    """Most memory that compiling one grammar may take, beyond what the process has."""
    max_grammar_bytes: int
    """Largest compiled grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMessage:
    """The second message to the process: the model's vocabulary."""

    text: str
    """The vocabulary as xgrammar serialises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOrder:
    """A constraint to be compiled."""

    number: int
    constraint: Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """Result of an order: a grammar, or the reason why the constraint cannot be used."""

    number: int
    grammar: str = ""
    """The grammar as xgrammar serialises it."""
    problem: str = ""
    """Why the constraint cannot be used, and which part of it is at fault."""


def _msgpack() -> ModuleType:
    """The msgspec module, imported on first use: engines without constraints need not have it."""
    import msgspec.msgpack

    return msgspec.msgpack


def encode(message: CompilerConfig | VocabularyMessage | CompileOrder | CompileResult) -> bytes:
    """Encodes a message as one frame."""
    body: bytes = _msgpack().encode(message)
    return _HEADER.pack(len(body)) + body


def decode(frame: bytes, kind: type[T]) -> T | None:
    """Decodes a whole frame; None if it is truncated."""
    body = frame[_HEADER.size :]
    if len(frame) < _HEADER.size or len(body) != _HEADER.unpack_from(frame)[0]:
        return None
    return cast(T, _msgpack().decode(body, type=kind))


def receive(sock: socket.socket, kind: type[T]) -> T:
    """Receives one message; blocks until it is complete.

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
