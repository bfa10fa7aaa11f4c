"""Embeddings and LM heads that adapters bring."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from weft.kernels.ops.linear.spec import LinearWeight

OWN = -1
"""Place of a slot whose adapter uses the model's own matrix."""


@dataclass(frozen=True, slots=True)
class ReplacedMatrices:
    """The matrices of all loaded adapters for the embedding, or for the LM head.

    Loading writes a matrix first, then the slot's place. Captured graphs read both at replay.
    """

    places: torch.Tensor
    """[num_slots] int32: number of the matrix that the slot's adapter uses; `OWN`: the model's own,
    as for slot 0.
    """
    on_device: torch.Tensor | None = None
    """The matrices on a GPU, [n, vocabulary, hidden], contiguous, dtype of the model."""
    on_host: list[LinearWeight | None] = field(default_factory=list)
    """The matrices on a CPU by number, from `pack_linear`."""

    def matrix_of(self, slot: int) -> LinearWeight | None:
        """The matrix of a slot on a CPU; None: the model's own."""
        place = int(self.places[slot])
        return None if place == OWN else self.on_host[place]
