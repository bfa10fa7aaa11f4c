"""Saves: pages on their way from the pool to host memory, and from there to disk. Removals of pages
that a tier has dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.contract.pages import Page
from weft.pages.tiers.keyed import PageName, PagePlace
from weft.pages.tiers.tier import PageSave, Tier, digest_of
from weft.pages.transfer.page_pool import PagePool


@dataclass(eq=False, slots=True)
class HostSave:
    """Implements `BackgroundJob`: copies a page of the pool to host memory."""

    save: PageSave
    pool: PagePool
    page: int
    """The save holds a reference to the page until `end`."""
    tier: Tier
    ended: Callable[[HostSave], None]
    duration_s: float = 0.0

    def run(self) -> None:
        started_at = time.monotonic()
        row = self.save.direct()
        if row is None:
            self.save.run(self.pool.read(self.page))
        else:
            self.save.arrived(self.pool.copy_out(self.page, row))
        self.duration_s = time.monotonic() - started_at

    def end(self) -> None:
        self.tier.counters.save_us += int(self.duration_s * 1e6)
        self.save.end()
        self.ended(self)


@dataclass(eq=False, slots=True)
class DigestSave:
    """Implements `BackgroundJob`: digests a page that was copied to host memory within a step."""

    save: PageSave
    row: Page
    ended: Callable[[PageName], None]

    def run(self) -> None:
        self.save.arrived(digest_of(self.row))

    def end(self) -> None:
        self.save.end()
        self.ended(self.save.name)


@dataclass(eq=False, slots=True)
class DiskSave:
    """Implements `BackgroundJob`: copies a page of host memory to disk."""

    save: PageSave
    row: Page
    place: PagePlace
    """Place in host memory, reserved until `end`."""
    was_given_up: bool
    """Whether host memory has evicted the page. Otherwise the page is pinned there."""
    disk: Tier
    ended: Callable[[DiskSave], None]
    duration_s: float = 0.0

    def run(self) -> None:
        started_at = time.monotonic()
        self.save.run(self.row, self.place.digest)
        self.duration_s = time.monotonic() - started_at

    def end(self) -> None:
        self.disk.counters.save_us += int(self.duration_s * 1e6)
        self.save.end()
        self.ended(self)


class Removal:
    """Implements `BackgroundJob`: deletes pages."""

    def __init__(self, tier: Tier, places: Iterable[PagePlace]) -> None:
        self._tier = tier
        self._places = list(places)

    def run(self) -> None:
        while self._places:
            self._tier.medium.remove(self._places.pop())

    def end(self) -> None:
        self._tier.remove_with_next_save(self._places)
