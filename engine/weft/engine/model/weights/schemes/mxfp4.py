"""Experts in MXFP4, as in gpt-oss. All other weights are in floats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.checkpoint.quantization import Quantization
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.plain import PlainScheme, apart, packed_experts
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.spec import PackableMatrix
from weft.kernels.ops.moe.pack import can_widen
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.kernels.shared.formats.int_groups import MXFP4_GROUP, mxfp4_groups


class Mxfp4Scheme(PlainScheme):
    """A `Scheme` of experts in MXFP4, which on GPUs become floats at load.

    Checkpoints have `<product>_blocks`, [experts, rows, columns / 32, 16], and `<product>_scales`,
    [experts, rows, columns / 32], both uint8.
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def fingerprint(self, dtype: torch.dtype, device: torch.device) -> bytes:
        return self._quantization.fingerprint()

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        return packed_experts(self._experts(spec, weights), spec, weights)

    def _experts(
        self, spec: ExpertSpec, weights: Weights
    ) -> Iterator[tuple[PackableMatrix, PackableMatrix]]:
        gate_up, down = spec.stacked
        for number in spec.numbers:
            yield (
                self._matrix(gate_up, spec.gate_up, number, spec, weights),
                self._matrix(down, spec.down, number, spec, weights),
            )

    def _matrix(
        self, name: str, product: LinearSpec, number: int, spec: ExpertSpec, weights: Weights
    ) -> PackableMatrix:
        if product.in_features % MXFP4_GROUP:
            raise ModelError(
                f"{weights.full_name(name)}: {product.in_features} columns are no multiple of "
                f"{MXFP4_GROUP}, which MXFP4 needs"
            )
        shape = (spec.num_experts, sum(product.rows), product.in_features // MXFP4_GROUP)
        try:
            own = product.columns_of(weights.shard)
            groups = slice(own.start // MXFP4_GROUP, -(-own.stop // MXFP4_GROUP))
            blocks, scales = (
                product.rows_of(
                    apart(weights.tensor(part, torch.uint8), spec, product), weights.shard
                )[:, groups]
                for part in (
                    TensorSlice(f"{name}_blocks", (*shape, MXFP4_GROUP // 2), (number,)),
                    TensorSlice(f"{name}_scales", shape, (number,)),
                )
            )
            matrix = mxfp4_groups(blocks, scales)
            if own.start % MXFP4_GROUP == 0 and own.stop % MXFP4_GROUP == 0:
                return matrix
            if not can_widen(weights.device):
                raise ModelError(
                    f"{weights.full_name(name)}: the share of each of {weights.shard.size} ranks "
                    f"of {product.in_features} columns cuts a group of {MXFP4_GROUP}, which would "
                    f"take four times the memory; take ep = {weights.shard.size}"
                )
            # A rank's share that cuts a group is kept in floats.
            begin = own.start - groups.start * MXFP4_GROUP
            wide = matrix.dequantised(weights.dtype)
            return wide[:, begin : begin + own.stop - own.start].contiguous()
        except ValueError as error:
            raise ModelError(f"{weights.full_name(name)}: expert {number}: {error}") from error
