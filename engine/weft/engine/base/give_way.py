"""Threads of the engine's process give way to the thread that turns it.

Python runs one thread at a time. A step of a GPU engine calls torch some dozens of times, and each
call lets another thread have Python's lock, which then comes back late: one that reads an adapter
made single steps several milliseconds longer. So such a thread works in slices, between which it
waits while the engine's thread plans, launches and commits; it goes on while that one waits for the
device, which is most of the time. No torch.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

SLICE_S = 2e-4
"""Seconds between two times of giving way."""
MAX_WAIT_S = 1e-3
"""Longest wait at a time."""
PATIENCE, MAX_PATIENCE_S = 2.0, 0.05
"""Seconds of waiting that each second of work earns, and most that are kept for later: where the
host is busy all the time, work takes three times as long.
"""


class HostPriority:
    """Whether the engine's thread computes; each call of it takes a microsecond."""

    def __init__(self) -> None:
        self._rests = threading.Event()
        self._rests.set()

    def begin(self) -> None:
        """The engine's thread continues to compute."""
        self._rests.clear()

    def end(self) -> None:
        """It waits, for the device or for work."""
        self._rests.set()

    def enter_thread(self) -> None:
        """From now on `give_way` in this thread waits for this one's engine."""
        _guest.set(_Guest(self))

    def wait(self, most_s: float) -> None:
        """Waits while the engine's thread computes, for a limited time."""
        self._rests.wait(most_s)


class _Guest:
    """A thread that gives way."""

    def __init__(self, host: HostPriority) -> None:
        self._host = host
        self._began_at = 0.0
        """When its slice began."""
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
    """Between small pieces of long work: waits if it is time to, in threads that do so."""
    guest = _guest.get()
    if guest is not None:
        guest.give_way()
