"""Decides which pages are copied to lower tiers, and when loading from one is worthwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages."""
TRY_AGAIN = 32
"""One in this many unprofitable loads is made nevertheless, so that a tier that was slow for a
while is measured again.
"""


class LoadCost(NamedTuple):
    """Consecutive pages of a prompt that one tier holds."""

    tier: str
    num_tokens: int
    num_bytes: int


class TierPolicy:
    """Rules that host memory, disk and KV store share.

    A page is copied to lower tiers once requests have found it `write_through_threshold` times (0:
    when it is computed). Pages are loaded if that is faster than computing them again:

        bytes / the tier's measured bytes a second  <  tokens / measured prefill tokens a second

    While one of the speeds is unknown, pages are loaded, which measures it. With a
    `load_back_threshold`, the speeds do not count: that many tokens or more are loaded, and fewer
    are computed.
    """

    def __init__(self, write_through_threshold: int = 0, load_back_threshold: int | None = None):
        self.write_through_threshold = write_through_threshold
        self.load_back_threshold = load_back_threshold
        self._bytes_per_s: dict[str, float] = {}
        self.num_losing = 0
        """Runs of pages that would have been slower to load than to compute, since start."""

    def is_written_through(self, num_hits: int) -> bool:
        """Whether a page that was found this often is copied."""
        return num_hits >= self.write_through_threshold

    def num_loaded(self, runs: Sequence[LoadCost], prefill_tokens_per_s: float) -> int:
        """Number of these consecutive runs of pages, from the prompt's first one on, to load.
        `prefill_tokens_per_s` is the measured local rate; 0: unknown.
        """
        if self.load_back_threshold is not None:
            num_tokens = sum(run.num_tokens for run in runs)
            return len(runs) if num_tokens >= self.load_back_threshold else 0
        for index, run in enumerate(runs):
            if not self._is_faster(run, prefill_tokens_per_s):
                return index
        return len(runs)

    def _is_faster(self, run: LoadCost, prefill_tokens_per_s: float) -> bool:
        rate = self._bytes_per_s.get(run.tier)
        if not (rate and prefill_tokens_per_s):
            return True
        if run.num_bytes / rate < run.num_tokens / prefill_tokens_per_s:
            return True
        self.num_losing += 1
        return self.num_losing % TRY_AGAIN == 0

    def observe(self, tier: str, num_bytes: int, duration_s: float) -> None:
        if num_bytes and duration_s > 0:
            rate, old = num_bytes / duration_s, self._bytes_per_s.get(tier)
            smooth = rate if old is None else (1 - SMOOTHING) * old + SMOOTHING * rate
            self._bytes_per_s[tier] = smooth

    def bytes_per_s(self, tier: str) -> float:
        """Measured speed of loads; 0: unknown."""
        return self._bytes_per_s.get(tier, 0.0)
