"""The default id of a worker or store."""

import os
import socket

_MAX_HOST_CHARS = 40
"""Ids have 64 characters at most."""


def default_id(role: str, port: int) -> str:
    """An id that other machines do not use, and that stays the same if `port` is not 0."""
    return f"{role}-{socket.gethostname()[:_MAX_HOST_CHARS]}-{port or os.getpid()}"
