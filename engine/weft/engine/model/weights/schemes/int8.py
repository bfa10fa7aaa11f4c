"""Products in int8 with one scale for each row of their weights."""

from __future__ import annotations

import torch
from weft.engine.model.weights.schemes.base import (
    Matrix,
    QuantisedScheme,
    check_scales,
    named_errors,
)
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels
from weft.kernels.shared.formats.rotated import BLOCK, multiplies_rotated, quantise_rotated


class Int8Scheme(QuantisedScheme):
    """A `Scheme` of int8 weights: the checkpoint's, or made of its floats.

    Checkpoints have them in the layout of compressed-tensors' int-quantized: `weight`, int8 [rows,
    columns], and `weight_scale`, [rows, 1]. At load, each row that a rank has is rounded by itself.
    Where the machine multiplies weights with rows in int8, the weights are rotated before, except
    in experts, gates and the LM head.
    """

    def fingerprint(self, dtype: torch.dtype, device: torch.device) -> bytes:
        own = super().fingerprint(dtype, device)
        # Rotated matrices are rounded to other numbers, so pages differ between machines.
        is_rotated = self.is_made_at_load and multiplies_rotated(dtype, device, BLOCK)
        return own + b" hadamard" if is_rotated else own

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        # compressed-tensors leaves the LM head in floats. Reading one in another format fails.
        if not self.is_made_at_load:
            return super().head(matrix, weights)
        return pack_linear(self.make(matrix, weights), None, weights.arena, weights.dtype)

    def matrix(self, spec: LinearSpec, weights: Weights) -> Int8Channels:
        data = weights.read(spec.weights(weights.shard), dtype=torch.int8)
        scales = weights.read(spec.channel_scales(weights.shard), dtype=torch.float32)[:, 0]
        check_scales(scales, spec, weights, "weight_scale")
        return Int8Channels(data, scales)

    def made(self, matrix: torch.Tensor) -> Int8Channels:
        return quantise_channels(matrix)

    def made_linear(self, whole: torch.Tensor, spec: LinearSpec, weights: Weights) -> Matrix:
        own = spec.columns_of(weights.shard)
        takes_rows = own.start % BLOCK == 0 and multiplies_rotated(
            weights.dtype, weights.device, own.stop - own.start
        )
        if spec.is_gate or not takes_rows:
            return super().made_linear(whole, spec, weights)
        with named_errors(weights):
            return quantise_rotated(whole).columns(own)
