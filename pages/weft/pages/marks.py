"""Points in a device's queue of work, for modules that pass them on without torch."""

from __future__ import annotations

from typing import Any, Protocol

MAX_WAITING = 8
"""Most copies to a device that may wait in its queue before the host has to wait for one to enqueue
another (`weft.engine.base.device_copies.PinnedBuffers`).
"""


class WorkMark(Protocol):
    """A point in a device's queue of work (`weft.engine.base.device_copies.Mark`)."""

    def wait(self) -> None:
        """Blocks until the device has reached the mark."""
        ...

    def hold(self, stream: Any) -> None:
        """Makes later work of a stream wait for the mark. Without a stream, blocks the caller."""
        ...
