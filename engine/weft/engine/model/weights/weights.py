"""Loading of layer parameters: looked up by Hugging Face name, converted and fused on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from weft.kernels.memory import WeightArena


class WeightSource(Protocol):
    """A source of parameters: a checkpoint, or random numbers for benchmarks."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""

    @property
    def device(self) -> torch.device:
        """The device that the layers live on."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copies the tensor `name`, converted to the dtype of `out`, which has its shape.

        Raises:
            ModelError: Shape or dtype in the checkpoint are not what the model needs.
        """

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """Like `read_into`, for entry `index` of a tensor whose first axis has `count` entries."""


class ChangedWeights:
    """A `WeightSource` over another one, with changes added to some parameters.

    Args:
        source: The parameters.
        changes: By full name, of the parameter's shape, which is added in float32.
    """

    def __init__(self, source: WeightSource, changes: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self._changes = changes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        """The device that the layers live on."""
        return self._source.device

    def has(self, name: str) -> bool:
        """See `WeightSource.has`."""
        return self._source.has(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """See `WeightSource.read_into`.

        Raises:
            ValueError: A change has another shape.
        """
        self._source.read_into(name, out)
        change = self._changes.get(name)
        if change is None:
            return
        if change.shape != out.shape:
            raise ValueError(f"{name}: {tuple(change.shape)} cannot change {tuple(out.shape)}")
        out.copy_(out.float() + change.to(out.device))

    def read_part_into(self, name: str, index: int, count: int, out: torch.Tensor) -> None:
        """See `WeightSource.read_part_into`; of what is changed parts cannot be had."""
        assert name not in self._changes, name
        self._source.read_part_into(name, index, count, out)


class Weights:
    """The parameters below one prefix of the names, such as `model.layers.3.mlp.`."""

    def __init__(
        self, source: WeightSource, prefix: str = "", arena: WeightArena | None = None
    ) -> None:
        self._source = source
        self._prefix = prefix
        self.arena = arena or WeightArena()
        """Arena for the weights that layers pack; one for the whole model."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        """The device that the layers live on."""
        return self._source.device

    def at(self, name: str | int) -> Weights:
        """The parameters of the submodule `name`."""
        return Weights(self._source, f"{self._prefix}{name}.", self.arena)

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return self._source.has(self._prefix + name)

    def part(self, name: str, index: int, count: int, *shape: int) -> torch.Tensor:
        """Entry `index` of a parameter of shape [count, *shape]."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._source.read_part_into(self._prefix + name, index, count, out)
        return out

    def tensor(self, name: str, *shape: int, num_zeros: int = 0) -> torch.Tensor:
        """Reads one parameter of the given shape; `num_zeros` rows of zeros follow."""
        return self.fused((name,), shape[:1], *shape[1:], num_zeros=num_zeros)

    def fused(
        self, names: Sequence[str], rows: Sequence[int], *rest: int, num_zeros: int = 0
    ) -> torch.Tensor:
        """Several parameters stacked along their first axis, each copied into its place.

        Args:
            names: Parameters, in the order in which they are stacked.
            rows: First axis of each.
            rest: Their other axes.
            num_zeros: Rows of zeros behind them.

        Returns:
            [sum(rows) + num_zeros, *rest] of the model's dtype, on its device.
        """
        size = (sum(rows) + num_zeros, *rest)
        out = torch.empty(size, dtype=self.dtype, device=self.device)
        *parts, zeros = torch.split(out, [*rows, num_zeros])
        for name, part in zip(names, parts, strict=True):
            self._source.read_into(self._prefix + name, part)
        zeros.zero_()
        return out
