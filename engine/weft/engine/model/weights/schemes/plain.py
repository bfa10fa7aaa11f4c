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
        weight, bias = weights.read(spec.weights(weights.shard)), None
        if spec.bias:
            bias = weights.read(spec.biases(weights.shard))
            if spec.split == "in" and weights.shard.rank > 0:
                bias.zero_()  # Results of all ranks are added up.
        pack = pack_gate_up if spec.is_gated else pack_linear
        return pack(weight, bias, weights.arena)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        """See `Scheme.experts`."""
        return pack_experts(_experts(spec, weights), spec.num_experts, weights.arena)


def _experts(spec: ExpertSpec, weights: Weights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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
