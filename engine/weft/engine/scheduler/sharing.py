"""Lets requests wait for pages that another request is computing or receiving.

Two prompts with a common prefix that arrive together would both compute it. Instead the second one
waits while the first, its leader, computes or receives the page that the second lacks next. Once
the leader is past the point where the prompts differ, the second finds the common pages in the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.requests.request import Request, State
from weft.pages.memory.tree import Match

_MAKES_PAGES = (State.LOADING, State.FILLING, State.PREFILLING)


class PrefixSharing:
    """Finds requests that are about to compute a prefix that other requests need as well."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.num_waits = 0
        """Requests that waited for pages of another request, since start."""

    def still_waits(self, request: Request) -> bool:
        """Whether the request's leader is still computing pages, and has published none since the
        last call.
        """
        leader = request.sharing.leader
        assert leader is not None
        # A leader counts as RUNNING while its last chunk is still under way.
        makes_pages = leader.state in _MAKES_PAGES or (
            leader.state is State.RUNNING and leader.num_launched > 0
        )
        if makes_pages and leader.held.num_published == request.sharing.num_leader_pages:
            return True
        request.sharing.leader = None
        return False

    def waits(self, request: Request, found: Match, active: Iterable[Request]) -> bool:
        """Looks for a leader among the requests that are computing or receiving pages.

        Args:
            request: A waiting request, without pages.
        """
        size, num_pages = self._page_size, len(found.path)
        start, end = num_pages * size, (num_pages + 1) * size
        if end > request.num_reusable_tokens:
            return False  # The owner of a prompt runs its last token, or all, in any case.
        leaf = found.path[-1] if found.path else None
        wanted: bytes | None = None
        for other in active:
            # It has published exactly the cached prefix, so both continue from the same page.
            if (
                other.held.num_published != num_pages
                or other.held.leaf is not leaf
                or other.num_tokens < end
                or other.keys.namespace != request.keys.namespace
            ):
                continue
            if wanted is None:
                wanted = request.keys.packed(request.tokens, start, end)
            # Equal tokens may stand for different images.
            if other.keys.packed(other.tokens, start, end) == wanted:
                self._follow(request, other)
                return True
        return False

    def _follow(self, request: Request, leader: Request) -> None:
        request.sharing.leader, request.sharing.num_leader_pages = leader, leader.held.num_published
        if not request.sharing.has_followed:
            request.sharing.has_followed = True
            self.num_waits += 1
