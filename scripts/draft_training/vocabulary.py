"""Which tokens a head can draft: the frequent ones, and all that end or part texts."""

from __future__ import annotations

from collections.abc import Collection

import torch


def choose(counts: torch.Tensor, size: int, always: Collection[int]) -> torch.Tensor:
    """The draft vocabulary.

    Args:
        counts: int64 [vocab]: how often the target wrote each token.
        size: Tokens to choose; more than the vocabulary: all.
        always: Tokens that are taken whatever their count.

    Returns:
        int64 [size], rising.
    """
    ranked = counts.clone()
    ranked[torch.tensor(sorted(always), dtype=torch.int64)] = counts.max() + 1
    # Stable: among equals the lower ids, which are the more frequent ones of a BPE.
    order = ranked.argsort(descending=True, stable=True)
    return order[: min(size, len(counts))].sort().values


def coverage(counts: torch.Tensor, token_ids: torch.Tensor) -> float:
    """Share of what the target wrote that the vocabulary holds."""
    return float(counts[token_ids].sum() / counts.sum().clamp(min=1))
