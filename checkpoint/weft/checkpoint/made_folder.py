"""Folders in the cache that the first process that needs them makes from a model's files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

_LOCK_TIMEOUT_S = 120.0
"""Seconds, many times the duration of a conversion."""


def make_once(target: Path, is_made: Callable[[], bool], write: Callable[[Path], None]) -> None:
    """Makes a folder unless it exists; if several processes ask for it, one of them makes it. The
    folder exists as a whole or not at all. `is_made` says whether it exists and is good; `write`
    writes its files into an empty folder. Raises OSError if a file cannot be read or written, or
    another process has held the lock for two minutes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # The services of a mesh ask at the same time.
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
