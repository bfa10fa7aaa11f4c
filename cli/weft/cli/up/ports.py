"""Free TCP ports."""

from __future__ import annotations

import socket

from weft.engine.errors import ConfigError


def check_free(host: str, port: int, flag: str) -> None:
    """Finds out early, and names the flag, when a port cannot be had.

    Raises:
        ConfigError: Something listens there, or the address is not this machine's.
    """
    try:
        _bind(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with {flag}"
        ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    held = [_bind(host, 0) for _ in range(count)]
    ports = [int(taken.getsockname()[1]) for taken in held]
    for taken in held:
        taken.close()
    return ports


def free_run(host: str, count: int) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    while True:
        first = free_ports(host, 1)[0]
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(_bind(host, port))
        except (OSError, OverflowError):  # one of them is taken, or there are no more
            continue
        finally:
            for taken in held:
                taken.close()
        return first


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: connections of an earlier mesh that linger are no obstacle.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1)  # with SO_REUSEADDR a listener is met only here
    except OSError:
        bound.close()
        raise
    return bound
