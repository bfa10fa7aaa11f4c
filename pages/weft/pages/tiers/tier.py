"""A tier: pages by key in one medium, with the same match, load, save and evict for all media.

Only the owner's thread uses the bookkeeping of a tier; any thread may move bytes:

    owner                                   any thread
    load = tier.load(key)   (pinned)  -->   load.run(into)
    load.end()              (unpinned) <--
    save = tier.save(name)  (reserved) -->  save.run(content)
    save.end()              (published) <--
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from weft.contract.errors import InjectedFault
from weft.contract.layout import PagePart
from weft.contract.pages import Page
from weft.pages.memory.page_memory import PageCounts
from weft.pages.tiers.keyed import KeyedPages, PageName, PagePlace
from weft.pages.transfer.digest import digest_pages

logger = logging.getLogger(__name__)

Outcome = Literal["", "done", "corrupt", "failed"]
"""Result of a load or save; empty: it has not run."""


class Medium(Protocol):
    """Storage of a tier. Any thread may call it. No two calls use one place at the same time."""

    def read(self, place: PagePlace, into: Page) -> bool:
        """Copies a page; False: the page is missing or incomplete.

        Raises:
            OSError: The page cannot be read.
        """
        ...

    def read_part(self, place: PagePlace, into: Page, part: PagePart) -> bool:
        """As `read`, but copies only a part of the page, to the same part of `into`."""
        ...

    def write(self, place: PagePlace, content: Page) -> None:
        """Stores a page.

        Raises:
            OSError: The page cannot be written; the medium keeps no part of it.
        """
        ...

    def remove(self, place: PagePlace) -> None: ...

    def direct(self, place: PagePlace, *, is_read: bool) -> Page | None:
        """The page's bytes in memory that the pool's device can copy from and to directly; None:
        the medium has no such memory.
        """
        ...


@dataclass(slots=True)
class TierCounters:
    queried_pages: int = 0
    """Pages that requests looked up here."""
    hit_pages: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    load_us: int = 0
    saved_pages: int = 0
    saved_bytes: int = 0
    save_us: int = 0
    evicted_pages: int = 0
    dropped_pages: int = 0
    """Pages not taken, or lost on the way to the next tier, for lack of room or time."""
    corrupt_pages: int = 0
    """Pages whose digest at loading differed from that at saving."""
    failed_loads: int = 0
    failed_saves: int = 0
    """Pages that could not be written, such as on a full disk."""
    stalls: int = 0
    """Number of times that the tier stalled. A stalled tier is not used until it continues."""


class PageLoad:
    """A pinned page that is copied out of a tier."""

    __slots__ = ("_tier", "outcome", "place")

    def __init__(self, tier: Tier, place: PagePlace) -> None:
        self._tier = tier
        self.place = place
        self.outcome: Outcome = ""

    def run(self, into: Page) -> bool:
        """Copies the page and checks it, in any thread. False: `into` does not hold the page."""
        try:
            is_whole = self._tier.medium.read(self.place, into)
        except (OSError, InjectedFault) as error:
            logger.warning("%s: a page cannot be read: %s", self._tier.name, error)
            self.outcome = "failed"
            return False
        is_right = is_whole and digest_of(into) == self.place.digest
        self.outcome = "done" if is_right else "corrupt"
        return is_right

    def run_part(self, into: Page, part: PagePart) -> bool:
        """Copies a part of the page, in any thread, and checks nothing: once all parts are there,
        the caller must call `arrived`. False: the page cannot be read.
        """
        try:
            is_there = self._tier.medium.read_part(self.place, into, part)
        except (OSError, InjectedFault) as error:
            logger.warning("%s: a page cannot be read: %s", self._tier.name, error)
            self.outcome = "failed"
            return False
        if not is_there:
            self.outcome = "corrupt"
        return is_there

    def direct(self) -> Page | None:
        """The page's memory, from which the device copies; the caller must then call `arrived`. Any
        thread may call it. None: the caller must use `run`.
        """
        return self._tier.medium.direct(self.place, is_read=True)

    def arrived(self, digest: int) -> bool:
        """Reports, instead of `run` and in any thread, that the page was copied and the copy has
        this digest. False: the digest is not that of the page.
        """
        is_right = digest == self.place.digest
        self.outcome = "done" if is_right else "corrupt"
        return is_right

    def end(self) -> None:
        """Unpins the page and removes it if it is corrupt. Called once, on the owner's thread."""
        self._tier.ended(self)


class PageSave:
    """A page that is copied into a tier."""

    __slots__ = ("_tier", "gone", "name", "outcome", "place", "priority")

    def __init__(
        self, tier: Tier, name: PageName, slot: int, priority: int, gone: list[PagePlace]
    ) -> None:
        self._tier = tier
        self.name = name
        self.place = PagePlace(slot, name, 0)
        self.priority = priority
        self.gone = gone
        """Evicted pages whose bytes have still to be removed."""
        self.outcome: Outcome = ""

    def run(self, content: Page, digest: int | None = None) -> bool:
        """Stores the page; in any thread. False: it could not be written. `content` must not change
        before `end`; `digest` is its digest, if known.
        """
        medium = self._tier.medium
        self.place = self.place._replace(digest=digest_of(content) if digest is None else digest)
        try:
            self._remove_gone()
            medium.write(self.place, content)
        except (OSError, InjectedFault) as error:
            self._tier.write_failed(error)
            self.outcome = "failed"
            return False
        self.outcome = "done"
        return True

    def direct(self) -> Page | None:
        """The page's destination, to which the device copies; the caller must then call `arrived`.
        Any thread may call it. None: the caller must use `run`.
        """
        return self._tier.medium.direct(self.place, is_read=False)

    def arrived(self, digest: int) -> None:
        """Reports, instead of `run` and in any thread, that the bytes are in their place."""
        self.place = self.place._replace(digest=digest)
        self.outcome = "done"

    def end(self) -> None:
        """Publishes the page if it was written. Called once, on the owner's thread."""
        if not self.outcome and self.gone:
            self._tier.remove(self.gone)
        self._tier.saved(self)

    def _remove_gone(self) -> None:
        while self.gone:
            self._tier.medium.remove(self.gone.pop())


class Tier:
    """Pages by key in one medium. Used by one thread, except for loads and saves. `name` is `host`
    or `disk`.
    """

    def __init__(self, name: str, pages: KeyedPages, medium: Medium, page_bytes: int) -> None:
        self.name = name
        self.pages = pages
        self.medium = medium
        self.page_bytes = page_bytes
        self.counters = TierCounters()
        self.on_evicted: Callable[[PagePlace], None] | None = None
        """Called with each page that was evicted to make room."""
        self.remove: Callable[[Sequence[PagePlace]], None] = self.remove_now
        """Removes the bytes of dropped pages. For slow media, owners set a function that does it in
        a thread, in the order of saves.
        """
        self._gone: list[PagePlace] = []
        self._is_writing_well = True
        pages.on_evicted = self._evicted

    # -- the interface ---------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys that are held. Changes nothing."""
        return self.pages.match(keys)

    def load(self, key: bytes) -> PageLoad | None:
        """Pins a page for reading; None: it is not held. The caller must call the load's `end`."""
        place = self.pages.pin(key)
        return None if place is None else PageLoad(self, place)

    def save(self, name: PageName, priority: int = 0) -> PageSave | None:
        """Makes room for a page; None: it is held or on its way, or every slot is in use. The
        caller must call `end` of the returned save.
        """
        slot = self.pages.reserve(name.key)
        if slot is None:
            return None
        gone, self._gone = self._gone, []
        return PageSave(self, name, slot, priority, gone)

    def evict(self) -> PagePlace | None:
        """Evicts the least valuable page; None: there is none. The slot stays taken and keeps the
        page's bytes until `free`.
        """
        place = self.pages.reclaim()
        if place is not None:
            self.counters.evicted_pages += 1
        return place

    # -- the rest --------------------------------------------------------------------------------

    def free(self, place: PagePlace) -> None:
        """Completes `evict`. Media that need it call `remove` first."""
        self.pages.free(place.slot)

    def evict_of(self, group: bytes) -> bool:
        """Evicts the least valuable page of a group at once; False: there is none."""
        place = self.pages.evict_of(group)
        if place is None:
            return False
        self._evicted(place)
        return True

    def drop(self, key: bytes) -> None:
        """Drops a page that cannot be trusted."""
        place = self.pages.drop(key)
        if place is not None:
            self.remove([place])

    def remove_now(self, places: Sequence[PagePlace]) -> None:
        for place in places:
            self.medium.remove(place)

    def remove_with_next_save(self, places: Sequence[PagePlace]) -> None:
        """Defers the removal of bytes to the next save."""
        self._gone += places

    def flush(self) -> list[PagePlace]:
        """Drops every page that is not being read. Their bytes are still to be removed."""
        return self.pages.flush()

    def counts(self) -> PageCounts:
        """Slots by state; `used` are pinned."""
        return self.pages.counts()

    # -- called by loads and saves ---------------------------------------------------------------

    def ended(self, load: PageLoad) -> None:
        counters = self.counters
        if load.outcome == "done":
            counters.loaded_pages += 1
            counters.loaded_bytes += self.page_bytes
        elif load.outcome == "corrupt":
            counters.corrupt_pages += 1
            logger.error(
                "%s: page %s differs from what was saved and is dropped",
                self.name,
                load.place.name.key.hex(),
            )
        elif load.outcome == "failed":
            counters.failed_loads += 1
        if load.outcome in ("corrupt", "failed"):
            self.drop(load.place.name.key)
        self.pages.unpin(load.place)

    def saved(self, save: PageSave) -> None:
        if save.outcome == "done":
            self.counters.saved_pages += 1
            self.counters.saved_bytes += self.page_bytes
            self.pages.publish(save.place, save.priority)
            self._is_writing_well = True
            return
        if save.outcome == "failed":
            self.counters.failed_saves += 1
        self.pages.abandon(save.name.key, save.place.slot)

    def write_failed(self, error: Exception) -> None:
        """Logs a failed write, once until a write succeeds again. Any thread may call it."""
        if self._is_writing_well:
            logger.warning("%s: pages cannot be saved: %s", self.name, error)
        self._is_writing_well = False

    def _evicted(self, place: PagePlace) -> None:
        self.counters.evicted_pages += 1
        self._gone.append(place)
        if self.on_evicted is not None:
            self.on_evicted(place)


def digest_of(content: Page) -> int:
    return int(digest_pages(content.reshape(1, -1), [0])[0])
