"""Points in a device's queue of work, for modules that pass them on without torch."""

from __future__ import annotations

from typing import Any, Protocol


class WorkMark(Protocol):
    """A point in a device's queue of work (`weft.engine.base.device_copies.Mark`)."""

    def wait(self) -> None:
        """Blocks until the device has reached the mark."""
        ...

    def hold(self, stream: Any) -> None:
        """Makes later work of a stream wait for the mark; without a stream, blocks the caller."""
        ...
