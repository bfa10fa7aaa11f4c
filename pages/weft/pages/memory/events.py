"""Changes of the prefix cache, published to routers that choose workers by cached prefixes.

Two callbacks collect changes during a step, and `take` returns them with numbers. A page that was
stored and removed again within one batch is left out. So stored and removed pages are disjoint, and
their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.contract.keys import short_key
from weft.contract.kv_changes import MAX_CHANGE_PAGES, KvChange, KvRun

MAX_RUN_TOKENS = 256


def runs_of(pages: Iterable[tuple[int, int]], max_pages: int) -> list[KvRun]:
    """Joins (key, parent) pairs into runs of at most `max_pages` where one is the parent of the
    next.
    """
    runs: list[KvRun] = []
    keys: list[int] = []
    last = -1
    for key, parent in pages:
        if parent != last or len(keys) == max_pages:
            keys = [key]
            runs.append(KvRun(parent=parent, keys=keys))
        else:
            keys.append(key)
        last = key
    return runs


class KvEvents:
    """Collects changes of one prefix cache, on the engine's thread."""

    def __init__(self, page_size: int) -> None:
        self._run_pages = max(1, MAX_RUN_TOKENS // page_size)
        self._stored: dict[bytes, bytes] = {}
        self._removed: dict[bytes, None] = {}
        self._sequence = 0

    def stored(self, key: bytes, parent: bytes) -> None:
        """Records that a page was indexed; `parent` is the key of the page before it."""
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = parent

    def removed(self, key: bytes) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def take(self) -> list[KvChange]:
        """The changes since the last call: usually one or none."""
        if not self._stored and not self._removed:
            return []
        stored = [(short_key(key), short_key(parent)) for key, parent in self._stored.items()]
        removed = [short_key(key) for key in self._removed]
        self._stored.clear()
        self._removed.clear()
        changes = []
        for start in range(0, max(len(stored), len(removed)), MAX_CHANGE_PAGES // 2):
            end = start + MAX_CHANGE_PAGES // 2
            self._sequence += 1
            changes.append(
                KvChange(
                    sequence=self._sequence,
                    stored=runs_of(stored[start:end], self._run_pages),
                    removed=removed[start:end],
                )
            )
        return changes
