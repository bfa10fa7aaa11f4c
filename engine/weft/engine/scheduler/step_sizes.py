"""Cuts prompts so that steps on a GPU fill the size to which they are padded."""

from __future__ import annotations

from collections.abc import Sequence

_MIN_ROUNDED = 256
_MAX_LOST_SHARE = 8
"""Largest share of a budget that may be lost, and only from a certain size on."""


def fitting_budget(num_tokens: int, budget: int, sizes: Sequence[int]) -> int:
    """Prompt tokens that fill a captured step, given its other tokens.

    A padded row takes as long as a real one, so a step of the nearest captured size takes no longer
    than a smaller step that is padded to it.

    Args:
        num_tokens: Number of tokens already in the step.
        budget: Prompt tokens that the step may bring.
        sizes: Token counts of the captured steps.

    Returns:
        The number nearest to `budget` that needs no padding, if it is not much less; else `budget`.
    """
    least = budget - budget // _MAX_LOST_SHARE if budget >= _MIN_ROUNDED else budget
    fitting = [size - num_tokens for size in sizes if size - num_tokens >= least]
    return min(fitting, key=lambda tokens: abs(tokens - budget), default=budget)
