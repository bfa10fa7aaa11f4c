"""The part of a model that a process has: some layers, and a share of their products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from weft.engine.model.weights.specs import Shard
from weft.engine.parallel.dispatch import ExpertDispatch
from weft.kernels.ops.peers.spec import Peers


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """What this process has of a model, by default all, and the processes that have the rest."""

    peers: Peers | None = None
    """Ranks among which the products are divided; None: they are whole."""
    ep: int = 1
    """Ranks among which whole experts are divided; 1: they are divided like other products."""
    spare_experts: int = 0
    """Places of each rank beyond its share of whole experts."""
    stage: Stage | None = None
    """The layers of this process; None: all."""
    exchange: ExpertDispatch | None = None
    """Processes with other requests among which whole experts are divided; None: only `peers`."""

    @property
    def shard(self) -> Shard:
        return Shard.among(self.peers)

    @property
    def expert_shard(self) -> Shard:
        """The share of whole experts; all of them where experts are divided like other products."""
        if self.exchange is not None:
            return Shard(self.exchange.rank, self.exchange.size)
        return self.shard if self.ep > 1 else Shard()

    @property
    def order_of_sums(self) -> str:
        """Names the order in which ranks add up; empty: as one process does. It decides bits."""
        if self.peers is None:
            return ""
        return f"-tp{self.peers.size}" + ("-ep" if self.ep > 1 else "")

    @property
    def links(self) -> Sequence[object]:
        """What the model reaches other processes by."""
        neighbours = None if self.stage is None else self.stage.neighbours
        return self.peers, neighbours, self.exchange

    def __str__(self) -> str:
        """In words that tell any two shares of a model apart."""
        share = f"{self.shard}, experts {self.expert_shard}"
        share += f" and {self.spare_experts}" if self.spare_experts else ""
        if self.stage is not None:
            share += f", {self.stage.layers}" + (", with a head" if self.stage.has_head else "")
        return share


WHOLE = ModelShare()
