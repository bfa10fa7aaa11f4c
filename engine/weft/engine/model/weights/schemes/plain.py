"""Float weights, each projection a tensor [rows, columns] of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import LinearWeight, pack_gate_up, pack_linear
from weft.kernels.moe import ExpertWeights, pack_experts


class PlainScheme:
    """A `Scheme` of weights that are used as they are, in the dtype that layers compute in.

    Experts are tensors of their own, by number, or stacked in one tensor a product.
    """

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        """See `Scheme.linear`."""
        pack = pack_gate_up if spec.is_gated else pack_linear
        weight = weights.read(spec.weights(weights.shard))
        return pack(weight, read_bias(spec, weights), weights.arena)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        """See `Scheme.experts`."""
        return pack_experts(read_experts(spec, weights), spec.num_experts, weights.arena)

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        """See `Scheme.head`."""
        return pack_linear(matrix, arena=weights.arena)

    def fingerprint(self) -> bytes:
        """See `Scheme.fingerprint`."""
        return b""


def read_bias(spec: LinearSpec, weights: Weights) -> torch.Tensor | None:
    """The shard of a product's bias, [rows], in the model's dtype; None if it has none."""
    if not spec.bias:
        return None
    bias = weights.read(spec.biases(weights.shard))
    if spec.split == "in" and weights.shard.rank > 0:
        bias.zero_()  # Results of all ranks are added up.
    return bias


def read_experts(spec: ExpertSpec, weights: Weights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The shard of each expert's weights, gate with up projection and down projection."""
    count, shard, (gate_up, down) = spec.num_experts, weights.shard, spec.stacked
    is_stacked = weights.has(gate_up)
    for number in range(count):
        if is_stacked:
            yield (
                weights.read(spec.gate_up.stacked_weights(gate_up, number, count, shard)),
                weights.read(spec.down.stacked_weights(down, number, count, shard)),
            )
        else:
            expert = weights.at(number)
            yield (
                expert.read(spec.gate_up.weights(shard)),
                expert.read(spec.down.weights(shard)),
            )
