"""Parameters of a checkpoint with changes added to some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice, Wrapped


class ChangedWeights(Wrapped):
    """A reader that adds changes to what it reads.

    Args:
        reader: The parameters.
        changes: By full name, of the parameter's shape, which is added in float32.
    """

    def __init__(self, reader: CheckpointReader, changes: Mapping[str, torch.Tensor]) -> None:
        super().__init__(reader)
        self._changes = changes

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """See `CheckpointReader.read_into`.

        Raises:
            ValueError: A change has another shape.
        """
        self._reader.read_into(part, out)
        change = self._changes.get(part.name)
        if change is None:
            return
        if change.shape != part.shape:
            raise ValueError(f"{part.name}: {tuple(change.shape)} cannot change {part.shape}")
        out.copy_(out.float() + change[part.slices].to(out.device))
