"""Binding of gRPC ports."""

from __future__ import annotations

import os
import re

import grpc
from weft.common.settings import is_loopback
from weft.contract.errors import ConfigError

_ADDRESS = re.compile(r"(\[[\w:.%]+\]|[\w.-]+):([0-9]{1,5})")
"""A name or an address, IPv6 in brackets, and a port. gRPC would take "unix:" and others too."""


def bracket(host: str) -> str:
    """A host in the form that precedes `:port`."""
    return f"[{host}]" if ":" in host else host


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        ValueError: It is not such an address.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise ValueError(f"{address!r} is not host:port; give for example 127.0.0.1:50052")
    return parts[1], int(parts[2])


def add_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    flags: tuple[str, str],
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Binds a port on a server that has not been started; returns host:port as bound.

    Args:
        port: 0 = any free one.
        flags: Names of the settings of port and host, for the error.
        credentials: For TLS; None: without.

    Raises:
        ConfigError: The port is taken or the address cannot be bound.
    """
    try:
        address = f"{bracket(host)}:{port}"
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: the port is in use or the address is not this "
            f"machine's; choose another {flags[0]} or {flags[1]}"
        ) from error
    return f"{bracket(host)}:{bound}"


def keep_nixl_on_loopback(host: str) -> None:
    """Makes NIXL listen on loopback only, if the service does so; must be called before NIXL
    starts.

    UCX, below NIXL, by default opens ports without authentication on every network device.
    Variables that are set already are kept.
    """
    if is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
