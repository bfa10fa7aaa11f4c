"""Folders in the cache that are made of a model's files by the first process that needs them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

_LOCK_TIMEOUT_S = 120.0
"""Many times what a conversion takes, seconds."""


def make_once(target: Path, is_made: Callable[[], bool], write: Callable[[Path], None]) -> None:
    """Makes a folder unless it is there; of several processes that ask, one makes it.

    Args:
        target: The folder. It is there as a whole or not at all.
        is_made: Whether the folder is there and good.
        write: Writes the folder's files into an empty one.

    Raises:
        OSError: Something cannot be read or written, or another process has held the lock for two
            minutes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # The services of a mesh ask at the same moment.
        with FileLock(target.parent / ".lock", timeout=_LOCK_TIMEOUT_S):
            if not is_made():
                _replace(target, write)
    except Timeout as error:
        raise OSError(f"another process has held {error.lock_file} for too long") from error


def _replace(target: Path, write: Callable[[Path], None]) -> None:
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tmp-"))
    try:
        write(folder)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
