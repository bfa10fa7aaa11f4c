"""Should a remainder be filled by somebody else? Costs from measured rates."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.scheduler.state import FillRecord, Request

SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages."""
LEAST_MEASURED_TOKENS = 32
"""Steps with fewer prompt tokens say nothing about long ones, so a step may always bring these."""

LEAST_ADDED_SHARE = 0.2
"""Of a step with prompts and decodes: what prompts add at least, however long decodes took before.
"""


class Decision(NamedTuple):
    """Both sides of the inequality, None where a rate is not known yet."""

    is_remote: bool
    remote_s: float | None
    local_s: float | None


class FillCosts:
    """Remote if `queue + (n - 1 - filler's match) / rate + bytes / bandwidth < local time`.

    Queue, match and rate of the filler come with the candidate, bandwidth and the local rate are
    moving averages of what this engine saw. While a rate is unknown, remote is tried: that is
    how it becomes known.

    Args:
        local_prefill_max_tokens: with N the rule is off: remainders of at most N tokens run
            locally, longer ones ship; None: the rule.
        page_size: token positions a page.
    """

    def __init__(self, local_prefill_max_tokens: int | None, page_size: int) -> None:
        self._local_max = local_prefill_max_tokens
        self._page_size = page_size
        self._bytes_per_s = 0.0
        self._local_tokens_per_s = 0.0
        self._tokens_per_s_beside = 0.0
        self._decode_s = 0.0

    def decide(self, request: Request, end_token: int, page_bytes: int) -> Decision:
        """Chooses for the range [request.num_computed, end_token)."""
        num_local = request.num_tokens - 1 - request.num_computed - request.num_partial_tokens
        if self._local_max is not None:
            return Decision(num_local > self._local_max, None, None)
        candidate = request.candidates[0]
        rate = candidate.tokens_per_second
        if not (rate and self._bytes_per_s and self._local_tokens_per_s):
            return Decision(True, None, None)
        num_pages = (end_token - request.num_computed) // self._page_size
        to_compute = max(0, end_token - candidate.match_tokens)
        remote = (candidate.queued_tokens + to_compute) / rate
        remote += num_pages * page_bytes / self._bytes_per_s
        local = num_local / self._local_tokens_per_s
        return Decision(remote < local, remote, local)

    def observe(self, num_bytes: int, duration_s: float, record: FillRecord) -> None:
        """Takes a finished fill into the bandwidth: bytes over the time they were under way."""
        under_way = record.last_write_complete_s - record.first_write_posted_s
        seconds = under_way if 0 < under_way <= duration_s else duration_s
        if num_bytes and seconds > 0:
            self._bytes_per_s = _smooth(self._bytes_per_s, num_bytes / seconds)

    def observe_local(self, num_tokens: int, duration_s: float) -> None:
        """Takes a local prefill step into the local rate."""
        if num_tokens and duration_s > 0:
            self._local_tokens_per_s = _smooth(self._local_tokens_per_s, num_tokens / duration_s)

    def observe_decode(self, duration_s: float) -> None:
        """Takes a step without prompts into what decodes take by themselves."""
        self._decode_s = _smooth(self._decode_s, duration_s)

    def observe_beside(self, num_tokens: int, duration_s: float) -> None:
        """Takes a step in which prompts were computed beside decodes into what prompts add.

        Args:
            num_tokens: Of the prompts.
            duration_s: Of the step; what decodes are known to take is not the prompts'.
        """
        added_s = max(duration_s - self._decode_s, LEAST_ADDED_SHARE * duration_s)
        if num_tokens and added_s > 0:
            self._tokens_per_s_beside = _smooth(self._tokens_per_s_beside, num_tokens / added_s)

    def tokens_within(self, duration_s: float) -> int:
        """Prompt tokens that add so much to a step of decodes, in whole pages; a few at least."""
        least = -(-LEAST_MEASURED_TOKENS // self._page_size)
        rate = self._tokens_per_s_beside or self._local_tokens_per_s
        num_pages = int(rate * duration_s) // self._page_size
        return max(least, num_pages) * self._page_size

    @property
    def local_tokens_per_s(self) -> float:
        """Measured local prefill rate; 0 = unknown."""
        return self._local_tokens_per_s


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else (1 - SMOOTHING) * old + SMOOTHING * new
