"""Messages between rank 0 and another rank during the start: JSON and shared memory."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from weft.contract.binding import Binding
from weft.engine.base.config import EngineConfig

_HEADER = struct.Struct("<I")


class LinkClosed(Exception):
    """The other end of the link is gone, or does not answer in time."""


class RankLink:
    """One end of a socket pair. Calls wait up to the socket's timeout and raise LinkClosed if the
    other end is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Mapping[str, object], memory: int | None = None) -> None:
        body = json.dumps(message).encode()
        try:
            descriptors = [] if memory is None else [memory]
            socket.send_fds(self._socket, [_HEADER.pack(len(body))], descriptors)
            self._socket.sendall(body)
        except OSError as error:
            raise LinkClosed from error

    def receive(self) -> tuple[dict[str, Any], int | None]:
        try:
            header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
            if len(header) < _HEADER.size:
                raise LinkClosed
            (size,) = _HEADER.unpack(header)
            body = b""
            while len(body) < size:
                part = self._socket.recv(size - len(body))
                if not part:
                    raise LinkClosed
                body += part
        except OSError as error:
            raise LinkClosed from error
        return json.loads(body), descriptors[0] if descriptors else None

    def close(self) -> None:
        self._socket.close()


def config_to_json(config: EngineConfig) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(config).items()
    }


def config_of_json(values: Mapping[str, Any]) -> EngineConfig:
    found = dict(values)
    for field in fields(EngineConfig):
        value, kind = found[field.name], str(field.type)
        if kind.startswith("Path") and value is not None:
            found[field.name] = Path(value)
        elif field.name == "bindings":
            found[field.name] = tuple(Binding(**one) for one in value)
        elif kind.startswith("tuple"):
            found[field.name] = tuple(value)
    return EngineConfig(**found)
