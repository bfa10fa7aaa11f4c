"""Pages of requests in a window group, which are freed once the window has passed them.

In such a group a request has the pages of consecutive positions: those that the window of its
computed tokens still reaches, and those of tokens that are computed or about to be.

    0          num_computed - reach      num_computed    launched   planned
    |-- freed or never had --|-- window --|-- written by steps --|
                             ^ first                             ^ as many as in the first group

A page is freed only once the step has ended that computed the first position whose window begins
after the page. So no step under way or to come reads it.

Admission reserves the most pages that a request may have. So it never lacks a page here, and only
the first group's pages decide who is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from weft.contract.layout import PageGroup
from weft.contract.reports import LoadReport, WindowCounts
from weft.engine.base.config import EngineConfig
from weft.engine.requests.companions import (
    Companion,
    HeldPieces,
    Reserved,
    StepRows,
    StepStates,
)
from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import PageMemory, step_reserve
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.tree import Match, PrefixTree
from weft.pages.memory.window_index import WindowIndex


@dataclass(slots=True)
class _Held(HeldPieces):
    first: int = 0
    """Number of the request's pages before `pages`."""
    pages: list[int] = field(default_factory=list)
    num_entered: int = 0
    """Number of pages, counted from the request's first position, that are in the page table."""

    @property
    def pieces(self) -> list[int]:
        return self.pages

    @property
    def end(self) -> int:
        """Number of the request's pages up to the last of `pages`."""
        return self.first + len(self.pages)


class WindowCompanion(Companion):
    """Pages of a window group, which are freed once the window has passed them: a request
    continues where it has all that its window reaches.

    Args:
        memory: The owner of the group's pages.
        table: The group's page table.
        group: Says which positions a row needs.
        max_rows: Most rows of a running request in a step.
    """

    name = "window"
    allows_rerun = False
    needs_many = True
    _held: dict[Request, _Held]

    def __init__(
        self,
        memory: PageMemory,
        index: WindowIndex | None,
        table: PageTable,
        group: PageGroup,
        page_size: int,
        max_step_tokens: int,
        max_rows: int = 1,
    ) -> None:
        num_spare = memory.num_usable_pages - step_reserve(max_step_tokens, page_size)
        super().__init__(memory, index, page_size, num_spare)
        self._windows = index
        self._table = table
        self._group = group
        self._most = group.most_pages(page_size, max_rows)
        self._grown: list[Request] = []

    @classmethod
    def make(
        cls,
        declared: PageGroup,
        config: EngineConfig,
        num_pieces: int,
        prefixes: PrefixTree | None,
        tables: Iterator[PageTable],
    ) -> Self:
        index = None if prefixes is None else WindowIndex(prefixes, declared, config.page_size)
        return cls(
            PageMemory(num_pieces, index, tracks_freed=config.poison_free_pages),
            index,
            next(tables),
            declared,
            config.page_size,
            config.max_step_tokens,
            1 + config.most_drafts,
        )

    def report(self, load: LoadReport) -> None:
        own = self.memory.counts()
        load.window_pages[self._group.plane.name] = WindowCounts(
            free=own.free, cached=own.cached, used=own.used
        )

    # -- lookups ---------------------------------------------------------------------------------

    def take(self, request: Request, found: Match) -> None:
        path = found.path
        if self._windows is None or not path:
            return
        pages = self._windows.pages_before(path)
        self.memory.retain(pages)
        self._windows.note_found(pages)
        # A sample without full pages to share may have its reservation.
        held = self._hold_for(request)
        held.first, held.pages = len(path) - len(pages), pages

    def share(self, first: Request, request: Request, num_pages: int) -> bool:
        held, begin = self._held[first], self._first_read(num_pages * self._page_size)
        if held.first > begin or not self.reserve(request):
            return False
        own = self._held[request]
        own.first, own.pages = begin, held.pages[begin - held.first : num_pages - held.first]
        self.memory.retain(own.pages)
        return True

    def publish(self, request: Request, num_pages: int) -> None:
        """Adds the request's pages to the nodes of its path that lack one, and frees the pages that
        the window has passed.
        """
        held = self._held.get(request)
        if held is None:
            return
        node, index = request.held.leaf, num_pages - 1
        while self._index is not None and node is not None and index >= held.first:
            if index < held.end and not self._index.add(node, held.pages[index - held.first]):
                break
            node, index = node.parent, index - 1
        self._free_behind(held, request.num_computed)

    def last_pieces(self, request: Request, num_pages: int, count: int) -> list[int] | None:
        if not count:
            return []
        held = self._held[request]
        end = num_pages - held.first
        assert count <= end <= len(held.pages), "these pages are not there"
        return held.pages[end - count : end]

    def adopt(
        self, request: Request, num_pages: int, lent: Sequence[int] | None = None
    ) -> list[int]:
        held, end_token = self._held[request], num_pages * self._page_size
        self._free_behind(held, end_token)
        count = self.num_needed(held.end * self._page_size, end_token)
        if not held.pages:
            held.first = num_pages - count
        if lent is None:
            pages = self._allocate(request, count)
        else:
            assert len(lent) == count, "not the pages that the request lacks"
            pages = list(lent)
            self._reserve_more(-count)
        held.pages += pages
        self.publish(request, num_pages)
        return pages

    def first_needed(self, num_pages: int) -> int:
        return self._first_read(num_pages * self._page_size)

    def _free_behind(self, held: _Held, num_computed: int) -> None:
        num_behind = min(self._first_read(num_computed) - held.first, len(held.pages))
        if num_behind > 0:
            behind, held.pages = held.pages[:num_behind], held.pages[num_behind:]
            held.first += num_behind
            self.memory.release(behind)
            if self._windows is not None:
                self._windows.leave_behind(behind)

    def _first_read(self, position: int) -> int:
        return self._group.first_needed(position) // self._page_size

    # -- room ------------------------------------------------------------------------------------

    def _hold_for(self, request: Request) -> _Held:
        return self._held.setdefault(request, _Held())

    def _most_of(self, request: Request) -> Reserved:
        num_tokens = max(request.num_tokens, request.num_prompt_tokens + request.max_tokens)
        total = -(-num_tokens // self._page_size)
        return Reserved(min(total, self._most), total)

    # -- steps -----------------------------------------------------------------------------------

    def grow(self, request: Request) -> None:
        """Gives a request as many pages as it has in the first group."""
        held = self._held[request]
        if (num_lacking := len(request.held.pages) - held.end) > 0:
            held.pages += self._allocate(request, num_lacking)
            self._grown.append(request)

    def begin_step(self, rows: Callable[[], StepRows], made: StepStates) -> None:
        """Enters new pages into the page table."""
        grown, self._grown = self._grown, []
        for request in grown:
            held = self._held.get(request)
            if held is not None and request.slot >= 0:
                begin = max(held.first, held.num_entered)
                self._table.put(request.slot, begin, held.pages[begin - held.first :])
                held.num_entered = held.end
