"""Order in which requests get room for fills."""

from __future__ import annotations

from weft.engine.base.clock import Clock
from weft.engine.scheduler.state import Request, State


class FillQueue:
    """Gives the first request that found too little room precedence over later ones, for a limited
    time.

    Without it prompts that come together share the room among them: each is filled in many small
    leases, by turns with all others, and all of them end late. And small prompts would take what
    becomes free before a large one finds enough. But whoever holds the room may wait for a busy
    filler itself, and others know better ones: so patience ends.

    Args:
        patience_s: How long the first one holds up others, and waits for enough room.
        clock: Monotonic seconds.
    """

    def __init__(self, patience_s: float, clock: Clock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._first: Request | None = None
        self._since = 0.0

    def may_begin(self, request: Request) -> bool:
        """Whether no other request has been waiting for room with patience."""
        first = self._waiting
        return first is None or first is request or not self._is_patient

    def enough_pages(self, request: Request, wanted: int, most: int, least: int) -> int:
        """Number of pages with which a request's fill may start; it waits while fewer are free.

        All that it wants, or half of what there is: what comes next is then computed while the
        rest of this one is written. When patience has ended, no more than `least`.

        Args:
            request: May begin.
            wanted: Pages that are missing.
            most: That all fills could hold at once.
            least: Fewer are not worth a request to the filler.
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
