"""The pages of requests: lookups in the prefix cache, and publication of new pages.

Positions of a request's tokens, and who holds their KV after `take` and `use_partial`:

    0                     path * page_size        num_computed            num_tokens
    |---- cached pages ----|---- copied page ------|----- to be computed ------|
      shared, never written  its own from here on

Only full pages are cached. The page in which a match ends belongs to other requests. It is copied
into a page of the request's own, whose positions from `num_computed` on are overwritten.

A request may be dropped while a step that has begun still reads and writes its pages. These return
to `memory` when the newest step begun at that time ends; until then no other request and no filler
may get them.

The above describes the first page group. A request also holds pieces of the model's companions
(`weft.engine.requests.companions`), and continues only where each has what the request needs. If
all of them allow it, as recurrent layers do, the request takes the cached pages after that border
too, and computes their tokens again for the companions alone: rows in published pages write no KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from weft.contract.pages import PageCopy
from weft.engine.requests.companions import Companion
from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import NO_MATCH, Match, Node, PrefixTree


class RequestPages:
    """Finds, publishes and drops the pages of requests.

    Args:
        cache: Index of cached pages; None: nothing is cached.
        companions: Of the model: what requests have in addition to pages of the first group.
    """

    def __init__(
        self,
        memory: PageMemory,
        cache: PrefixTree | None,
        page_size: int,
        companions: Sequence[Companion] = (),
    ) -> None:
        self.memory = memory
        self.companions = companions
        self.allows_rerun = bool(companions) and all(each.allows_rerun for each in companions)
        """Whether requests take cached pages after the border where they continue, and compute
        their tokens again.
        """
        self.has_last_rows = any(companion.has_last_rows for companion in companions)
        """Whether steps find the data of the row before a border without computing it again."""
        self._cache = cache
        self._page_size = page_size
        self._copies: list[PageCopy] = []
        self._newest_step = 0
        self._returning: deque[tuple[int, Sequence[int]]] = deque()
        """Pages, and the step at whose end they are released; oldest first."""
        self.num_returning = 0
        """References that are released at the end of a step. Their pages may have other
        references.
        """
        self.num_partial_hits = 0
        """Matches that ended inside a page, since start."""

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Begins a step and returns its number. Pages dropped from now on are kept until
        its end.
        """
        self._newest_step += 1
        return self._newest_step

    def end_step(self, number: int) -> None:
        """A step, and all before it, must have ended on the device too."""
        while self._returning and self._returning[0][0] <= number:
            _, pages = self._returning.popleft()
            self.num_returning -= len(pages)
            self.memory.release(pages)
        for companion in self.companions:
            companion.end_step(number)

    def _return_later(self, pages: Sequence[int]) -> None:
        if pages:
            self._returning.append((self._newest_step, pages))
            self.num_returning += len(pages)

    # -- lookups ---------------------------------------------------------------------------------

    def num_cached_tokens(self, request: Request) -> int:
        """Number of tokens that a request would find cached now. Changes nothing."""
        return self.find(request).num_tokens(self._page_size)

    def num_cached_pages(self, request: Request, num_pages: int) -> int:
        """Number of a request's leading pages that are cached. Changes nothing."""
        if self._cache is None:
            return 0
        data = request.keys.packed(request.tokens, 0, num_pages * self._page_size)
        return len(self._cache.find(request.keys.namespace, data).path)

    def num_continuable_pages(self, request: Request, num_pages: int) -> int:
        """Number of leading cached pages after which the request can continue."""
        if self._cache is None:
            return 0
        data = request.keys.packed(request.tokens, 0, num_pages * self._page_size)
        found = self.continuable(self._cache.find(request.keys.namespace, data))
        return len(found.path) - found.num_rerun

    def find(self, request: Request) -> Match:
        """Finds the longest cached prefix of a request, within `Request.num_reusable_tokens`.
        Changes nothing.
        """
        num_reusable = request.num_reusable_tokens
        if self._cache is None or not num_reusable:
            return NO_MATCH
        data = request.keys.packed(request.tokens, 0, num_reusable)
        return self.continuable(self._cache.find(request.keys.namespace, data))

    def continuable(self, match: Match) -> Match:
        """The part of a match after which a request can continue: all companions have the pieces
        that it needs. In models with companions the part ends at a page border.
        """
        if not self.companions:
            return match
        num_pages, most = -1, len(match.path)
        while num_pages != most:
            num_pages = most
            most = min(other.continuable(match.path, num_pages) for other in self.companions)
        if self.allows_rerun:
            return Match(match.path, None, 0, len(match.path) - num_pages)
        return Match(match.path[:num_pages], None, 0)

    def take(self, request: Request, found: Match) -> None:
        """Gives a request without pages the match that `find` has just found.

        The page in which a match ends is kept until `use_partial` or `forget_partial`, one of which
        must follow.
        """
        request.held.pages = [node.page for node in found.path]
        self.memory.retain(request.held.pages)
        for companion in self.companions:
            companion.take(request, found)
        request.held.num_published = len(request.held.pages)
        request.num_computed = (len(request.held.pages) - found.num_rerun) * self._page_size
        if found.partial is not None:
            request.held.partial_page = found.partial.page
            request.held.num_partial_tokens = found.num_partial_tokens
            self.memory.retain([request.held.partial_page])
        request.held.leaf = found.path[-1] if found.path else None
        request.keys.adopt([node.key for node in found.path])

    def share(self, first: Request, request: Request) -> None:
        """Gives a request without pages the full pages of its prompt that it shares with `first`,
        whose KV is there. It gets none if pieces of companions that go with them are gone.
        """
        num_pages = (first.num_prompt_tokens - 1) // self._page_size
        if not all(other.share(first, request, num_pages) for other in self.companions):
            self.drop(request)
            return
        request.held.pages = first.held.pages[:num_pages]
        self.memory.retain(request.held.pages)
        request.num_computed = num_pages * self._page_size
        request.held.num_published = num_pages

    def share_beam(self, first: Request, request: Request, num_pages: int) -> None:
        """Gives a request without pages the computed prompt of `first`: its full pages, and copies
        of the rest; and `num_pages` of the pages that `first` has reserved. From now on the pages
        of neither are published, since their texts change.
        """
        self.share(first, request)
        num_shared = len(request.held.pages)
        first.held.num_promised -= num_pages
        request.held.num_promised += num_pages
        self.take_promised(request, len(first.held.pages) - num_shared)
        request.num_computed = first.num_computed
        for one in (first, request):
            one.held.keep_private()
        self.copy_beam(first, request, num_shared * self._page_size)

    def copy_beam(self, source: Request, request: Request, position: int) -> None:
        """Makes K and V of a request those of another one of its search, from `position` on; before
        it, their tokens are the same. Both have computed as many.
        """
        pages = slice(position // self._page_size, -(-source.num_computed // self._page_size))
        for pair in zip(source.held.pages[pages], request.held.pages[pages], strict=True):
            self.memory.retain(pair)
            self._copies.append(PageCopy(*pair))

    def note_hit(self, request: Request) -> None:
        """Counts the match of `take` as a hit, when the request is admitted."""
        if self._cache is not None and request.held.leaf is not None:
            self._cache.touch(request.held.leaf, request.priority)
        for companion in self.companions:
            companion.note_hit(request)

    def note_follower(self, leader: Request, follower: Request) -> None:
        """Makes the leader keep what the follower needs where their prompts part."""
        for companion in self.companions:
            companion.note_follower(leader, follower)

    def use_partial(self, request: Request) -> None:
        """Copies the page in which the match ended, for a request that is prefilled here. Takes one
        promised page, if there is anything to copy.
        """
        source = request.held.partial_page
        if source is None:
            return
        (page,) = request.held.take_promised(self.memory, 1, request.namespace)
        request.held.pages.append(page)
        request.num_computed += request.held.num_partial_tokens
        request.held.partial_page, request.held.num_partial_tokens = None, 0
        # The source keeps its reference until the copy is made.
        self.memory.retain([page])  # The destination is kept too, even if the request ends.
        self._copies.append(PageCopy(source, page))
        self.num_partial_hits += 1

    def forget_partial(self, request: Request) -> None:
        """Drops the partial page match, because the request is filled from the page border on or
        there is no room for the copy.
        """
        if request.held.partial_page is not None:
            self.memory.release([request.held.partial_page])
            request.held.partial_page, request.held.num_partial_tokens = None, 0

    def make_copies(self, make: Callable[[Sequence[PageCopy]], None]) -> None:
        """Makes copies, if any wait, in the step that has just begun, before anything else. If that
        fails, the next step makes them, since requests of later steps need some of the copies.
        """
        if not self._copies:
            return
        make(self._copies)
        copies, self._copies = self._copies, []
        self._return_later([page for copy in copies for page in copy])

    def publish(self, request: Request) -> bool:
        """Publishes the request's new full pages in the cache; False if there are none, or a load
        still writes some of them.
        """
        if request.held.incoming is not None:
            return False
        num_full = request.num_computed // self._page_size
        first = request.held.num_published
        if num_full <= first:
            return False
        request.held.num_published = num_full
        if self._cache is not None:
            self._publish(self._cache, request, first, num_full)
        for companion in self.companions:
            companion.publish(request, num_full)
        return True

    def committed(self, request: Request) -> None:
        """Call it when a step of the request was committed, after `publish`."""
        for companion in self.companions:
            companion.committed(request)

    def _publish(self, cache: PrefixTree, request: Request, first: int, num_full: int) -> None:
        leaf = request.held.leaf
        if num_full == first + 1 and leaf is not None and leaf.is_used:
            self._publish_one(cache, request, leaf, first)
            return
        request.held.leaf, added = cache.insert(
            request.keys,
            request.tokens,
            request.held.pages,
            first,
            num_full,
            leaf,
            priority=request.priority,
            # Pages promised to other requests must stay available.
            num_spare_pages=self._num_spare_pages,
        )
        for node in added:
            assert node.parent is not None
            self.memory.published(node.page, node.key, node.parent.key)

    def _publish_one(self, cache: PrefixTree, request: Request, leaf: Node, index: int) -> None:
        page = request.held.pages[index]
        data, key = request.keys.page(request.tokens, index)
        node = request.held.leaf = cache.append(leaf, data, key, page, request.priority)
        if node.page == page:
            self.memory.published(page, key, leaf.key)

    def _num_spare_pages(self) -> int:
        return self.memory.num_available_pages

    def drop(self, request: Request) -> None:
        """Releases all pages and reservations of a request; published pages stay cached."""
        if self._copies:
            self._drop_copies(request)
        self.forget_partial(request)
        if request.num_launched:
            self._return_later(request.held.pages)
        else:
            self.memory.release(request.held.pages)
        for companion in self.companions:
            companion.drop(request, self._newest_step)
        request.held.pages = []
        request.num_computed = 0
        request.held.num_published = 0
        request.held.leaf = None
        request.held.is_private = False
        if request.held.incoming is not None:
            request.held.incoming.stop()
            request.held.incoming = None
        self.return_promise(request)

    def has_room_beside(self, request: Request, *, soon: bool = False) -> bool:
        """Whether all companions have room for the request; with `soon`, once steps under way have
        ended.
        """
        return all(other.has_room(request, soon=soon) for other in self.companions)

    def promise(self, request: Request, num_pages: int) -> None:
        """Reserves pages for an admitted request, for which `has_room_beside` was True."""
        request.held.promise(self.memory, num_pages)
        for companion in self.companions:
            companion.reserve(request)

    def grown(self, requests: Sequence[Request]) -> None:
        """Gives requests, which have just got reserved pages in the first group, the pieces that go
        with them.
        """
        for companion in self.companions:
            for request in requests:
                companion.grow(request)

    def take_uncontinuable(self, request: Request, end_token: int) -> None:
        """Gives an admitted request that may be filled up to `end_token` the cached pages that
        follow its match and lack pieces of companions, which its fill brings. At least one page
        is left to be filled.
        """
        if self._cache is None or self.allows_rerun or not self.companions:
            return
        end_token = min(end_token, request.num_reusable_tokens)
        most = max(0, end_token // self._page_size - 1) * self._page_size
        found = self._cache.find(
            request.keys.namespace, request.keys.packed(request.tokens, 0, most)
        )
        pages = [node.page for node in found.path[len(request.held.pages) :]]
        self.memory.retain(pages)
        request.held.unpromise(self.memory, len(pages))
        request.held.pages += pages

    def has_uncontinuable(self, request: Request) -> bool:
        """Whether a request has pages after those that it has computed, and cannot continue there
        because no fill has brought the pieces of companions.
        """
        end = len(request.held.pages) * self._page_size
        return bool(self.companions) and not self.allows_rerun and end > request.num_computed

    def drop_uncontinuable(self, request: Request) -> int:
        """Releases the pages of `has_uncontinuable` and returns their number. Reserves nothing in
        their place.
        """
        if not self.has_uncontinuable(request):
            return 0
        held, num_computed = request.held, request.num_computed // self._page_size
        pages, held.pages = held.pages[num_computed:], held.pages[:num_computed]
        self.memory.release(pages)
        return len(pages)

    def untake_uncontinuable(self, request: Request) -> None:
        """Undoes `take_uncontinuable`. Valid in the same turn only: later, other requests may have
        what was reserved for this one.
        """
        num_pages = self.drop_uncontinuable(request)
        request.held.promise(self.memory, num_pages)

    def num_lacking(self, request: Request, end: int) -> int:
        """Pages that a request lacks for its positions before `end`; negative: it has more."""
        return -(-end // self._page_size) - len(request.held.pages)

    def num_to_reserve(self, request: Request) -> int:
        """Pages that a waiting request needs in addition to those that it has: for its tokens, and
        for what it ships or its beams share.
        """
        lacking = self.num_lacking(request, request.num_tokens)
        return lacking + request.companion_pages + request.num_beam_pages

    def add_new(self, requests: Sequence[Request]) -> None:
        """Gives each of some requests of one namespace a page that nothing was reserved for. Raises
        OutOfPages, with nothing done, if there are too few.
        """
        pages = self.memory.allocate(len(requests), requests[0].namespace)
        for request, page in zip(requests, pages, strict=True):
            request.held.pages.append(page)
        self.grown(requests)

    def take_promised(self, request: Request, num_pages: int) -> None:
        """Turns reserved pages into the request's next ones."""
        held = request.held
        held.pages += held.take_promised(self.memory, num_pages, request.namespace)
        self.grown((request,))

    def return_promise(self, request: Request) -> None:
        """Releases reserved pages that were not taken."""
        request.held.unpromise(self.memory, request.held.num_promised)

    def _drop_copies(self, request: Request) -> None:
        for copy in [copy for copy in self._copies if copy.destination in request.held.pages]:
            self._copies.remove(copy)
            self.memory.release(copy)
