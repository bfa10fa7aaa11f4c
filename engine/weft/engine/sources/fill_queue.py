"""Order in which requests get room for fills."""

from __future__ import annotations

from weft.contract.clock import Clock
from weft.engine.requests.request import Request, State


class FillQueue:
    """Gives the first request that found too little room precedence over later ones, for a limited
    time.

    Without this queue, prompts that arrive together would share the room: each would be filled in
    many small leases, in turn with all other prompts, and all would end late. Small prompts would
    also take free room before a large prompt finds enough. The precedence is limited in time
    because the fills that hold the room may wait for a busy filler while other requests have idle
    fillers.

    Args:
        patience_s: Seconds for which the first request holds up later ones and waits for enough
            room.
    """

    def __init__(self, patience_s: float, clock: Clock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._first: Request | None = None
        self._since = 0.0

    def may_begin(self, request: Request) -> bool:
        """Whether no other request has precedence."""
        first = self._waiting
        return first is None or first is request or not self._is_patient

    def enough_pages(self, request: Request, wanted: int, most: int, least: int) -> int:
        """Number of pages with which a request's fill may start. The request waits while fewer are
        free.

        The number is all pages that it wants, or half of the room: then the filler computes the
        next lease while it writes this one. After `patience_s` it is at most `least`.

        Args:
            most: Pages that all fills together can hold.
            least: Least number of pages that is worth a request to the filler.
        """
        is_patient = self._waiting is not request or self._is_patient
        return max(1, min(wanted, max(least, most // 2) if is_patient else least))

    def waits(self, request: Request) -> None:
        """Registers a request that may begin but finds too little room."""
        if self._waiting is None:
            self._first, self._since = request, self._clock()

    def leaves(self, request: Request) -> None:
        """Removes a request that has begun its fill, has ended, or gets its pages elsewhere."""
        if self._first is request:
            self._first = None

    @property
    def _waiting(self) -> Request | None:
        """The first waiting request, unless it has ended or was requeued in the meantime."""
        first = self._first
        is_waiting = first is not None and first.state in (State.LOADING, State.FILLING)
        return first if is_waiting else None

    @property
    def _is_patient(self) -> bool:
        return self._clock() < self._since + self._patience_s
