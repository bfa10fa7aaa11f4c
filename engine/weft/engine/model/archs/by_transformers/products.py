"""Products of transformers' modules, computed as Weft's layers compute theirs."""

from __future__ import annotations

import torch
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import weight_rows
from weft.kernels.ops.linear.spec import LinearWeight


class Product(torch.nn.Module):
    """A linear module whose weight is packed."""

    def __init__(
        self,
        packed: LinearWeight,
        out_dtype: torch.dtype | None = None,
        added: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`added` is a bias beside that of `packed`, or None."""
        super().__init__()
        self.packed, self._out_dtype, self._added = packed, out_dtype, added
        self._device = device
        self._floats: torch.Tensor | None = None
        self.in_features, self.out_features = packed.in_features, packed.out_features

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] floats, for code that reads the weight beside the product; a copy."""
        if self._floats is None:
            rows = torch.arange(self.packed.out_features, device=self._device)
            self._floats = weight_rows(self.packed, rows)
        return self._floats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous().to(self.packed.dtype)
        made = linear(rows, self.packed, out_dtype=self._out_dtype)
        if self._added is not None:
            made = made + self._added
        return made.view(*x.shape[:-1], made.shape[-1])
