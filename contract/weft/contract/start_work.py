"""Seconds of a process's start by kinds of work that its phases have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

READING, DIGESTS, COMPILING = "reading files", "digests of files", "compiling kernels"
LAYING_OUT = "laying out tensors for a worker's weights"
CONNECTING = "opening a worker's memory"
COPYING = "copying a worker's weights"
CHECKING = "digests of a worker's weights"


class StartWork:
    """Adds up seconds. Any thread may call it.

    Attributes:
        observe: Called in the thread of each work with its kind, and whether it begins or ends.
    """

    def __init__(self) -> None:
        self.observe: Callable[[str, bool], None] = lambda work, begins: None
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def time(self, work: str) -> Iterator[None]:
        began = time.monotonic()
        self.observe(work, True)
        try:
            yield
        finally:
            self.observe(work, False)
            self.add(work, time.monotonic() - began)

    def add(self, work: str, seconds: float) -> None:
        with self._lock:
            self._seconds[work] = self._seconds.get(work, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


START_WORK = StartWork()
"""That of this process."""
