"""A named lock among the processes of one machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from weft.contract.errors import ConfigError

_POLL_S = 0.1
_ANY_USER = 0o666


@contextmanager
def machine_lock(name: str, timeout_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock of this name while a block runs. One process of the machine holds it at a time.

    A process that ends, even by a signal, releases the lock.

    Args:
        name: Part of a file's name.
        on_wait: Called once if another process holds the lock.

    Raises:
        ConfigError: The lock was not free within `timeout_s`, or its file cannot be opened.
    """
    path = Path(tempfile.gettempdir()) / f"weft-{name}.lock"
    lock = FileLock(path, mode=_ANY_USER)
    try:
        _acquire(lock, timeout_s, on_wait)
    except Timeout as error:
        raise ConfigError(
            f"other processes have held {path} for {timeout_s:.0f} s: workers start one after the "
            "other on a GPU whose free memory they divide; end the one that hangs, or give each "
            "its kv_memory_bytes"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot open {path}, by which workers that divide a GPU's free memory start one after "
            f"the other: {error.strerror}; remove it, or give each worker its kv_memory_bytes"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, timeout_s: float, on_wait: Callable[[], None]) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
