"""The engine's measurements of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weft.contract.clock import Clock
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.sources.cost import MIN_MEASURED_TOKENS, FillCosts

MIN_STALE_S = 2.0
STALE_STEPS = 4
"""The loop is stale when its last turn is this many of its longest steps ago."""
UNKNOWN_STEP_S = 5.0
"""Longest assumed duration of a full step until one with a prompt has been measured."""
UNKNOWN_STALE_S = 5.0
"""Least age, in seconds, at which the loop is stale until a full step has been measured."""
RATE_WINDOW_S = 1.0


@dataclass(slots=True)
class StepCounters:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    surplus_tokens: int = 0
    """Tokens sampled for requests that had ended while the step was under way."""
    speculated_steps: int = 0
    """Steps in which drafts were verified."""
    verified_runs: int = 0
    tree_runs: int = 0
    """Requests of these steps whose drafts formed a tree."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_us: int = 0


class EngineStats:
    """Measured rates of the engine, and the duration of its longest step.

    Args:
        token_s: Seconds for each token of a small step, measured at start.
    """

    def __init__(self, clock: Clock, max_step_tokens: int, token_s: float = UNKNOWN_STEP_S) -> None:
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._counts = StepCounters()
        self._longest_step_s = 0.0
        self._full_step_s = min(UNKNOWN_STEP_S, token_s * max_step_tokens)
        self._is_measured = False
        self._last_prompt_at = -math.inf
        self._window_start = clock()
        self._window_tokens = 0
        self._window_decode_steps = 0
        self._window_decode_s = 0.0
        self._window_decodes = 0
        self._last_rate = 0.0
        """Tokens a second in the last window."""
        self.decode_step_s = 0.0
        """Mean seconds of a step with decodes, in the last window that had any."""
        self.decode_step_requests = 0.0

    def step(
        self,
        plan: Plan,
        duration_s: float,
        costs: FillCosts,
        num_surplus_tokens: int = 0,
        runs: Sequence[Run] = (),
    ) -> None:
        """Records one step, from which `costs` learns too.

        Args:
            num_surplus_tokens: Tokens sampled for requests that had ended.
            runs: Runs of requests with drafts.
        """
        num_decodes, num_prompt_tokens = len(plan.decodes) + len(runs), plan.num_chunk_tokens
        num_drafts = num_accepted = 0
        if runs:
            num_drafts = sum([run.num_drafts for run in runs])
            num_accepted = sum([len(run.tokens) - 1 for run in runs if run.tokens])
        num_tokens = num_decodes + num_drafts + num_prompt_tokens
        num_drawn = num_decodes + num_accepted + len(plan.drawing_chunks) - num_surplus_tokens
        self._counts.steps += 1
        self._counts.speculated_steps += num_drafts > 0
        if num_drafts:
            self._counts.verified_runs += sum(run.num_drafts > 0 for run in runs)
            self._counts.tree_runs += sum(run.is_tree for run in runs)
        self._counts.drafted_tokens += num_drafts
        self._counts.accepted_tokens += num_accepted
        self._counts.busy_us += int(duration_s * 1e6)
        self._counts.generated_tokens += num_drawn
        self._counts.surplus_tokens += num_surplus_tokens
        self._counts.prompt_tokens += num_prompt_tokens
        self._longest_step_s = max(self._longest_step_s * 0.999, duration_s)
        if plan.waits_for_layers:
            pass
        elif num_prompt_tokens >= MIN_MEASURED_TOKENS:
            self._observe_prompts(num_tokens, duration_s)
            # While requests decode all the time, steps with decodes are the only measurement.
            if num_decodes == 0 or not costs.local_tokens_per_s:
                costs.observe_local(num_tokens, duration_s)
            if num_decodes:
                costs.observe_beside(num_prompt_tokens, duration_s)
        elif num_decodes and not num_prompt_tokens:
            costs.observe_decode(duration_s)
        now = self._clock()
        if num_prompt_tokens:
            self._last_prompt_at = now
        if self._is_idle_at(now):
            self._window_start, self._window_tokens = now - duration_s, 0
        self._window_tokens += num_drawn
        if num_decodes:
            self._window_decode_steps += 1
            self._window_decode_s += duration_s
            self._window_decodes += num_decodes
        elapsed = now - self._window_start
        if elapsed >= RATE_WINDOW_S:
            self._end_window(elapsed)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated a second, over all requests, in the last window; 0 without steps."""
        return 0.0 if self._is_idle_at(self._clock()) else self._last_rate

    @property
    def prefilled_lately(self) -> bool:
        """Whether a step of the last two windows had prompt tokens."""
        return self._clock() - self._last_prompt_at <= 2 * RATE_WINDOW_S

    def _is_idle_at(self, now: float) -> bool:
        return now - self._window_start > 2 * RATE_WINDOW_S

    def _end_window(self, elapsed_s: float) -> None:
        self._last_rate = self._window_tokens / elapsed_s
        if num_steps := self._window_decode_steps:
            self.decode_step_s = self._window_decode_s / num_steps
            self.decode_step_requests = self._window_decodes / num_steps
        self._window_start, self._window_tokens = self._clock(), 0
        self._window_decode_steps = self._window_decodes = 0
        self._window_decode_s = 0.0

    def _observe_prompts(self, num_tokens: int, duration_s: float) -> None:
        full_step_s = duration_s / num_tokens * self._max_step_tokens
        known_s = 0.99 * self._full_step_s if self._is_measured else 0.0
        self._full_step_s, self._is_measured = max(known_s, full_step_s), True

    @property
    def stale_after_s(self) -> float:
        """Age of the loop in seconds from which the engine counts as stalled.

        It allows for the longest step that can be planned, even if none was run for long.
        """
        least_s = MIN_STALE_S if self._is_measured else UNKNOWN_STALE_S
        return max(least_s, STALE_STEPS * max(self._longest_step_s, self._full_step_s))

    def counters(self) -> dict[str, int]:
        return asdict(self._counts)
