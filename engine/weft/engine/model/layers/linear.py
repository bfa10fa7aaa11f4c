"""Linear layers over packed weights."""

from __future__ import annotations

import torch
from weft.kernels.linear import LinearWeight, gate_up_silu, linear, weight_rows
from weft.kernels.lora import LoraAddition


class Linear:
    """One or more projections of the same input, computed as one matrix product."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        lora: LoraAddition | None = None,
    ) -> torch.Tensor:
        """[M, in_features] -> [M, sum(rows)], plus `residual` and what adapters add if given."""
        return linear(x, self.weight, residual, lora=lora)


class GateUp:
    """Gate and up projection of a gated MLP with its SiLU."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, lora: LoraAddition | None = None) -> torch.Tensor:
        """[M, in_features] -> silu(gate) * up, [M, inner]; adapters add to gate and up."""
        return gate_up_silu(x, self.weight, lora)


class LMHead:
    """The language-model head: hidden states to logits."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, hidden: torch.Tensor, lora: LoraAddition | None = None) -> torch.Tensor:
        """[L, hidden] -> [L, vocab] float32, with what these L tokens' adapters add."""
        return linear(hidden, self.weight, out_dtype=torch.float32, lora=lora)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the weight's rows [N, hidden] of N tokens, ids [N] int64 on its device."""
        return weight_rows(self.weight, token_ids)
