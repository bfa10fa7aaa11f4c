"""Watches how much of a pool is quarantined, and for how long: too much ends the process.

Pages leave quarantine only by proof that no write can arrive. If no proof comes (a filler is
suspended for good, or the network is cut), the last fence is the end of the process that owns the
pool: late writes can no longer reach memory in use.
"""

from __future__ import annotations

from weft.contract.clock import Clock


class QuarantineWatch:
    """Measures for how long more than `max_fraction` of the usable pages have been in quarantine;
    1: never too many.
    """

    def __init__(self, max_fraction: float, clock: Clock) -> None:
        self._max_fraction = max_fraction
        self._clock = clock
        self._since: float | None = None

    def note(self, num_quarantined: int, num_usable: int) -> None:
        """Records the present numbers of pages; to be called regularly."""
        if num_quarantined <= self._max_fraction * num_usable:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def over_s(self) -> float:
        """Seconds for which too many pages have been quarantined; 0: the limit is kept."""
        return 0.0 if self._since is None else self._clock() - self._since
