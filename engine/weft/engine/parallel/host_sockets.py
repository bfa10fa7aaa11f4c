"""TCP connections between the hosts of an engine, with the mesh's identity where it has TLS."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.contract.errors import ConfigError

_SIZE = struct.Struct("<I")
_MOST_BYTES = 1 << 24
"""Largest message, in bytes."""
_TRY_EVERY_S = 0.5


class HostTls(NamedTuple):
    """PEM files of this service's identity; both ends of a connection must name the service."""

    cert: Path
    key: Path
    ca: Path
    name: str
    """The service's DNS name in certificates."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Raises ConfigError unless `text` is host:port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"rendezvous = {text}: must be host:port", param="rendezvous")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def listen(address: Address) -> socket.socket:
    """A listener on an address of this host; port 0: a free one. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(tuple(address))
        listener.listen(64)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error}; --rendezvous names an address of host 0, free "
            "there",
            param="rendezvous",
        ) from error
    return listener


def accept(listener: socket.socket, tls: HostTls | None, deadline: float) -> socket.socket | None:
    """The next connection; None: it was not trusted or was lost. Raises TimeoutError at the
    deadline, a time of `time.monotonic`.
    """
    listener.settimeout(max(1e-3, deadline - time.monotonic()))
    sock, _ = listener.accept()
    try:
        sock.settimeout(max(1e-3, min(10.0, deadline - time.monotonic())))
        if tls is None:
            return sock
        context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
        secured = context.wrap_socket(sock, server_side=True)
        names = secured.getpeercert() or {}
        if ("DNS", tls.name) in names.get("subjectAltName", ()):
            return secured
    except OSError:
        pass
    sock.close()
    return None


def connect(
    address: Address, tls: HostTls | None, deadline: float, *, is_patient: bool
) -> socket.socket:
    """Connects to another host.

    Args:
        is_patient: Whether the other end may start later than this one.

    Raises:
        ConfigError: It cannot be reached, or is not trusted.
    """
    while True:
        try:
            sock = socket.create_connection(
                (address.host, address.port), max(0.1, min(10.0, deadline - time.monotonic()))
            )
            break
        except OSError as error:
            if not is_patient or time.monotonic() > deadline:
                raise ConfigError(f"cannot reach {address}: {error}", param="rendezvous") from error
            time.sleep(_TRY_EVERY_S)
    if tls is None:
        return sock
    own = sock.getsockname()[0]
    try:
        context = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
        return context.wrap_socket(sock, server_hostname=tls.name)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{address}, from {own}: no TLS connection as {tls.name}: {error}", param="tls_cert"
        ) from error


def _context(protocol: int, tls: HostTls) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    return context


def end_when_lost(sock: socket.socket, limit_s: float) -> None:
    """Makes the system give a connection up if the other host does not answer for `limit_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limit_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limit_s / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    """Raises ConnectionError if the other end is gone, TimeoutError after the socket's time-out."""
    while into:
        count = sock.recv_into(into)
        if not count:
            raise ConnectionError("the other end is gone")
        into = into[count:]


def send_message(sock: socket.socket, message: Mapping[str, object]) -> None:
    """Sends JSON. Raises OSError."""
    body = json.dumps(message).encode()
    sock.sendall(_SIZE.pack(len(body)) + body)


def receive_message(sock: socket.socket) -> dict[str, Any]:
    """Raises OSError; ConnectionError also for what is no message."""
    head = bytearray(_SIZE.size)
    receive_exactly(sock, memoryview(head))
    return _receive_body(sock, head)


def poll_message(sock: socket.socket, limit_s: float) -> dict[str, Any] | None:
    """The next message; None: it has not begun. Raises as `receive_message` does.

    Args:
        limit_s: Longest wait for the rest of a message that has begun.
    """
    head = bytearray(_SIZE.size)
    sock.settimeout(0.0)
    try:
        count = sock.recv_into(head)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    if not count:
        raise ConnectionError("the other end is gone")
    sock.settimeout(limit_s)
    receive_exactly(sock, memoryview(head)[count:])
    return _receive_body(sock, head)


def _receive_body(sock: socket.socket, head: bytearray) -> dict[str, Any]:
    (size,) = _SIZE.unpack(head)
    if size > _MOST_BYTES:
        raise ConnectionError("no message of a rank")
    body = bytearray(size)
    receive_exactly(sock, memoryview(body))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("no message of a rank") from error
    if not isinstance(found, dict):
        raise ConnectionError("no message of a rank")
    return found
