"""When quarantine has taken so much of a pool, for so long, that its process had better end.

Pages leave quarantine by proof only. Where no proof comes (a filler that stands still for good, a
network that is cut) the last fence is the end of the process that owns the pool: what may still
arrive then has nowhere to go.
"""

from __future__ import annotations

from weft.engine.clock import Clock


class QuarantineWatch:
    """Measures how long more than a share of a pool has been in quarantine.

    Args:
        max_fraction: Of the usable pages; 1: never too many.
        clock: Monotonic seconds.
    """

    def __init__(self, max_fraction: float, clock: Clock) -> None:
        self._max_fraction = max_fraction
        self._clock = clock
        self._since: float | None = None

    def note(self, num_quarantined: int, num_usable: int) -> None:
        """Takes the numbers of pages as they are now; to be called every now and then."""
        if num_quarantined <= self._max_fraction * num_usable:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def over_s(self) -> float:
        """For how long there have been too many, in seconds; 0: there are not."""
        return 0.0 if self._since is None else self._clock() - self._since
