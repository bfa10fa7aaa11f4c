"""One tier: pages by key in one medium. Match, load, save, evict are the same for all of them.

What is known of a tier belongs to one thread, its owner's; bytes move in others:

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

import numpy as np
from numpy.typing import NDArray
from weft.engine.errors import InjectedFault
from weft.engine.memory.kv_memory import PageCounts
from weft.engine.tiers.keyed import KeyedPages, PageName, Place
from weft.engine.transfer.digest import digest_pages

logger = logging.getLogger(__name__)

Page = NDArray[np.uint8]
"""uint8 `[page_bytes]`, contiguous."""
Outcome = Literal["", "done", "corrupt", "failed"]
"""Of a load or save; empty: it was not run."""


class Medium(Protocol):
    """Where a tier's bytes lie. Called from any thread; one place is never written and read at
    once."""

    def read(self, place: Place, into: Page) -> bool:
        """Copies a page; False: it is not there in whole.

        Raises:
            OSError: It cannot be read.
        """
        ...

    def write(self, place: Place, content: Page) -> None:
        """Keeps a page.

        Raises:
            OSError: It cannot be written; nothing of it is left.
        """
        ...

    def remove(self, place: Place) -> None:
        """Forgets a page, if it is there."""
        ...

    def direct(self, place: Place, *, is_read: bool) -> Page | None:
        """Where a page's bytes lie, if the pool's device copies from and to there by itself."""
        ...


@dataclass(slots=True)
class TierCounters:
    """Since start."""

    queried_pages: int = 0
    """That requests lacked and looked for here."""
    hit_pages: int = 0
    """Of these, found."""
    loaded_pages: int = 0
    loaded_bytes: int = 0
    load_us: int = 0
    """Time that loads took, in microseconds."""
    saved_pages: int = 0
    saved_bytes: int = 0
    save_us: int = 0
    """Time that saves took, in microseconds."""
    evicted_pages: int = 0
    """Given up for others."""
    dropped_pages: int = 0
    """Not taken, or lost on their way to the next tier: no room, or too much to do."""
    corrupt_pages: int = 0
    """Loaded with another digest than they were saved with."""
    failed_loads: int = 0
    """Pages that could not be read."""
    failed_saves: int = 0
    """Pages that could not be written (a full disk)."""
    stalls: int = 0
    """Times that it stood still for too long, and was left alone until it went on."""


class PageLoad:
    """One pinned page on its way out of a tier."""

    __slots__ = ("_tier", "outcome", "place")

    def __init__(self, tier: Tier, place: Place) -> None:
        self._tier = tier
        self.place = place
        self.outcome: Outcome = ""

    def run(self, into: Page) -> bool:
        """In any thread: copies the page and checks it; False: `into` does not hold it."""
        try:
            is_whole = self._tier.medium.read(self.place, into)
        except (OSError, InjectedFault) as error:
            logger.warning("%s: a page cannot be read: %s", self._tier.name, error)
            self.outcome = "failed"
            return False
        is_right = is_whole and digest_of(into) == self.place.digest
        self.outcome = "done" if is_right else "corrupt"
        return is_right

    def direct(self) -> Page | None:
        """In any thread: the page itself, for the device to copy; `arrived` follows. None: `run`
        copies it."""
        return self._tier.medium.direct(self.place, is_read=True)

    def arrived(self, digest: int) -> bool:
        """In any thread, instead of `run`: the page was copied, and this is the copy's digest.

        Returns:
            False: it is not the page.
        """
        is_right = digest == self.place.digest
        self.outcome = "done" if is_right else "corrupt"
        return is_right

    def end(self) -> None:
        """On the owner's thread, once: the page may go again; a bad one is gone."""
        self._tier.ended(self)


class PageSave:
    """One page on its way into a tier."""

    __slots__ = ("_tier", "gone", "name", "outcome", "place", "priority")

    def __init__(
        self, tier: Tier, name: PageName, slot: int, priority: int, gone: list[Place]
    ) -> None:
        self._tier = tier
        self.name = name
        self.place = Place(slot, name, 0)
        self.priority = priority
        self.gone = gone
        """Pages that made room: their bytes are still to be removed."""
        self.outcome: Outcome = ""

    def run(self, content: Page, digest: int | None = None) -> bool:
        """In any thread: keeps the page; False: it could not be written.

        Args:
            content: Stays as it is until `end`.
            digest: Of the content, if it is known.
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
        """In any thread: where the page is to lie, for the device to copy there; `arrived` follows.
        None: `run` copies it."""
        return self._tier.medium.direct(self.place, is_read=False)

    def arrived(self, digest: int) -> None:
        """In any thread, instead of `run`: the page's bytes lie in its place already."""
        self.place = self.place._replace(digest=digest)
        self.outcome = "done"

    def end(self) -> None:
        """On the owner's thread, once: the page is held from now on, if it was written."""
        if not self.outcome and self.gone:
            self._tier.remove(self.gone)
        self._tier.saved(self)

    def _remove_gone(self) -> None:
        while self.gone:
            self._tier.medium.remove(self.gone.pop())


class Tier:
    """Pages by key in one medium. Belongs to one thread, but for what loads and saves do.

    Args:
        name: `host` or `disk`.
        pages: Its slots.
        medium: Where the bytes lie.
        page_bytes: Of a page.
    """

    def __init__(self, name: str, pages: KeyedPages, medium: Medium, page_bytes: int) -> None:
        self.name = name
        self.pages = pages
        self.medium = medium
        self.page_bytes = page_bytes
        self.counters = TierCounters()
        self.on_evicted: Callable[[Place], None] | None = None
        """Told of each page that was given up to make room for another one."""
        self.remove: Callable[[Sequence[Place]], None] = self.remove_now
        """Removes bytes of pages that are forgotten; owners whose medium may take its time set what
        does it in a thread, in the order of saves."""
        self._gone: list[Place] = []
        self._is_writing_well = True
        pages.on_evicted = self._evicted

    # -- the interface ---------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are held; changes nothing."""
        return self.pages.match(keys)

    def load(self, key: bytes) -> PageLoad | None:
        """Pins a page that is to be read; None: it is not held. Its `end` must follow."""
        place = self.pages.pin(key)
        return None if place is None else PageLoad(self, place)

    def save(self, name: PageName, priority: int = 0) -> PageSave | None:
        """Makes room for a page; None: it is here or on its way, or everything is in use.

        Its `end` must follow.
        """
        slot = self.pages.reserve(name.key)
        if slot is None:
            return None
        gone, self._gone = self._gone, []
        return PageSave(self, name, slot, priority, gone)

    def evict(self) -> Place | None:
        """Gives up the least valuable page; None: there is none.

        Its slot stays taken, and its bytes there, until `free`.
        """
        place = self.pages.reclaim()
        if place is not None:
            self.counters.evicted_pages += 1
        return place

    # -- the rest --------------------------------------------------------------------------------

    def free(self, place: Place) -> None:
        """Ends what `evict` began; in a medium that has to be told, `remove` comes first."""
        self.pages.free(place.slot)

    def evict_of(self, group: bytes) -> bool:
        """Gives up the least valuable page of a group, at once; False: there is none."""
        place = self.pages.evict_of(group)
        if place is None:
            return False
        self._evicted(place)
        return True

    def drop(self, key: bytes) -> None:
        """Forgets a page that is not to be trusted."""
        place = self.pages.drop(key)
        if place is not None:
            self.remove([place])

    def remove_now(self, places: Sequence[Place]) -> None:
        """Removes bytes of pages that are forgotten."""
        for place in places:
            self.medium.remove(place)

    def remove_with_next_save(self, places: Sequence[Place]) -> None:
        """Leaves the removal of bytes to the next page that is saved."""
        self._gone += places

    def flush(self) -> list[Place]:
        """Forgets every page that nobody reads; their bytes are still to be removed."""
        return self.pages.flush()

    def counts(self) -> PageCounts:
        """Slots by state; `used` are pinned."""
        return self.pages.counts()

    # -- called by loads and saves ---------------------------------------------------------------

    def ended(self, load: PageLoad) -> None:
        """See `PageLoad.end`."""
        counters = self.counters
        if load.outcome == "done":
            counters.loaded_pages += 1
            counters.loaded_bytes += self.page_bytes
        elif load.outcome == "corrupt":
            counters.corrupt_pages += 1
            logger.error(
                "%s: page %s is not what was saved: it is dropped",
                self.name,
                load.place.name.key.hex(),
            )
        elif load.outcome == "failed":
            counters.failed_loads += 1
        if load.outcome in ("corrupt", "failed"):
            self.drop(load.place.name.key)
        self.pages.unpin(load.place)

    def saved(self, save: PageSave) -> None:
        """See `PageSave.end`."""
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
        """Says so once, until a write succeeds again. From any thread."""
        if self._is_writing_well:
            logger.warning("%s: pages cannot be saved: %s", self.name, error)
        self._is_writing_well = False

    def _evicted(self, place: Place) -> None:
        self.counters.evicted_pages += 1
        self._gone.append(place)
        if self.on_evicted is not None:
            self.on_evicted(place)


def digest_of(content: Page) -> int:
    """Digest of one page's bytes."""
    return int(digest_pages(content.reshape(1, -1), [0])[0])
