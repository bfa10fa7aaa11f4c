"""Log of changed keys, from which each watcher learns what has changed since it looked last."""

from __future__ import annotations

from collections.abc import Callable

MAX_GONE = 1_000
"""Most removed keys to remember for watchers that have not seen their removal."""


class ChangeLog:
    """Numbers changes; the cost of a query is proportional to the number of changes. `exists` says
    whether a key exists now.
    """

    def __init__(self, exists: Callable[[bytes], bool]) -> None:
        self._exists = exists
        self._changes: dict[bytes, int] = {}
        """The last change of each key, the oldest one first."""
        self._forgotten = 0
        """Sequence number up to which some removed keys have been forgotten."""
        self._most_gone = MAX_GONE
        self.sequence = 0
        """Sequence number of the last change."""

    def touch(self, key: bytes) -> None:
        """Records that something about a key has changed, was added or removed."""
        self.sequence += 1
        self._changes.pop(key, None)
        self._changes[key] = self.sequence
        if len(self._changes) > 2 * self._most_gone:
            self._forget()

    def since(self, sequence: int) -> list[bytes] | None:
        """Keys changed after a sequence number, newest first; None: it is too long ago, so any key
        may have changed.
        """
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
        forgotten = gone[: max(0, len(gone) - MAX_GONE)]
        for key in forgotten:
            self._forgotten = self._changes.pop(key)
        # The log is cleaned again only once it has grown by as much.
        self._most_gone = max(MAX_GONE, len(self._changes))
