"""Parameters of a checkpoint with changes added to some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice


class ChangedWeights:
    """A `CheckpointReader` over another one.

    Args:
        reader: The parameters.
        changes: By full name, of the parameter's shape, which is added in float32.
    """

    def __init__(self, reader: CheckpointReader, changes: Mapping[str, torch.Tensor]) -> None:
        self._reader = reader
        self._changes = changes

    def has(self, name: str) -> bool:
        """See `CheckpointReader.has`."""
        return self._reader.has(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See `CheckpointReader.shape_of`."""
        return self._reader.shape_of(name)

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

    def skip(self, prefix: str) -> None:
        """See `CheckpointReader.skip`."""
        self._reader.skip(prefix)

    def finish(self) -> None:
        """See `CheckpointReader.finish`."""
        self._reader.finish()
