"""Leaves cores to the prefill workers that share them."""

from __future__ import annotations

from weft.engine.scheduler.scheduler import Scheduler

MAX_PAUSE = 4
"""Longest pause, as a multiple of the target."""


class FillPace:
    """Holds back steps of running requests while prompts are filled.

    On a CPU a step takes its cores from prefill workers on the same host, and a first token that
    waits for them comes later by the time of each step. So such steps leave the prompts as much
    time between two as prompts of this engine's own may add to one, and where many first tokens
    wait for few running requests, longer, until both delays are worth the same (`PromptBudget` has
    the rule). A prompt that this engine has to compute, if only its last token, ends the pause.

    Args:
        target_s: Inter-token target, the shortest pause; 0: there are no pauses.
        first_token_weight: Worth of a second of delay of a first token, in seconds of delay of next
            tokens.
    """

    def __init__(self, scheduler: Scheduler, target_s: float, first_token_weight: float) -> None:
        self._scheduler = scheduler
        self._target_s, self._weight = target_s, first_token_weight
        self._until = 0.0

    def stepped(self, began: float, now: float) -> None:
        """Notes a step's beginning and end."""
        scheduler = self._scheduler
        worth_s = self._weight * len(scheduler.filling) * (now - began)
        more_s = worth_s / max(1, len(scheduler.running))
        self._until = now + min(self._target_s + more_s, MAX_PAUSE * self._target_s)

    def left_s(self, now: float) -> float:
        """Seconds for which no step may begin."""
        scheduler = self._scheduler
        if not scheduler.filling or scheduler.prefilling:
            return 0.0
        return max(0.0, self._until - now)
