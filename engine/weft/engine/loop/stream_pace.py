"""Decides when the next tokens of running samples leave the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.contract.clock import Clock
from weft.contract.submits import GatewayBatch

MANY_SAMPLES = 8
"""With fewer samples, each token leaves at once."""
SAMPLE_S = 3e-3
"""Processor time of the engine, per sample, for which tokens gather. Passing one sample's tokens on
to its client takes less than a tenth of it.
"""
MAX_INTERVAL_S = 0.1
"""Longest time for which tokens gather, even if the engine gets little processor time."""


class StreamPace:
    """Lets next tokens gather for a time, so that they go out in fewer messages.

    Processes that pass messages on take processor time from an engine that computes on the same
    cores. First tokens, ends and the like never wait, and the gathered tokens go out with them.

    Args:
        interval_s: Shortest time between two messages of which the second has nothing but next
            tokens. None: chosen so that passing tokens on takes little time compared with computing
            them.
        computed_s: Processor time of the engine so far, in seconds.
    """

    def __init__(
        self, interval_s: float | None, clock: Clock, computed_s: Clock = time.process_time
    ) -> None:
        self._interval_s = interval_s
        self._clock, self._computed_s = clock, computed_s
        self._went_at = self._had_computed_s = 0.0

    def should_flush(self, batches: Sequence[GatewayBatch], num_samples: int) -> bool:
        """Whether `batches`, the gathered ones, oldest first, go out now."""
        if not batches or self._interval_s == 0.0:
            return True
        now, computed_s = self._clock(), self._computed_s()
        passed_s = now - self._went_at
        if self._interval_s is not None:
            waits = passed_s < self._interval_s
        else:
            is_little = computed_s - self._had_computed_s < num_samples * SAMPLE_S
            waits = num_samples >= MANY_SAMPLES and is_little and passed_s < MAX_INTERVAL_S
        if waits and all(batch.may_wait for batch in batches):
            return False
        self._went_at, self._had_computed_s = now, computed_s
        return True
