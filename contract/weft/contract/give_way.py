"""Background threads of the engine's process give way to the engine thread.

Python runs one thread at a time. A step of a GPU engine calls torch some dozens of times, and each
call may hand Python's lock (the GIL) to another thread, which returns it late: a thread that reads
a large file makes single steps several milliseconds longer. Therefore background threads work in
slices. Between slices a background thread waits while the engine thread plans, launches and
commits; it works while the engine thread waits for the device, which is most of the time. No torch.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

SLICE_S = 2e-4
"""Seconds that a background thread works before it gives way."""
MAX_WAIT_S = 1e-3
"""Longest single wait of a background thread, seconds."""
PATIENCE, MAX_PATIENCE_S = 2.0, 0.05
"""Seconds that a background thread may wait for each second that it works, and the most waiting
time that it can save up. If the host is always busy, background work takes three times as long.
"""


class HostPriority:
    """Tells background threads whether the engine thread computes; a call takes a microsecond."""

    def __init__(self) -> None:
        self._rests = threading.Event()
        self._rests.set()

    def take_cores(self) -> None:
        """The engine thread continues to compute."""
        self._rests.clear()

    def yield_cores(self) -> None:
        """The engine thread begins to wait, for the device or for work."""
        self._rests.set()

    def enter_thread(self) -> None:
        """Makes `give_way`, if called in the current thread, wait for this engine thread."""
        _guest.set(_Guest(self))

    def wait(self, most_s: float) -> None:
        """Waits while the engine thread computes, at most this many seconds."""
        self._rests.wait(most_s)


class _Guest:
    def __init__(self, host: HostPriority) -> None:
        self._host = host
        self._began_at = 0.0
        """When the thread's current slice of work began."""
        self._patience_s = MAX_PATIENCE_S

    def give_way(self) -> None:
        now = time.perf_counter()
        worked_s = now - self._began_at
        if worked_s < SLICE_S:
            return
        patience_s = min(MAX_PATIENCE_S, self._patience_s + PATIENCE * worked_s)
        self._host.wait(min(MAX_WAIT_S, patience_s))
        self._began_at = time.perf_counter()
        self._patience_s = max(0.0, patience_s - (self._began_at - now))


_guest: ContextVar[_Guest | None] = ContextVar("guest", default=None)


def give_way() -> None:
    """Lets the engine thread go first; long work calls this between small pieces.

    It waits only in threads that called `HostPriority.enter_thread`, and only if their slice is
    over.
    """
    guest = _guest.get()
    if guest is not None:
        guest.give_way()
