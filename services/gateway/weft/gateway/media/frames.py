"""Messages between the gateway and its media processes: a head in JSON and bytes behind it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

_HEAD_BYTES, _BODY_BYTES = 4, 8
_MAX_HEAD_BYTES = 1 << 20
_MAX_BODY_BYTES = 1 << 31


class PeerGone(Exception):
    """The other end has closed the socket, or sent what is no message."""


def send(
    peer: socket.socket, head: Mapping[str, Any], body: bytes | memoryview, deadline: float
) -> None:
    """Sends one message. Raises TimeoutError at `deadline`, by `time.monotonic`, and PeerGone."""
    text = json.dumps(head).encode()
    sizes = len(text).to_bytes(_HEAD_BYTES, "little") + len(body).to_bytes(_BODY_BYTES, "little")
    try:
        for part in (sizes + text, body):
            _limit(peer, deadline)
            peer.sendall(part)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive(peer: socket.socket, deadline: float) -> tuple[dict[str, Any], bytearray]:
    """Waits for one message. Raises TimeoutError at `deadline`, by `time.monotonic`, and
    PeerGone.
    """
    sizes = _take(peer, _HEAD_BYTES + _BODY_BYTES, deadline)
    num_head = int.from_bytes(sizes[:_HEAD_BYTES], "little")
    num_body = int.from_bytes(sizes[_HEAD_BYTES:], "little")
    if num_head > _MAX_HEAD_BYTES or num_body > _MAX_BODY_BYTES:
        raise PeerGone("a message is too large")
    try:
        head = json.loads(_take(peer, num_head, deadline))
    except ValueError as error:
        raise PeerGone("a message has no head") from error
    return head, _take(peer, num_body, deadline)


def _take(peer: socket.socket, num_bytes: int, deadline: float) -> bytearray:
    taken = bytearray(num_bytes)
    view, at = memoryview(taken), 0
    try:
        while at < num_bytes:
            _limit(peer, deadline)
            count = peer.recv_into(view[at:])
            if not count:
                raise PeerGone("the socket was closed")
            at += count
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(str(error)) from error
    return taken


def _limit(peer: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    peer.settimeout(None if left_s == float("inf") else left_s)
