"""Which of many things have changed since somebody looked last."""

from __future__ import annotations

from collections.abc import Callable

MOST_GONE = 1_000
"""Things that are no more, and are remembered for those who have not heard of it."""


class ChangeLog:
    """Numbers changes; asking costs as much as there has changed.

    Args:
        exists: Whether there is something of this key now.
    """

    def __init__(self, exists: Callable[[bytes], bool]) -> None:
        self._exists = exists
        self._changes: dict[bytes, int] = {}
        """The last change of each key, the oldest one first."""
        self._forgotten = 0
        """Up to this change some keys that are gone were forgotten."""
        self._most_gone = MOST_GONE
        self.sequence = 0
        """Of the last change."""

    def touch(self, key: bytes) -> None:
        """Something about it has changed; it may have come, or gone."""
        self.sequence += 1
        self._changes.pop(key, None)
        self._changes[key] = self.sequence
        if len(self._changes) > 2 * self._most_gone:
            self._forget()

    def since(self, sequence: int) -> list[bytes] | None:
        """Keys that have changed after a change, the newest one first; None: that is too long ago
        to tell, all may have."""
        if sequence < self._forgotten:
            return None
        found = []
        for key in reversed(self._changes):
            if self._changes[key] <= sequence:
                break
            found.append(key)
        return found

    def _forget(self) -> None:
        gone = [key for key in self._changes if not self._exists(key)]
        forgotten = gone[: max(0, len(gone) - MOST_GONE)]
        for key in forgotten:
            self._forgotten = self._changes.pop(key)
        # Looked through again only once it has grown by as much.
        self._most_gone = max(MOST_GONE, len(self._changes))
