"""Triton's cache of compiled kernels, in which each use of an entry shows, so that a worker can
hand the entries that it uses to another one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager, triton_key
from weft.contract.start_work import COMPILING, START_WORK


class UsedKernels(FileCacheManager):  # type: ignore[misc]
    """Triton's own cache. The time of a folder is that of its entry's last use."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        found: dict[str, str] | None = super().get_group(filename)
        self._touch()
        return found

    def get_file(self, filename: str) -> str | None:
        found: str | None = super().get_file(filename)
        self._touch()
        return found

    def _touch(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.cache_dir)


def time_compiling() -> None:
    """Lets `START_WORK` know how long Triton takes to compile kernels or to find them compiled."""

    def note(*, times: Any, **_: object) -> None:
        START_WORK.add(COMPILING, times.total / 1e6)

    knobs.compilation.listener = note


def begin_naming() -> threading.Thread:
    """Begins to compute Triton's own part of the names in its cache, for which it reads its library
    of some 400 MB. Otherwise the first kernel does so, also one that was compiled before. Returns
    the thread.
    """
    thread = threading.Thread(target=triton_key, name="triton-key", daemon=True)
    thread.start()
    return thread
