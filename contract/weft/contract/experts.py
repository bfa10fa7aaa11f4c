"""Commands about the experts of a worker's model, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.contract.submits import Failure

ExpertAction = Literal["start", "stop", "dump", "balance"]
"""start: count anew; stop: count no longer; dump: what was counted; balance: place anew by it."""


@dataclass(slots=True, kw_only=True)
class ExpertCommand:
    query: int
    action: ExpertAction


@dataclass(slots=True, kw_only=True)
class LayerExperts:
    """What was counted of a layer, and where its experts are."""

    layer: int
    rows: list[int]
    """Rows that chose each expert."""
    steps: list[int]
    """Steps in which some row did."""
    places: list[int] = field(default_factory=list)
    """The expert in each place, rank after rank, -1: an unused place; empty: they are not moved."""
    imbalance: float = 1.0
    """Work of the most loaded rank over the mean of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBalance:
    """How the work of a model's experts is divided among ranks."""

    imbalance: float
    """Work of the most loaded rank over the mean of all, summed over layers, in the last period
    that had enough rows; 0: none had.
    """
    num_placements: int
    """Layers that got another placement, since the start."""
    num_moved: int
    """Experts that were copied to another rank for them."""
    num_failed: int
    """Layers that kept their placement, since a copy failed."""
    problem: str = ""
    """Why the last of them did."""


@dataclass(slots=True, kw_only=True)
class ExpertState:
    is_counting: bool
    num_steps: int
    """Steps that were counted."""
    num_ranks: int
    """Ranks among which the experts are divided."""
    balance: ExpertBalance | None = None
    """None: the experts stay where they are."""
    layers: list[LayerExperts] = field(default_factory=list)
    """Of a dump alone."""


@dataclass(slots=True, kw_only=True)
class ExpertReply:
    query: int
    state: ExpertState | None
    """None: the command failed."""
    failure: Failure | None = None


def describe_experts(balance: ExpertBalance) -> str:
    """How the experts of a worker's model are divided among its ranks, in words."""
    found = f"experts: {balance.num_placements:,} placements, {balance.num_moved:,} copies"
    if balance.imbalance:
        found += f", last work of the most loaded rank {balance.imbalance:.2f} x the mean"
    if balance.num_failed:
        found += f"; {balance.num_failed:,} layers kept theirs: {balance.problem}"
    return found
