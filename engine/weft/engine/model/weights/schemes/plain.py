"""Weights in floats, each projection a tensor [rows, columns] of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight, PackableMatrix
from weft.kernels.ops.moe.pack import pack_experts, stacks_experts
from weft.kernels.ops.moe.spec import ExpertWeights


class PlainScheme:
    """A `Scheme` of weights in the dtype in which layers compute. Experts are separate tensors, by
    number, or stacked in one tensor per product.
    """

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        pack = pack_gate_up if spec.is_gated else pack_linear
        weight = weights.read_to_pack(spec.weights(weights.shard))
        return pack(weight, read_bias(spec, weights), weights.arena)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        if weights.has(spec.stacked[-1]) or not stacks_experts(weights.device):
            return packed_experts(read_experts(spec, weights), spec, weights)
        products = [part.weights(weights.shard) for part in (spec.gate_up, spec.down)]
        gate_up, down = weights.stacked(spec.numbers, products)
        return ExpertWeights.of_stacks(
            gate_up,
            down,
            is_fixed=weights.arena.is_fixed,
            gating=spec.gating,
            biases=_read_biases(spec, weights) if spec.bias else None,
            placement=weights.placement(spec),
        )

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        return pack_linear(matrix, arena=weights.arena)

    def fingerprint(self, dtype: torch.dtype, device: torch.device) -> bytes:
        return b""


def read_bias(spec: LinearSpec, weights: Weights) -> torch.Tensor | None:
    """The shard of a product's bias, [rows], in the model's dtype; None: the product has no
    bias.
    """
    if not spec.bias:
        return None
    bias = weights.read(spec.biases(weights.shard))
    if spec.split == "in" and weights.shard.rank > 0:
        bias.zero_()  # Results of all ranks are added up.
    return bias


def packed_experts(
    experts: Iterable[tuple[PackableMatrix, PackableMatrix]],
    spec: ExpertSpec,
    weights: Weights,
) -> ExpertWeights:
    """Packs experts as a spec says, with its biases."""
    return pack_experts(
        experts,
        spec.count,
        weights.arena,
        weights.dtype,
        gating=spec.gating,
        biases=_read_biases(spec, weights) if spec.bias else None,
        placement=weights.placement(spec),
    )


def read_experts(spec: ExpertSpec, weights: Weights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The shard of each expert's weights: gate and up projection as one matrix, and down
    projection.
    """
    *gate_up, down = spec.stacked
    is_stacked, own = weights.has(down), weights.shard
    parts = (spec.gate_up,) if len(gate_up) == 1 else spec.gate_up.parts
    products = zip((*gate_up, down), (*parts, spec.down), strict=True)
    if spec.is_transposed and all(
        weights.shape_of(name) == (spec.num_experts, sum(part.rows), part.in_features)
        for name, part in products
    ):
        # Newer files of such a family are not transposed.
        spec = replace(spec, is_transposed=False)
    for number in spec.numbers:
        if is_stacked:
            both = [
                _of_stack(name, part, number, spec, weights)
                for name, part in zip(gate_up, parts, strict=True)
            ]
            yield torch.cat(both), _of_stack(down, spec.down, number, spec, weights)
        else:
            expert = weights.at(number)
            yield expert.read(spec.gate_up.weights(own)), expert.read(spec.down.weights(own))


def _of_stack(
    name: str, product: LinearSpec, number: int, spec: ExpertSpec, weights: Weights
) -> torch.Tensor:
    """[rows, columns]: the shard of one expert's product, from a tensor of all experts."""
    count = spec.num_experts
    if not (spec.is_transposed or spec.is_interleaved):
        return weights.read(product.stacked_weights(name, number, count, weights.shard))
    size = (sum(product.rows), product.in_features)
    size = (size[1], size[0]) if spec.is_transposed else size
    whole = weights.tensor(TensorSlice(name, (count, *size), (number,)), weights.dtype)
    whole = whole.t() if spec.is_transposed else whole
    return product.share_of(apart(whole, spec, product), weights.shard)


def apart(rows: torch.Tensor, spec: ExpertSpec, product: LinearSpec) -> torch.Tensor:
    """Rows (the first axis) of a product, with those of gate before those of up."""
    if not (spec.is_interleaved and product.is_gated):
        return rows.contiguous()
    return torch.cat((rows[0::2], rows[1::2]))


def _read_biases(spec: ExpertSpec, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """The shard of the experts' biases, [experts, rows] each."""
    numbers = spec.numbers
    found = []
    for name, product in zip(spec.stacked, (spec.gate_up, spec.down), strict=True):
        shape = (spec.num_experts, sum(product.rows))
        part = TensorSlice(f"{name}_bias", shape)
        if not spec.spares:
            part = part._replace(slices=(slice(numbers[0], numbers[-1] + 1),))
        whole = weights.tensor(part, weights.dtype)
        whole = whole[list(numbers)] if spec.spares else whole
        ordered = apart(whole.t(), spec, product)
        own = product.rows_of(ordered, weights.shard).t().contiguous()
        if product.split == "in" and weights.shard.rank > 0:
            own.zero_()  # Results of all ranks are added up.
        found.append(own)
    return found[0], found[1]
