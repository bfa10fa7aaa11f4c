"""The stage of a pipeline that a process computes: consecutive layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Neighbours(Protocol):
    """The stages before and after one stage. Each step goes through all of them once, in the order
    of the steps.
    """

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The residual stream of the step's rows as it leaves the stage before, on this stage's
        device. Raises RanksLost if it does not come, or has another shape.
        """
        ...

    def send(self, stream: torch.Tensor) -> None:
        """Hands the residual stream, [T, H], to the stage after. Raises RanksLost if that is gone
        or does not take it.

        Args:
            stream: May be read after this call has returned, so nothing may overwrite it.
        """
        ...

    def close(self) -> None:
        """Gives back what this process has of the links, when no step is under way."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """The first stage embeds tokens, the last one has the final norm and the LM head."""

    number: int
    count: int
    """Stages of the pipeline."""
    layers: range
    """Indices of its layers."""
    neighbours: Neighbours | None = None
    """None: only the weights are read, and no step runs."""
    has_own_pages: bool = False
    """Whether its pages and states have room for its layers alone; else for all layers, since all
    stages share them.
    """
    has_head: bool = False
    """Whether the last stage has a further head, which also reads the embedding."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def of_pages(self, layers: Sequence[int]) -> list[int]:
        """Those of the layers whose data lie in the pages and states of this process."""
        return [layer for layer in layers if not self.has_own_pages or layer in self.layers]

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1
