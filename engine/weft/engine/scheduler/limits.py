"""Budgets of a step and bounds of the queues."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.config import EngineConfig


class SchedulerLimits(NamedTuple):
    """What the scheduler keeps to."""

    page_size: int
    max_step_tokens: int
    chunk_tokens: int
    max_running_requests: int
    by_priority: bool = False
    """Priorities count, for the order of prompts and for who is pre-empted."""
    preemption_threshold: int | None = None
    """A running request makes room for a waiting one that is so many levels more urgent; None: it
    never does."""

    decodes_beside: int = 0
    """Tokens of running requests that do not count towards `max_step_tokens`."""

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulerLimits:
        """Those of an engine."""
        by_priority = config.scheduling_policy == "priority"
        return cls(
            config.page_size,
            config.max_step_tokens,
            config.prefill_chunk_tokens,
            config.max_running_requests,
            by_priority=by_priority,
            preemption_threshold=config.preemption_threshold if by_priority else None,
            decodes_beside=config.decodes_beside,
        )
