"""Detects changes of a small file without checking it for every request."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_EVERY_S = 1.0


class FileWatch:
    """Checks a file at most once a second. Without a path it never changes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = self._look()
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S

    def has_changed(self) -> bool:
        """Whether the file has changed since the last call."""
        now_s = time.monotonic()
        if self._path is None or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _LOOK_EVERY_S
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat() if self._path is not None else None
        except OSError:
            stat = None
        return (0, 0, 0) if stat is None else (stat.st_mtime_ns, stat.st_ino, stat.st_size)
