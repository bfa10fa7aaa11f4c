"""Steps on a GPU are padded to the next captured size: prompts are cut to fit such a size."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_ROUNDED = 256
_MOST_LOST_SHARE = 8
"""A budget loses at most this part of itself, and only from so many tokens on."""


def fitting_budget(num_tokens: int, budget: int, sizes: Sequence[int]) -> int:
    """Prompt tokens that fill a captured step beside others.

    Padding takes as long as what it stands for, so a budget in time is kept as well by the nearest
    size as by a smaller step that is padded to it.

    Args:
        num_tokens: Of the step already.
        budget: Prompt tokens that it may bring.
        sizes: Tokens of captured steps.

    Returns:
        What is nearest to `budget` without padding, and hardly less; `budget` if nothing is.
    """
    least = budget - budget // _MOST_LOST_SHARE if budget >= _LEAST_ROUNDED else budget
    fitting = [size - num_tokens for size in sizes if size - num_tokens >= least]
    return min(fitting, key=lambda tokens: abs(tokens - budget), default=budget)
