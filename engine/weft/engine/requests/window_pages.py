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

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import PageMemory, step_reserve, window_reserve
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Match, Node
from weft.pages.memory.window_index import WindowIndex


class Reserved(NamedTuple):
    """Most pages that requests may have at once."""

    beside_prompts: int = 0
    """Pages for everything but the prompt tokens of two steps."""
    total: int = 0
    """Pages if none of them were freed."""

    def plus(self, other: Reserved, sign: int = 1) -> Reserved:
        """The sum, or with sign -1 the difference."""
        return Reserved(
            self.beside_prompts + sign * other.beside_prompts, self.total + sign * other.total
        )


NOTHING = Reserved()


@dataclass(slots=True)
class _Held:
    first: int = 0
    """Number of the request's pages before `pages`."""
    pages: list[int] = field(default_factory=list)
    num_entered: int = 0
    """Number of pages, counted from the request's first position, that are in the page table."""
    reserved: Reserved = NOTHING

    @property
    def end(self) -> int:
        """Number of the request's pages up to the last of `pages`."""
        return self.first + len(self.pages)


class WindowPages:
    """Gives requests pages of a window group, and frees those that the window has passed.

    Args:
        index: Its index; None: nothing is cached.
        reach: Most positions that a row attends to, its own included.
        max_rows: Most rows of a running request in a step.
    """

    def __init__(
        self,
        memory: PageMemory,
        index: WindowIndex | None,
        reach: int,
        page_size: int,
        max_step_tokens: int,
        max_rows: int = 1,
    ) -> None:
        self.memory = memory
        self._index = index
        self._reach = reach
        self._page_size = page_size
        self._most = window_reserve(reach, page_size, max_rows)
        self._num_spare = memory.num_usable_pages - step_reserve(max_step_tokens, page_size)
        self._held: dict[Request, _Held] = {}
        self._reserved = NOTHING
        self._returning: deque[tuple[int, _Held]] = deque()
        self._grown: list[Request] = []
        self.on_given_up: Callable[[Evicted], None] = lambda evicted: None
        """Called with each cached page that is evicted, while its bytes are still there."""
        memory.on_reclaimed = lambda evicted: self.on_given_up(evicted)
        if index is not None:
            index.on_lost = self._lost

    def __len__(self) -> int:
        """Number of requests that have pages or a reservation."""
        return len(self._held)

    # -- lookups ---------------------------------------------------------------------------------

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        return 0 if self._index is None else self._index.continuable(path, num_pages)

    def take(self, request: Request, found: Match) -> None:
        """Gives a request the pages that its rows read after a continuable match."""
        path = found.path
        if self._index is None or not path:
            return
        pages = self._index.pages_before(path)
        self.memory.retain(pages)
        self._index.note_found(pages)
        # A sample without full pages to share may have its reservation.
        held = self._held.setdefault(request, _Held())
        held.first, held.pages = len(path) - len(pages), pages

    def share(self, first: Request, request: Request, num_pages: int) -> bool:
        """Gives a request the pages that it needs to continue after `num_pages` pages of another
        one. False: they are gone, or there is no room for the request.
        """
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

        Args:
            request: Its cache leaf, if it has one, ends the path.
            num_pages: Length of the path.
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

    def num_needed(self, first_token: int, end_token: int) -> int:
        """Number of pages from `first_token` on that a request needs to continue at `end_token`.
        Both are page borders.
        """
        first = max(first_token // self._page_size, self._first_read(end_token))
        return max(0, end_token // self._page_size - first)

    def last_pages(self, request: Request, num_pages: int, count: int) -> list[int]:
        """The last `count` of a request's first `num_pages` pages, which its window reaches."""
        held = self._held[request]
        end = num_pages - held.first
        assert count <= end <= len(held.pages), "these pages are not there"
        return held.pages[end - count : end]

    def adopt(
        self, request: Request, num_pages: int, lent: Sequence[int] | None = None
    ) -> list[int]:
        """Gives an admitted request, whose first `num_pages` pages were computed elsewhere, the
        pages that it lacks to continue after them.

        Args:
            request: It has published its pages of the first group up to there.
            lent: These pages, from `lend`, already written; None: new ones, which the caller
                writes.
        """
        held, end_token = self._held[request], num_pages * self._page_size
        self._free_behind(held, end_token)
        count = self.num_needed(held.end * self._page_size, end_token)
        if not held.pages:
            held.first = num_pages - count
        if lent is None:
            pages = self.memory.allocate(count, request.namespace)
        else:
            assert len(lent) == count, "not the pages that the request lacks"
            pages = list(lent)
            self._reserve_more(-count)
        held.pages += pages
        self.publish(request, num_pages)
        return pages

    def lend(self, request: Request, num_pages: int) -> list[int] | None:
        """New pages that something other than a step writes, so that the admitted request can
        continue after `num_pages` pages; for `adopt` or `give_back`. None: running requests need
        all of the room.
        """
        count = self.num_needed(request.num_computed, num_pages * self._page_size)
        if not self._reserve_more(count):
            return None
        return self.memory.allocate(count, request.namespace)

    def hold(self, page: int) -> bool:
        """Keeps a cached page from being evicted until `give_back`, so that it can be copied.
        Returns False, and does nothing, if running requests need all of the room.
        """
        if not self._reserve_more(1):
            return False
        self.memory.retain([page])
        return True

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends `lend` or `hold`."""
        self._reserve_more(-len(pages))
        self.memory.release(pages)

    def kept_of(self, request: Request, first: int, end: int) -> list[tuple[Node, int]]:
        """The cached pages of this group for the request's published pages [first, end), and their
        nodes.
        """
        found: list[tuple[Node, int]] = []
        node, index = request.held.leaf, request.held.num_published
        while self._index is not None and node is not None and index > first:
            page = self._index.page_of(node)
            if index <= end and page is not None:
                found.append((node, page))
            node, index = node.parent, index - 1
        return found[::-1]

    def first_needed(self, num_pages: int) -> int:
        """The first page that a request needs to continue after `num_pages` pages."""
        return self._first_read(num_pages * self._page_size)

    def _lost(self, page: int, node: Node) -> None:
        assert node.parent is not None
        self.on_given_up(Evicted(page, node.key, node.parent.key))
        self.memory.forget(page)

    def _free_behind(self, held: _Held, num_computed: int) -> None:
        num_behind = min(self._first_read(num_computed) - held.first, len(held.pages))
        if num_behind > 0:
            behind, held.pages = held.pages[:num_behind], held.pages[num_behind:]
            held.first += num_behind
            self.memory.release(behind)
            if self._index is not None:
                self._index.leave_behind(behind)

    def _first_read(self, position: int) -> int:
        return max(0, position - self._reach + 1) // self._page_size

    # -- room ------------------------------------------------------------------------------------

    def has_room(self, request: Request, *, soon: bool = False) -> bool:
        """Whether the request is or can be admitted; with `soon`, once steps under way
        have ended.
        """
        held = self._held.get(request)
        if held is not None and held.reserved is not NOTHING:
            return True
        wanted = self._reserved.plus(self._most_of(request))
        if soon:
            for _, returning in self._returning:
                wanted = wanted.plus(returning.reserved, -1)
        return self._fits(wanted)

    def reserve(self, request: Request) -> bool:
        """Reserves the most pages that the request may have; False: there is no room for them."""
        if not self.has_room(request):
            return False
        held = self._held.setdefault(request, _Held())
        if held.reserved is NOTHING:
            held.reserved = self._most_of(request)
            self._reserved = self._reserved.plus(held.reserved)
        return True

    def _reserve_more(self, count: int) -> bool:
        """Reserves pages that belong to no request, or with a negative count gives them back.
        False: there is no room.
        """
        wanted = self._reserved.plus(Reserved(count, count))
        if count > 0 and not self._fits(wanted):
            return False
        self._reserved = wanted
        return True

    def _fits(self, wanted: Reserved) -> bool:
        return (
            wanted.beside_prompts <= self._num_spare or wanted.total <= self.memory.num_usable_pages
        )

    def _most_of(self, request: Request) -> Reserved:
        num_tokens = max(request.num_tokens, request.num_prompt_tokens + request.max_tokens)
        total = -(-num_tokens // self._page_size)
        return Reserved(min(total, self._most), total)

    def grow(self, request: Request) -> None:
        """Gives a request as many pages as it has in the first group."""
        held = self._held[request]
        if (num_lacking := len(request.held.pages) - held.end) > 0:
            held.pages += self.memory.allocate(num_lacking, request.namespace)
            self._grown.append(request)

    def enter(self, table: PageTable) -> None:
        """Enters new pages into the page table when a step begins."""
        grown, self._grown = self._grown, []
        for request in grown:
            held = self._held.get(request)
            if held is not None and request.slot >= 0:
                begin = max(held.first, held.num_entered)
                table.put(request.slot, begin, held.pages[begin - held.first :])
                held.num_entered = held.end

    # -- ends ------------------------------------------------------------------------------------

    def drop(self, request: Request, newest_step: int) -> None:
        """Releases a request's pages and reservation: at once or, if the request takes part in
        steps under way, when the newest of these has ended.
        """
        held = self._held.pop(request, None)
        if held is None:
            return
        if request.num_launched:
            self._returning.append((newest_step, held))
        else:
            self._release(held)

    def end_step(self, number: int) -> None:
        while self._returning and self._returning[0][0] <= number:
            self._release(self._returning.popleft()[1])

    def _release(self, held: _Held) -> None:
        self.memory.release(held.pages)
        self._reserved = self._reserved.plus(held.reserved, -1)
