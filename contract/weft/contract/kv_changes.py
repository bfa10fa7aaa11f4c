"""Changes of a prefix cache, as routers and services receive them."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.wire import wire

MAX_CHANGE_PAGES = 16_384
"""Most pages in one change: some 128 KiB on the wire."""


@dataclass(slots=True, kw_only=True)
class KvRun:
    """Consecutive pages of a prompt."""

    parent: int = field(metadata=wire(name="parent_key"))
    """Short key of the page before the first one; 0 at the beginning of a prompt."""
    keys: list[int] = field(metadata=wire(name="page_keys"))
    """Short keys (`weft.contract.keys.short_key`)."""


@dataclass(slots=True, kw_only=True)
class KvChange:
    """The changes since the previous event."""

    sequence: int
    """Sequence number, from 1 without gaps over the life of an engine."""
    stored: list[KvRun]
    removed: list[int] = field(metadata=wire(name="removed_keys"))
    """Short keys of the removed pages."""

    @property
    def num_pages(self) -> int:
        return len(self.removed) + sum(len(run.keys) for run in self.stored)
