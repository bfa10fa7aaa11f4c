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
"""Longest wait at a time: where the host is busy all the time, work goes on at a fifth of its
speed.
"""


class HostTurn:
    """Whether the engine's thread computes; each call of it takes a microsecond."""

    def __init__(self) -> None:
        self._rests = threading.Event()
        self._rests.set()

    def begin(self) -> None:
        """The engine's thread goes on computing."""
        self._rests.clear()

    def end(self) -> None:
        """It waits, for the device or for work."""
        self._rests.set()

    def enter_thread(self) -> None:
        """From now on `give_way` in this thread waits for this one's engine."""
        _guest.set(_Guest(self))

    def wait(self) -> None:
        """Waits while the engine's thread computes, for a limited time."""
        self._rests.wait(MAX_WAIT_S)


class _Guest:
    """A thread that gives way."""

    def __init__(self, host: HostTurn) -> None:
        self._host = host
        self._until = 0.0

    def give_way(self) -> None:
        if time.perf_counter() >= self._until:
            self._host.wait()
            self._until = time.perf_counter() + SLICE_S


_guest: ContextVar[_Guest | None] = ContextVar("guest", default=None)


def give_way() -> None:
    """Between small pieces of long work: waits if it is time to, in threads that do so."""
    guest = _guest.get()
    if guest is not None:
        guest.give_way()
