"""Products in NVFP4."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.checkpoint.quantization import Quantization
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import (
    Matrix,
    QuantisedScheme,
    check_scales,
    listing,
    one_scale,
)
from weft.engine.model.weights.schemes.fp8 import Fp8Scheme
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.int_groups import (
    NVFP4_GROUP,
    IntGroups,
    join_rows,
    nvfp4_groups,
)

_PACKED, _GLOBAL, _FACTOR = "weight_packed", "weight_global_scale", "weight_scale_2"
_OF_INPUTS = ("input_scale", "input_global_scale")


class Nvfp4Scheme(QuantisedScheme):
    """A `Scheme` of weights in e2m1, with a scale in e4m3 for 16 columns and one for all.

    compressed-tensors has `weight_packed`, uint8 [rows, columns / 2], `weight_scale`, [rows,
    columns / 16], and `weight_global_scale`, by which those are divided; ModelOpt has `weight`,
    `weight_scale` and the factor `weight_scale_2`. Scales of inputs are not used. In ModelOpt's
    mixed recipes some products are in FP8, with a scale for each projection.
    """

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        fp8 = replace(quantization, format="fp8", scales="tensors", has_input_scale=True)
        self._fp8 = Fp8Scheme(fp8)

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        in_fp8 = [name for name in spec.modules if weights.dtype_of(f"{name}.weight") == FP8]
        if in_fp8 and len(in_fp8) < len(spec.modules):
            raise ModelError(
                f"{listing(spec, weights)} are one product, of which only {', '.join(in_fp8)} are "
                "in FP8"
            )
        if in_fp8:
            return self._fp8.matrix(spec, weights)
        for name in spec.modules:
            for scale in _OF_INPUTS:
                if weights.has(f"{name}.{scale}"):
                    one_scale(f"{name}.{scale}", weights)
        parts = [self._part(part, spec, weights) for part in spec.weights(weights.shard)]
        own = spec.columns_of(weights.shard)
        if own.start % NVFP4_GROUP == 0 and own.stop % NVFP4_GROUP == 0:
            return join_rows(parts)
        # A rank's share that cuts a group is kept in floats.
        begin = own.start % NVFP4_GROUP
        wide = torch.cat([part.dequantised(weights.dtype) for part in parts])
        return wide[:, begin : begin + own.stop - own.start].contiguous()

    def made(self, matrix: torch.Tensor) -> torch.Tensor:
        raise ValueError("NVFP4 is not made at load")

    def ignores_name(self, name: str, weights: Weights) -> bool:
        if weights.shape_of(f"{name}.{_PACKED}") is not None:
            return False
        found = weights.dtype_of(f"{name}.weight")
        if found is not None:
            return found not in (torch.uint8, FP8)
        return self.quantization.ignores(weights.full_name(name))

    def _part(self, part: TensorSlice, spec: LinearSpec, weights: Weights) -> IntGroups:
        """A projection's share, of columns the whole groups."""
        name, (rows, columns) = part.name.removesuffix(".weight"), part.shape
        if columns % NVFP4_GROUP:
            raise ModelError(
                f"{weights.full_name(name)}: {columns} columns are no multiple of {NVFP4_GROUP}, "
                "which NVFP4 needs"
            )
        is_packed = weights.shape_of(f"{name}.{_PACKED}") is not None
        packed = f"{name}.{_PACKED if is_packed else 'weight'}"
        factor_name = f"{name}.{_GLOBAL if is_packed else _FACTOR}"
        factor = one_scale(factor_name, weights)
        own = spec.columns_of(weights.shard)
        groups = slice(own.start // NVFP4_GROUP, -(-own.stop // NVFP4_GROUP))
        data, scales = (
            weights.tensor(TensorSlice(of, (rows, columns // per), part.slices[:1]), dtype)[
                :, groups.start * NVFP4_GROUP // per : groups.stop * NVFP4_GROUP // per
            ].contiguous()
            for of, per, dtype in (
                (packed, 2, torch.uint8),
                (f"{name}.weight_scale", NVFP4_GROUP, FP8),
            )
        )
        # All that is read after a missing tensor is zero, and its lack is told at the end.
        if is_packed and bool(scales.float().any()):
            factor = 1 / factor
        for of, what in ((factor, factor_name.rpartition(".")[2]), (scales.float(), "scale")):
            check_scales(of, spec, weights, what)
        return nvfp4_groups(data, scales, factor.repeat(len(data)))
