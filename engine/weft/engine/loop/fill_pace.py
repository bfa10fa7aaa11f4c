"""Leaves cores to the prefill workers that share them."""

from __future__ import annotations

from weft.engine.scheduler.scheduler import Scheduler


class FillPace:
    """Holds back steps of running requests while prompts are filled.

    On a CPU a step takes its cores from prefill workers on the same host, and a first token that
    waits for them comes later by the time of each step. So such steps leave the prompts as much
    time between two as prompts of this engine's own may add to one. A prompt that this engine has
    to compute, if only its last token, ends the pause.

    Args:
        pause_s: Length of the pause, in seconds; 0: there is none.
    """

    def __init__(self, scheduler: Scheduler, pause_s: float) -> None:
        self._scheduler = scheduler
        self._pause_s = pause_s
        self._until = 0.0

    def stepped(self, now: float) -> None:
        """Notes the end of a step."""
        self._until = now + self._pause_s

    def left_s(self, now: float) -> float:
        """Seconds for which no step may begin."""
        scheduler = self._scheduler
        if not scheduler.filling or scheduler.prefilling:
            return 0.0
        return max(0.0, self._until - now)
