"""Allocation of free TCP ports."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from weft.contract.errors import ConfigError

_FIRST_PORT = 20_000
_TRIES = 1000
"""Ports to try before the system chooses one."""
_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and last port that the system gives to outgoing connections."""
_CLAIMS: list[socket.socket] = []
"""Sockets whose names claim the ports that this process has chosen."""


def check_free(host: str, port: int, flag: str) -> None:
    """Raises ConfigError, which names the port's flag, if something listens there or the address is
    not this machine's.
    """
    try:
        _bind(host, port).close()
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = (
            f"another port with {flag}" if is_port else "an address of this machine with --host"
        )
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose {advice}"
        ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Chooses different ports that no process listens on now. Other processes that call this
    function do not choose these ports until this process ends. Raises ConfigError if the address is
    not this machine's, or there are no free ports.
    """
    held: list[socket.socket] = []
    found: list[int] = []
    num_taken = 0
    try:
        while len(found) < count:
            port = _any_port() if num_taken < _TRIES else 0
            try:
                held.append(_bind(host, port))
            except OSError as error:
                num_taken += 1
                if error.errno != errno.EADDRINUSE or not port:
                    raise ConfigError(
                        f"no free ports on {host}: {error.strerror}; close other programs' or end "
                        "other meshes"
                    ) from error
                continue
            chosen = int(held[-1].getsockname()[1])
            if _claim(chosen):
                found.append(chosen)
        return found
    finally:
        for taken in held:
            taken.close()


def free_run(host: str, count: int) -> int:
    """Like `free_ports`, for consecutive ports; returns the first."""
    for _ in range(_TRIES):
        first = free_ports(host, 1)[0]
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(_bind(host, port))
        except (OSError, OverflowError):  # One of the ports is taken, or there are no more.
            continue
        finally:
            for taken in held:
                taken.close()
        if all(_claim(port) for port in range(first + 1, first + count)):
            return first
    raise ConfigError(f"no {count} free ports in a row on {host}")


def _claim(port: int) -> bool:
    """Keeps a port from other callers: its server listens only seconds later, and again after a
    restart. Returns False if a process, perhaps this one, has claimed it before.

    The claim is an abstract name of a Unix socket. Such names belong to a network namespace, as
    ports do, and they end with the process.
    """
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0weft-port-{port}")
    except OSError:
        name.close()
        return False
    _CLAIMS.append(name)
    return True


def _any_port() -> int:
    """A port that no outgoing connection takes before its server listens; 0: the system must
    choose.
    """
    try:
        end = int(_LOCAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0
    return random.randrange(_FIRST_PORT, end) if end > _FIRST_PORT else 0


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do, so that lingering connections of an earlier mesh are no obstacle.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1)  # With SO_REUSEADDR, an existing listener is noticed only here.
    except OSError:
        bound.close()
        raise
    return bound
