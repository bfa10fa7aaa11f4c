"""Loading of layer parameters: looked up by Hugging Face name, converted and fused on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.kernels.memory import WeightArena


class Weights:
    """The parameters below one prefix of the names, such as `model.layers.3.mlp.`."""

    def __init__(
        self,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        *,
        arena: WeightArena | None = None,
        prefix: str = "",
    ) -> None:
        """Parameters as layers get them.

        Args:
            reader: The checkpoint.
            dtype: What the layers compute in.
            device: Where the layers live.
            arena: See `Weights.arena`; None: one of its own.
            prefix: Names begin with.
        """
        self._reader = reader
        self._prefix = prefix
        self.dtype = dtype
        self.device = device
        self.arena = arena or WeightArena()
        """Arena for the weights that layers pack; one for the whole model."""

    def at(self, name: str | int) -> Weights:
        """The parameters of the submodule `name`."""
        prefix = f"{self._prefix}{name}."
        return Weights(self._reader, self.dtype, self.device, arena=self.arena, prefix=prefix)

    def has(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return self._reader.has(self._prefix + name)

    def part(self, name: str, index: int, count: int, *shape: int) -> torch.Tensor:
        """Entry `index` of a parameter of shape [count, *shape]."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._read(TensorSlice(name, (count, *shape), (index,)), out)
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
            self._read(TensorSlice(name, tuple(part.shape)), part)
        zeros.zero_()
        return out

    def table(self, name: str, count: int) -> torch.Tensor:
        """Reads whole numbers: [count] int64 on the host; true counts as 1."""
        out = torch.zeros(count, dtype=torch.int64)
        self._read(TensorSlice(name, (count,)), out)
        return out

    def _read(self, part: TensorSlice, out: torch.Tensor) -> None:
        self._reader.read_into(part._replace(name=self._prefix + part.name), out)
