"""A token bucket that may go into debt."""

from __future__ import annotations


class TokenBucket:
    """A rate limit per minute, with bursts of up to a minute's worth.

    A request that used more than it had taken leaves a debt: the level falls below 0, and nothing
    can be taken until it has risen again. Times are seconds of one clock.
    """

    __slots__ = ("_at", "_level", "capacity")

    def __init__(self, per_minute: float, now: float) -> None:
        """Creates a full bucket."""
        self.capacity = per_minute
        """Most that the bucket holds, and also what it gains in a minute."""
        self._level = per_minute
        self._at = now

    def resize(self, per_minute: float) -> None:
        """Changes the limit; what was used stays used."""
        self._level += per_minute - self.capacity
        self.capacity = per_minute

    def level(self, now: float, scale: float = 1.0) -> float:
        """Current level; below 0: a debt. `scale` is the share of its rate at which it has filled
        since the last call.
        """
        filled = max(0.0, now - self._at) * scale * self.capacity / 60
        self._level, self._at = min(self.capacity, self._level + filled), now
        return self._level

    def wait_s(self, amount: float, now: float, scale: float = 1.0) -> float:
        """Seconds until an amount may be taken; 0: now. An amount above its capacity needs a full
        bucket.
        """
        missing = min(amount, self.capacity) - self.level(now, scale)
        return max(0.0, missing) * 60 / (self.capacity * scale)

    def take(self, amount: float) -> None:
        """Takes an amount unconditionally; negative: returns it."""
        self._level = min(self.capacity, self._level - amount)
