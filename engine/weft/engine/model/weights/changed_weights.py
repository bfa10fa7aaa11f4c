"""Parameters of a checkpoint with changes added to some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice, Wrapped


class ChangedWeights(Wrapped):
    """A reader that adds changes to the parameters that it reads.

    Args:
        changes: By full name, of the parameter's shape; added in float32.
    """

    def __init__(self, reader: CheckpointReader, changes: Mapping[str, torch.Tensor]) -> None:
        super().__init__(reader)
        self._changes = changes

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Raises ValueError if a change has another shape than its parameter."""
        self._reader.read_into(part, out)
        change = self._changes.get(part.name)
        if change is None:
            return
        if change.shape != part.shape:
            raise ValueError(f"{part.name}: {tuple(change.shape)} cannot change {part.shape}")
        out.copy_(out.float() + change[part.slices].to(out.device))
