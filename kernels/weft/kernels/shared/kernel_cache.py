"""Triton's cache of compiled kernels, in which each use of an entry shows, so that a worker can
hand the entries that it uses to another one.
"""

from __future__ import annotations

import contextlib
import os

from triton.runtime.cache import FileCacheManager

MANAGER = "TRITON_CACHE_MANAGER"
"""The environment variable by which Triton finds its cache's class."""


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
