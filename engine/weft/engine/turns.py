"""Turns among processes of one machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.engine.errors import ConfigError

_POLL_S = 0.1


@contextmanager
def in_turn(name: str, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Runs a block while no other process of this machine runs one of this name.

    A process that ends, however it does, gives up its turn.

    Args:
        name: Part of a file's name.
        timeout_s: Longest wait, seconds.
        on_wait: Called once if somebody else has the turn.

    Raises:
        ConfigError: The others took longer, or the file cannot be opened.
    """
    path = Path(tempfile.gettempdir()) / f"weft-{name}.lock"
    file = _open(path)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(file):
            on_wait()
            on_wait = _nothing
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"other processes have held {path} for {timeout_s:.0f} s: workers start one "
                    "after the other on a GPU whose free memory they divide; end the one that "
                    "hangs, or give each its kv_memory_bytes"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """The file, which may be another user's: it is locked, not written."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags if path.exists() else flags | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot open {path}, by which workers that divide a GPU's free memory start one after "
            f"the other: {error.strerror}; remove it, or give each worker its kv_memory_bytes"
        ) from error


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _nothing() -> None:
    """Nobody is told twice."""
