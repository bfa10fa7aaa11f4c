"""Linear layers: packed once, several checkpoint tensors fused into one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import (
    LinearWeight,
    gate_up_silu,
    linear,
    pack_gate_up,
    pack_linear,
    weight_rows,
)
from weft.kernels.lora import LoraAddition
from weft.kernels.memory import WeightArena


class Linear:
    """One or more projections of the same input, computed as one matrix product."""

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        rows: Sequence[int],
        bias: bool,
    ) -> None:
        """Reads and packs the projections.

        Args:
            weights: Parameters of the module that the projections belong to.
            names: Submodules, in the order of the output's columns.
            in_features: Width of the input.
            rows: Width of each projection's output.
            bias: Whether each has a bias.
        """
        weight, biases = _read(weights, names, in_features, rows, bias)
        self.weight = pack_linear(weight, biases, weights.arena)

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

    def __init__(
        self, weights: Weights, names: Sequence[str], in_features: int, inner: int, bias: bool
    ) -> None:
        """Reads and packs both projections.

        Args:
            weights: Parameters of the MLP.
            names: Submodules of the gate and of the up projection.
            in_features: Width of the input.
            inner: Width of each projection's output.
            bias: Whether each has a bias.
        """
        weight, biases = _read(weights, names, in_features, (inner, inner), bias)
        self.weight = pack_gate_up(weight, biases, weights.arena)

    def __call__(self, x: torch.Tensor, lora: LoraAddition | None = None) -> torch.Tensor:
        """[M, in_features] -> silu(gate) * up, [M, inner]; adapters add to gate and up."""
        return gate_up_silu(x, self.weight, lora)


class LMHead:
    """The language-model head: hidden states to logits."""

    def __init__(self, weight: torch.Tensor, arena: WeightArena) -> None:
        """Packs `weight` [vocab, hidden], which is not changed, into `arena`."""
        self.weight: LinearWeight = pack_linear(weight, arena=arena)

    def __call__(self, hidden: torch.Tensor, lora: LoraAddition | None = None) -> torch.Tensor:
        """[L, hidden] -> [L, vocab] float32, with what these L tokens' adapters add."""
        return linear(hidden, self.weight, out_dtype=torch.float32, lora=lora)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the weight's rows [N, hidden] of N tokens, ids [N] int64 on its device."""
        return weight_rows(self.weight, token_ids)


def _read(
    weights: Weights, names: Sequence[str], in_features: int, rows: Sequence[int], bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = weights.fused([f"{name}.weight" for name in names], rows, in_features)
    if not bias:
        return weight, None
    return weight, weights.fused([f"{name}.bias" for name in names], rows)
