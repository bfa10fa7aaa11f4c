"""Products in NVFP4, which become floats at load."""

from __future__ import annotations

import torch
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import QuantisedScheme, check_scales, one_scale
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.int_groups import nvfp4_floats

_GROUP = 16
_PACKED, _GLOBAL, _FACTOR = "weight_packed", "weight_global_scale", "weight_scale_2"
_OF_INPUTS = ("input_scale", "input_global_scale")


class Nvfp4Scheme(QuantisedScheme):
    """A `Scheme` of weights in e2m1, with a scale in e4m3 for 16 columns and one for all.

    compressed-tensors has `weight_packed`, uint8 [rows, columns / 2], `weight_scale`, [rows,
    columns / 16], and `weight_global_scale`, by which those are divided; ModelOpt has `weight`,
    `weight_scale` and the factor `weight_scale_2`. Scales of inputs are not used.
    """

    def matrix(self, spec: LinearSpec, weights: Weights) -> torch.Tensor:
        for name in spec.modules:
            for scale in _OF_INPUTS:
                if weights.has(f"{name}.{scale}"):
                    one_scale(f"{name}.{scale}", weights)
        return torch.cat([self._part(part, spec, weights) for part in spec.weights(weights.shard)])

    def made(self, matrix: torch.Tensor) -> torch.Tensor:
        raise ValueError("NVFP4 is not made at load")

    def ignores_name(self, name: str, weights: Weights) -> bool:
        if weights.shape_of(f"{name}.{_PACKED}") is not None:
            return False
        found = weights.dtype_of(f"{name}.weight")
        if found is not None:
            return found != torch.uint8
        return self.quantization.ignores(weights.full_name(name))

    def _part(self, part: TensorSlice, spec: LinearSpec, weights: Weights) -> torch.Tensor:
        """A projection's share, [rows, columns]."""
        name, (rows, columns) = part.name.removesuffix(".weight"), part.shape
        if columns % _GROUP:
            raise ModelError(
                f"{weights.full_name(name)}: {columns} columns are no multiple of {_GROUP}, which "
                "NVFP4 needs"
            )
        is_packed = weights.shape_of(f"{name}.{_PACKED}") is not None
        packed = f"{name}.{_PACKED if is_packed else 'weight'}"
        whole = one_scale(f"{name}.{_GLOBAL if is_packed else _FACTOR}", weights)
        own_rows, own_columns = part.slices
        data, scales = (
            weights.tensor(TensorSlice(of, (rows, columns // per), (own_rows,)), dtype)
            for of, per, dtype in (
                (packed, 2, torch.uint8),
                (f"{name}.weight_scale", _GROUP, FP8),
            )
        )
        wide = scales.float()
        # All that is read after a missing tensor is zero, and its lack is told at the end.
        factors = torch.where(wide == 0, wide, wide / whole) if is_packed else wide * whole
        check_scales(factors, spec, weights, "scale")
        return nvfp4_floats(data, factors)[:, own_columns].to(weights.dtype).contiguous()
