"""When the next tokens of running samples leave the engine."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base.clock import Clock
from weft.engine.protocol.submits import GatewayBatch

MANY_SAMPLES = 8
"""Fewer samples than this get each token at once."""
SAMPLE_S = 2e-3
"""Core-seconds for which tokens gather, for each sample. The way of a message's tokens to a client
takes a tenth of this on the cores of one machine.
"""
MAX_INTERVAL_S = 0.05


class StreamPace:
    """Lets next tokens gather for a time, so that they go out in fewer messages.

    Processes that pass messages on take processor time from an engine that computes on the same
    cores. First tokens, ends and the like never wait, and take along what has gathered.

    Args:
        interval_s: Shortest time between two messages of which the second has nothing but next
            tokens; None: by the number of samples, so that messages take little of the cores' time.
        num_cores: Cores that the engine computes on.
        clock: Monotonic seconds.
    """

    def __init__(self, interval_s: float | None, num_cores: int, clock: Clock) -> None:
        self._interval_s = interval_s
        self._sample_s = SAMPLE_S / num_cores
        self._clock = clock
        self._went_at = 0.0

    def goes(self, batches: Sequence[GatewayBatch], num_samples: int) -> bool:
        """Whether what has gathered goes out now.

        Args:
            batches: What has gathered, oldest first.
            num_samples: Number of running samples.
        """
        interval_s = self._interval_s
        if interval_s is None:
            is_many = num_samples >= MANY_SAMPLES
            interval_s = min(MAX_INTERVAL_S, num_samples * self._sample_s) if is_many else 0.0
        if not (interval_s and batches):
            return True
        now = self._clock()
        if now - self._went_at < interval_s and all(batch.may_wait for batch in batches):
            return False
        self._went_at = now
        return True
