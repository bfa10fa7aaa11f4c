"""Decides when the host looks at the device to see whether the step under way has ended.

The host cannot wait for the device and for messages at once. It waits for messages, and looks at
the device from time to time. The durations of earlier steps say when the next look is worthwhile.
They can be far too long, for example after the slow first step of a process. A step that ends
unseen is then measured too long as well, since its end counts from the look, so the forecast would
stay wrong. Therefore each wait is also bounded by a share (`MOST_LATE`) of the time for which the
step has been under way, and the host sees an end late by at most that share of the step.
"""

from __future__ import annotations

WATCH_S = 2e-4
"""Shortest interval between two looks whether a step has ended."""
CLOSE_S = 3e-4
"""Seconds before the expected end of a step of decodes from which on a turn waits for it."""
MOST_LATE = 0.2
"""Longest interval between two looks, as a share of the time for which the step is under way. A
look takes some microseconds.
"""
MOST_RISE = 1.25
"""Largest factor by which one slow step raises the expected duration. If the host expects too
little, it looks once more than it had to. If it expects too much, the device is idle until the host
looks.
"""


class StepEnds:
    """Forecasts the ends of steps.

    Args:
        lead_s: Time before the expected end of a step of decodes at which the next step begins, at
            the latest. The recent time of planning and starting a step is added.
    """

    def __init__(self, lead_s: float) -> None:
        self._lead_s = lead_s
        self._plain_s = 0.0
        """Expected duration of a step of decodes alone; 0: unknown."""
        self._token_s = 0.0
        """Expected duration per token of any other step; 0: unknown."""
        self._start_s = 0.0
        """Longest recent time that the host took to plan and start a step."""

    def learn(self, duration_s: float, num_tokens: int, *, is_plain: bool) -> None:
        if is_plain:
            self._plain_s = _follow(self._plain_s, duration_s)
        elif num_tokens:
            self._token_s = _follow(self._token_s, duration_s / num_tokens)

    def learn_start(self, seconds: float) -> None:
        self._start_s = max(0.9 * self._start_s, seconds)

    def begins_in_s(self, passed_s: float, *, is_plain: bool) -> float:
        """Seconds until the next step is to begin; at most 0: now.

        Args:
            passed_s: Seconds for which the present step has been under way.
            is_plain: Whether it should take as long as a step of decodes without drafts.
        """
        lead_s = self._lead_s + 2 * self._start_s
        if not is_plain or self._plain_s <= lead_s:
            return 0.0
        return self._plain_s - lead_s - passed_s

    def rest_s(
        self, passed_s: float, num_tokens: int, *, is_plain: bool, is_followed: bool
    ) -> float:
        """Seconds until the next look; 0: the step ends so soon that the host waits for it.

        Args:
            passed_s: Seconds for which the step has been under way.
            is_plain: Whether it should take as long as a step of decodes without drafts.
            is_followed: Whether the next step has begun.
        """
        most_s = max(WATCH_S, MOST_LATE * passed_s)
        begins_in_s = 0.0 if is_followed else self.begins_in_s(passed_s, is_plain=is_plain)
        if begins_in_s > 0.0:
            return min(most_s, max(WATCH_S, begins_in_s / 2))
        if is_plain and self._plain_s:
            return min(most_s, max(0.0, self._plain_s - passed_s - CLOSE_S))
        left_s = self._token_s * num_tokens - passed_s
        return min(most_s, max(WATCH_S, 0.8 * left_s))


def _follow(known: float, new: float) -> float:
    """Updates an expected duration: it falls at once and rises slowly."""
    return min(new, MOST_RISE * known) if known else new
