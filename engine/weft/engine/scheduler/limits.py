"""Budgets of a step and limits of the queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.base.config import EngineConfig

_MIN_ROUNDED = 256
_MAX_LOST_SHARE = 8
"""One part in this many is the most that rounding may take off a budget of `_MIN_ROUNDED` tokens or
more.
"""


class SchedulerLimits(NamedTuple):
    """Budgets of a step and limits of the queues, as the scheduler reads them."""

    page_size: int
    max_step_tokens: int
    chunk_tokens: int
    max_running_requests: int
    by_priority: bool = False
    """Whether priorities determine the order of prompts and of preemption."""
    preemption_threshold: int | None = None
    """Levels by which a waiting request must be more urgent to preempt a running one;
    None: never.
    """

    decodes_beside: int = 0
    """Rows of running requests that do not count towards `max_step_tokens`."""
    shared_step_tokens: int | None = None
    """Prompt tokens of a step up to which further prompts join the first one; None: as
    many as fit.
    """
    last_piece_tokens: int = 0
    """Tokens left for the last step of a long prompt that is computed for another worker."""
    max_tokens_in_flight: int | None = None
    """Most tokens, computed for other workers, that are admitted and have not left; None: no limit.
    """
    step_sizes: Sequence[int] = ()
    """Token counts that steps with prompts are padded to; empty: they are not padded."""
    has_whole_prompts: bool = False
    """Whether a prompt is computed in one step or not at all."""
    has_tiers: bool = False
    """Whether the engine's own tiers may bring pages that requests lack."""
    num_lanes: int = 1
    """Steps that may be under way at once (`ExecutorFacts.num_lanes`)."""
    least_piece_tokens: int = 0
    """Prompt tokens that a step may have in any case, where there are several lanes."""
    needs_lead: bool = False
    """Whether a chunk needs the hidden state of the position before it, which its slot may lack."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        step_sizes: Sequence[int],
        whole_prompt_tokens: int = 0,
        last_piece_tokens: int = 0,
        num_lanes: int = 1,
        least_piece_tokens: int = 0,
    ) -> SchedulerLimits:
        """The limits that follow from an engine's settings and its captured steps.

        Args:
            step_sizes: Token counts that steps with prompts are padded to.
            whole_prompt_tokens: The longest prompt, if prompts are not cut; 0: they are cut.
            last_piece_tokens: Default where the settings say nothing.
        """
        own_last = config.last_piece_tokens
        whole = whole_prompt_tokens
        by_priority = config.scheduling_policy == "priority"
        return cls(
            config.page_size,
            max(config.max_step_tokens, whole),
            whole or config.prefill_chunk_tokens,
            config.max_running_requests,
            by_priority=by_priority,
            preemption_threshold=config.preemption_threshold if by_priority else None,
            decodes_beside=config.decodes_beside,
            shared_step_tokens=config.shared_step_tokens,
            last_piece_tokens=last_piece_tokens if own_last is None else own_last,
            max_tokens_in_flight=config.max_tokens_in_flight,
            step_sizes=step_sizes,
            has_whole_prompts=whole > 0,
            has_tiers=config.has_tiers,
            num_lanes=num_lanes,
            least_piece_tokens=least_piece_tokens,
            needs_lead=config.has_head,
        )


def fitting_budget(num_tokens: int, budget: int, sizes: Sequence[int]) -> int:
    """Prompt tokens that fill a captured step, given its other tokens.

    A padded row takes as long as a real one, so a step of the nearest captured size takes no longer
    than a smaller step that is padded to it.

    Args:
        num_tokens: Number of tokens already in the step.
        budget: Prompt tokens that the step may bring.

    Returns:
        The number nearest to `budget` that needs no padding, if it is not much less; else `budget`.
    """
    least = budget - budget // _MAX_LOST_SHARE if budget >= _MIN_ROUNDED else budget
    fitting = [size - num_tokens for size in sizes if size - num_tokens >= least]
    return min(fitting, key=lambda tokens: abs(tokens - budget), default=budget)
