"""In which order requests get room for fills."""

from __future__ import annotations

from weft.engine.scheduler.state import Request, State


class FillLine:
    """The first request that found too little room goes before all that ask after it.

    Without it prompts that come together share the room among them: each is filled in many small
    leases, by turns with all others, and all of them end late. And small prompts would take what
    becomes free before a large one finds enough.
    """

    def __init__(self) -> None:
        self._first: Request | None = None

    def may_begin(self, request: Request) -> bool:
        """Nobody else waits for room. (One that has ended, or goes on otherwise, does not.)"""
        first = self._first
        return first in (None, request) or first.state not in (State.LOADING, State.FILLING)

    def waits(self, request: Request) -> None:
        """It may begin, and finds too little room."""
        self._first = request

    def began(self, request: Request) -> None:
        """It found enough."""
        if self._first is request:
            self._first = None


def enough_pages(wanted: int, most: int, least: int) -> int:
    """Pages with which a fill begins; it waits while fewer are free.

    All that it wants, or half of what there is: what comes next is then computed while the rest
    of this one is written.

    Args:
        wanted: Pages that are missing.
        most: That all fills could hold at once.
        least: Fewer are not worth a request to the filler.
    """
    return max(1, min(wanted, max(least, most // 2)))
