"""Decides whether another worker should fill a remainder (the part of a prompt that is not cached
here), by costs from measured rates.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from weft.contract.timeline import FillRecord, Timeline
from weft.engine.requests.request import Request

SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages."""
MIN_MEASURED_TOKENS = 32
"""Prompt tokens below which a step's time does not predict longer steps. A step may always have
this many.
"""

FAR = 4
"""Factor of the longest measured step's tokens beyond which a rate says little, since a step's
fixed time weighs less in longer ones.
"""
STAND_IN = 0.5
"""Share of the filler's rate that this engine is assumed to reach in steps of such lengths."""
MAX_TRIED_TOKENS = 512
"""Largest remainder that is computed locally to measure the local side."""
MAX_TRIES = 8
"""Most remainders that are computed locally to measure. If the rate is unknown after them, prompts
are too short.
"""
TRY_AGAIN = 32
"""Number of remainders in a row for which a side loses before one goes there all the same, so that
a side that was slow for a while or has just started is measured again.
"""
TRIED_SHARE = 0.02
"""Share of the better side's time that these trials of the other side may cost."""
MAX_TRIED_FACTOR = 8
"""Most that a trial is assumed to cost, as a factor of the better side's time. Higher forecasts are
hardly true.
"""
MAX_WASTED = 2
"""Factor by which the filler's tokens to compute may exceed the owner's in such a trial."""

NUM_RESTS = 9
"""Number of latest fills whose median predicts the time beyond compute and transfer."""
MIN_RESTS = 3
"""Number of fills below which this time is ignored, since a worker's first fill includes
connecting.
"""

NUM_BEHIND = 6
"""First tokens that wait while a filler computes a prompt, its own included. A queue at load r has
1 / (1 - r) in the mean; fillers queue from about 0.8 on.
"""
MIN_ADDED_SHARE = 0.2
"""Least share of a step with prompts and decodes that is attributed to prompts, however long
decodes took before.
"""


class FillDecision(NamedTuple):
    """The choice, and the seconds to the first token on each side; None if a rate is not
    known yet.
    """

    is_remote: bool
    remote_s: float | None
    local_s: float | None
    """Forecast of the first token alone. The choice also weighs the delay of running requests."""
    is_overflow: bool = False
    """Whether the choice is local and would be remote if the filler had no other work."""


class LocalLoad(NamedTuple):
    """The work that this engine already has when a remainder comes."""

    queued_tokens: int = 0
    """Prompt tokens that are computed before those of the remainder, queued or in steps that have
    begun.
    """
    num_running: int = 0
    """Requests that get their next token in each step."""
    step_tokens: int = 1
    """Prompt tokens of a step that also has these requests."""
    chunk_tokens: int = sys.maxsize
    """Most tokens of one prompt in a step."""


class _Trials:
    """Decides when a remainder goes to the slower side, to measure it."""

    def __init__(self) -> None:
        self._num_lost = 0
        self._spared_s = 0.0

    def is_due(self, best_s: float, cost_s: float) -> bool:
        """Whether a trial is due whose cost exceeds the better side's time by `cost_s`."""
        self._num_lost += 1
        self._spared_s += TRIED_SHARE * best_s
        cost_s = min(cost_s, MAX_TRIED_FACTOR * best_s)
        if self._num_lost < TRY_AGAIN or self._spared_s < cost_s:
            return False
        self._num_lost, self._spared_s = 0, 0.0
        return True


class _Rate:
    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._longest = 0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Takes a step's prompt tokens into the average. A step that is far longer than all before
        replaces the average.
        """
        is_far = num_tokens > FAR * self._longest
        new = num_tokens / duration_s
        self.tokens_per_s = new if is_far else _smooth(self.tokens_per_s, new)
        self._longest = max(self._longest, num_tokens)

    def of(self, num_tokens: int, other: float) -> float:
        """The rate of steps of `num_tokens` tokens. For far longer steps than were measured, it is
        at least `other`.
        """
        if not self.tokens_per_s or num_tokens > FAR * self._longest:
            return max(self.tokens_per_s, other)
        return self.tokens_per_s


class FillCosts:
    """Ships a remainder if `(queue + end - filler's match) / rate + exposed bytes / bandwidth +
    rest + tail < (local queue + remainder) / local rate + steps * time of the decodes beside +
    local rest + delay of the running requests / (first_token_weight * NUM_BEHIND)`.

    The candidate states the filler's queue, match and rate. A filler ships the pages of each step
    while it computes the next one, so only the bytes of the last step are exposed. Bandwidth and
    rates are averages of this engine's latest measurements. So are the rest (messages, digests,
    waiting for steps), the tail (from the last accepted page to the first token, and waiting for
    room before) and the local rest (what local first tokens took beyond the forecast).

    While a rate is unknown, the engine tries that side to measure it: the remote side first, the
    local side only with remainders that are not too long. For longer ones a share of the filler's
    rate is assumed, until a step about as long as theirs has been measured here. Until a step with
    both prompts and decodes has been measured, one is tried now and then, whatever its length.

    A local prompt delays the next token of every running request by the time that it adds to their
    steps. This is weighed against the first tokens that wait if it ships: its own, and those of the
    prompts queued after it.

    Args:
        local_prefill_max_tokens: With N, the rule is off: remainders of at most N tokens are
            computed locally, longer ones ship. None: the rule decides.
        first_token_weight: Worth of a second of delay of a first token, in seconds of delay of next
            tokens. 0: a remainder that would delay running requests always ships.
        local_load: Returns the work that is computed before a new remainder and together with it.
    """

    def __init__(
        self,
        local_prefill_max_tokens: int | None,
        page_size: int,
        first_token_weight: float = 1.0,
        local_load: Callable[[], LocalLoad] = LocalLoad,
    ) -> None:
        self._local_max = local_prefill_max_tokens
        self._page_size = page_size
        self._worth = first_token_weight * NUM_BEHIND
        self.local_load = local_load
        self._bytes_per_s = 0.0
        self._step_bytes = 0
        """Most bytes that a filler shipped at once, from one step or from its cache."""
        self._rests: deque[float] = deque(maxlen=NUM_RESTS)
        self._tails: deque[float] = deque(maxlen=NUM_RESTS)
        self._local_rest_s = 0.0
        self._remote, self._local = _Trials(), _Trials()
        self._num_tries = 0
        self._alone, self._beside = _Rate(), _Rate()
        self._decode_s = 0.0

    def decide(
        self,
        request: Request,
        start_token: int,
        end_token: int,
        page_bytes: int,
        companion_pages: int = 0,
    ) -> FillDecision:
        """Decides for a fill of [start_token, end_token), which begins after the request's pages.
        `companion_pages` more pages are written after its last step.
        """
        num_local = request.num_tokens - 1 - request.num_computed - request.held.num_partial_tokens
        if self._local_max is not None:
            return FillDecision(num_local > self._local_max, None, None)
        candidate = request.sources.candidates[0]
        if not (candidate.tokens_per_second and self._bytes_per_s):
            return FillDecision(True, None, None)
        load = self.local_load()
        may_delay = self._worth > 0 or not load.num_running
        if not self._alone.tokens_per_s and num_local <= MAX_TRIED_TOKENS:
            is_measurable = num_local >= MIN_MEASURED_TOKENS
            is_tried = may_delay and is_measurable and self._num_tries < MAX_TRIES
            self._num_tries += is_tried
            return FillDecision(not is_tried, None, None)
        num_pages = (end_token - start_token) // self._page_size
        to_compute = max(0, end_token - candidate.match_tokens)
        work_s = (candidate.queued_tokens + to_compute) / candidate.tokens_per_second
        num_bytes = self._exposed_bytes(num_pages * page_bytes, to_compute)
        work_s += (num_bytes + companion_pages * page_bytes) / self._bytes_per_s
        rate = self._rate_beside(load, num_local, candidate.tokens_per_second)
        local_s = self._computing_s(num_local, load, rate) + self._local_rest_s
        remote_s = work_s + _known(self._rests) + _known(self._tails)
        weighed_s = local_s + self._weighed_delay_s(num_local / rate, load)
        is_remote = remote_s < weighed_s
        best_s, cost_s = min(remote_s, weighed_s), abs(remote_s - weighed_s)
        is_measurable = load.num_running > 0 and num_local >= MIN_MEASURED_TOKENS
        is_unknown = is_measurable and not self._beside.tokens_per_s
        if is_remote and is_unknown and local_s <= MAX_TRIED_FACTOR * remote_s:
            may_try, cost_s = may_delay, 0.0  # With so wrong a rate, the cost would be wrong too.
        elif is_remote:
            may_try = may_delay and (num_local <= MAX_TRIED_TOKENS or not load.num_running)
        else:
            may_try = to_compute <= MAX_WASTED * num_local
        if may_try:
            trials = self._local if is_remote else self._remote
            is_remote ^= trials.is_due(best_s, cost_s)
        queue_s = candidate.queued_tokens / candidate.tokens_per_second
        is_overflow = not is_remote and remote_s - queue_s < weighed_s
        return FillDecision(is_remote, remote_s, local_s, is_overflow)

    def _rate_beside(self, load: LocalLoad, num_tokens: int, filler_rate: float) -> float:
        step_tokens = min(num_tokens, load.chunk_tokens)
        if load.num_running:
            step_tokens = min(step_tokens, load.step_tokens)
        alone = self._alone.of(step_tokens, STAND_IN * filler_rate)
        return self._beside.of(step_tokens, alone) if load.num_running else alone

    def _computing_s(self, num_tokens: int, load: LocalLoad, rate: float) -> float:
        num_tokens += load.queued_tokens
        num_steps = math.ceil(num_tokens / load.step_tokens) if load.num_running else 0
        return num_tokens / rate + num_steps * self._decode_s

    def _weighed_delay_s(self, added_s: float, load: LocalLoad) -> float:
        """Delay of all running requests by a remainder, in seconds of delay of its first token."""
        if not load.num_running:
            return 0.0
        return load.num_running * added_s / self._worth if self._worth else math.inf

    def _exposed_bytes(self, num_bytes: int, to_compute: int) -> int:
        """Bytes that are still to be moved when the last of them is computed."""
        return min(num_bytes, self._step_bytes) if to_compute and self._step_bytes else num_bytes

    def observe(self, record: FillRecord, duration_s: float) -> None:
        """Updates the bandwidth (bytes over their time in transit) and the rest of the time from a
        finished fill. `duration_s` counts from the request for the fill to the acceptance of its
        last page.
        """
        under_way = record.last_write_complete_s - record.first_write_posted_s
        seconds = under_way if 0 < under_way <= duration_s else duration_s
        if not record.bytes or seconds <= 0:
            return
        is_at_once = record.first_write_posted_s >= record.last_chunk_computed_s
        if is_at_once or not self._bytes_per_s:  # Otherwise the time includes computing.
            self._bytes_per_s = _smooth(self._bytes_per_s, record.bytes / seconds)
        if is_at_once:
            self._step_bytes = max(self._step_bytes, record.bytes)
        exposed = self._exposed_bytes(record.bytes, record.computed_tokens)
        # The filler's queue and rate predict the time of queueing and computing.
        handed_over_s = duration_s - record.last_chunk_computed_s
        self._rests.append(max(0.0, handed_over_s - exposed / self._bytes_per_s))

    def observe_first_token(self, timeline: Timeline) -> None:
        """Updates the tail, or the local rest, from a request that has its first token."""
        first_s, admitted_s = timeline.first_token_s, timeline.admitted_s
        if first_s is None or admitted_s is None or timeline.num_preemptions:
            return
        took_s = first_s - admitted_s
        if not timeline.fills:
            forecast_s = timeline.local_cost_s
            if forecast_s is not None:
                # One late step must not decide for long.
                error_s = max(-forecast_s, min(forecast_s, took_s - forecast_s))
                self._local_rest_s = max(0.0, self._local_rest_s + SMOOTHING * error_s)
            return
        fill = timeline.fills[-1]
        if len(timeline.fills) == 1 and fill.source == "prefill" and not fill.failure:
            self._tails.append(max(0.0, took_s - (fill.end_s - fill.start_s)))

    def observe_local(self, num_tokens: int, duration_s: float) -> None:
        if num_tokens and duration_s > 0:
            self._alone.observe(num_tokens, duration_s)

    def observe_decode(self, duration_s: float) -> None:
        """Updates the time of decodes alone from a step without prompts."""
        self._decode_s = _smooth(self._decode_s, duration_s)

    def observe_beside(self, num_tokens: int, duration_s: float) -> None:
        """Updates the time that prompts add from a step with both prompts and decodes. The known
        time of decodes is subtracted from `duration_s`.
        """
        added_s = max(duration_s - self._decode_s, MIN_ADDED_SHARE * duration_s)
        if num_tokens and added_s > 0:
            self._beside.observe(num_tokens, added_s)

    def tokens_within(self, duration_s: float) -> int:
        """Prompt tokens that add at most this time to a step of decodes, in whole pages. A minimum
        is always allowed.
        """
        least = -(-MIN_MEASURED_TOKENS // self._page_size)
        rate = self._beside.tokens_per_s or self._alone.tokens_per_s
        num_pages = int(rate * duration_s) // self._page_size
        return max(least, num_pages) * self._page_size

    @property
    def tokens_per_s_beside(self) -> float:
        """Prompt tokens per second of the time that they add to a step with decodes; 0: unknown."""
        return self._beside.tokens_per_s

    @property
    def decode_s(self) -> float:
        """Duration of a step of decodes alone, seconds; 0: unknown."""
        return self._decode_s

    @property
    def local_tokens_per_s(self) -> float:
        """Measured local prefill rate; 0: unknown."""
        return self._alone.tokens_per_s


def _known(seconds: deque[float]) -> float:
    """Median of the measurements; 0 if there are too few."""
    return median(seconds) if len(seconds) >= MIN_RESTS else 0.0


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else (1 - SMOOTHING) * old + SMOOTHING * new
