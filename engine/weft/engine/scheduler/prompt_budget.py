"""Decides how many prompt tokens a step with running requests takes, by weighing the delay of
first tokens against the delay of next tokens.

A step that also decodes takes the time of the decodes plus that of its prompt tokens. Cutting the
prompts down to a target keeps the running requests' tokens coming. But each further step that the
prompts then need delays every waiting first token by the time of its decodes.

    delay of first tokens = first_token_weight * (waiting prompts) * (time of a step of decodes)
    delay of next tokens  = (running requests) * (time by which a full step exceeds the target)

If the first is at least the second, prompts take the whole step; else they keep to the target. So a
burst that finds few running requests is computed as fast as the device can, and a steady stream of
prompts never makes many running requests wait for a few waiting ones.

A prompt that is computed here only because the prefill workers are busy keeps to a smaller target,
the time of a step of decodes, so that it disturbs the running requests less. On a CPU it does not:
small pieces are computed slowly there, and prefill workers mostly share the CPU's cores.
"""

from __future__ import annotations

from typing import Protocol

MIN_OVERFLOW_TARGET_S = 0.012
"""Lower bound of the target of prompts that are computed here because prefill workers are busy.
Pieces that take less time than this use a GPU badly.
"""


class StepRates(Protocol):
    """Measured times of this engine's steps."""

    @property
    def tokens_per_s_beside(self) -> float:
        """Prompt tokens per second of the time that they add to a step with decodes; 0: unknown."""
        ...

    @property
    def decode_s(self) -> float:
        """Duration of a step of decodes alone, seconds; 0: unknown."""
        ...

    def tokens_within(self, duration_s: float) -> int:
        """Prompt tokens that add at most this time to a step of decodes, in whole pages."""
        ...


class PromptTokens(Protocol):
    def __call__(self, num_running: int, num_waiting: int, *, is_overflow: bool = False) -> int: ...


class PromptBudget:
    """Bounds the prompt tokens of a step that also decodes.

    Args:
        target_s: Inter-token target: time that prompts may add to a step where next tokens count
            more.
        first_token_weight: Worth of a second of delay of a first token, in seconds of delay of next
            tokens. 0: prompts always keep to the target.
        max_step_tokens: Tokens of the largest step.
        spares_running: Whether prompts that overflow keep to the smaller target.
    """

    def __init__(
        self,
        rates: StepRates,
        target_s: float,
        first_token_weight: float,
        max_step_tokens: int,
        *,
        spares_running: bool,
    ) -> None:
        self._rates = rates
        self._target_s = target_s
        self._weight = first_token_weight
        self._max_step_tokens = max_step_tokens
        self._spares_running = spares_running

    def tokens(self, num_running: int, num_waiting: int, *, is_overflow: bool = False) -> int:
        """Prompt tokens for the next step.

        Args:
            num_running: Requests that get their next token in it.
            num_waiting: Prompts that are not computed yet, whether admitted or not.
            is_overflow: The prompts are computed here because prefill workers have other work.
        """
        rates, target_s = self._rates, self._target_s
        if is_overflow and self._spares_running:
            target_s = min(target_s, max(MIN_OVERFLOW_TARGET_S, rates.decode_s))
        kept = rates.tokens_within(target_s)
        rate = rates.tokens_per_s_beside
        if kept >= self._max_step_tokens or not rate:
            return kept
        late_s = self._max_step_tokens / rate - target_s
        saved_s = self._weight * num_waiting * rates.decode_s
        return self._max_step_tokens if saved_s >= num_running * late_s else kept
