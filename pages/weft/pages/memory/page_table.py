"""The page table of the requests that have a slot, as every step reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from weft.contract.arrays import Int32Array, Int64Array
from weft.pages.memory.page_memory import NULL_PAGE


class PageChanges(NamedTuple):
    """Entries of the page table that have changed."""

    indices: Int64Array
    """Indices into the flattened table."""
    pages: Int32Array


_NO_CHANGES = PageChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


class PageTable:
    """Page numbers by slot. The row after the last slot has only the null page. With
    `keeps_changes`, changed entries are remembered for `take_changes`, which the caller must then
    call.
    """

    def __init__(self, max_requests: int, max_pages: int, *, keeps_changes: bool) -> None:
        self.pages: Int32Array = np.full((max_requests + 1, max_pages), NULL_PAGE, np.int32)
        """[max_requests + 1, max_pages]; entries beyond a request's pages are stale."""
        self.null_row = max_requests
        self.num_pages = np.zeros(max_requests, np.int64)
        """[max_requests]: number of valid entries of each slot's row."""
        self.num_sent = np.zeros(max_requests, np.int64)
        """[max_requests]: number of entries of each row that a copy of the table has, for whoever
        keeps the copy up to date.
        """
        self.num_additions = 0
        """Counts additions of entries to rows, by which a reader learns that there are new ones."""
        self._changed: list[tuple[int, int, int]] | None = [] if keeps_changes else None

    def clear(self, slot: int) -> None:
        self.num_pages[slot] = self.num_sent[slot] = 0

    def is_short(self, slots: Int64Array, indices: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each slot's row lacks the page of this index."""
        return self.num_pages[slots] <= indices

    def ends_at(self, slots: Int64Array, indices: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether this index is the one after the last page of each slot's row."""
        ends: npt.NDArray[np.bool_] = self.num_pages[slots] == indices
        return ends

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Sets the slot's row to `pages`, of which the row already holds a prefix."""
        known, count = int(self.num_pages[slot]), len(pages)
        if known < count:
            self.pages[slot, known:count] = pages[known:]
            self.num_pages[slot] = count
            self.num_additions += 1
            if self._changed is not None:
                self._changed.append((slot, known, count))

    def put(self, slot: int, begin: int, pages: Sequence[int]) -> None:
        """Sets the slot's entries from `begin` on. Earlier entries may name freed pages."""
        self.pages[slot, begin : begin + len(pages)] = pages
        if self._changed is not None:
            self._changed.append((slot, begin, begin + len(pages)))

    def enter(self, slot: int, first: int, pages: Int64Array) -> None:
        """Sets entries of the slot's row from index `first` on, which is at most its length."""
        end = first + len(pages)
        self.pages[slot, first:end] = pages
        self.num_pages[slot] = end
        if self._changed is not None:
            self._changed.append((slot, first, end))

    def append(self, slots: Int64Array, indices: Int64Array, pages: Int64Array) -> None:
        """Appends one page to the row of each slot. A step of decodes sends these entries to the
        device itself, so `take_changes` omits them unless `note` names them.
        """
        self.pages[slots, indices] = pages
        self.num_pages[slots] = indices + 1
        self.num_additions += 1

    def note(self, slots: Int64Array, indices: Int64Array) -> None:
        """Makes `take_changes` return appended entries, for steps that do not send them."""
        if self._changed is not None:
            columns = zip(slots.tolist(), indices.tolist(), strict=True)
            self._changed += [(slot, index, index + 1) for slot, index in columns]

    def take_changes(self) -> PageChanges:
        """The entries set since the last call."""
        assert self._changed is not None
        if not self._changed:
            return _NO_CHANGES
        changed, self._changed = self._changed, []
        width = self.pages.shape[1]
        runs = [np.arange(slot * width + a, slot * width + b) for slot, a, b in changed]
        indices = np.concatenate(runs)
        return PageChanges(indices, self.pages.reshape(-1)[indices])
