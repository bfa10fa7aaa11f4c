"""Locks between processes, by files."""

from __future__ import annotations

import fcntl
import time

_LOOK_EVERY_S = 0.01


def wait_for_lock(descriptor: int, timeout_s: float) -> None:
    """Takes the exclusive lock of an open file, which ends when the file is closed.

    Raises:
        TimeoutError: Another process has kept it for that long.
        OSError: The file system has no locks.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        time.sleep(_LOOK_EVERY_S)
