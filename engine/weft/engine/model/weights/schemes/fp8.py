"""Products with FP8 weights."""

from __future__ import annotations

import math

import torch
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import (
    QuantisedScheme,
    check_scales,
    one_scale,
)
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.quantised import (
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Matrix,
    quantise_fp8_channels,
)


class Fp8Scheme(QuantisedScheme):
    """A `Scheme` of FP8 weights: the checkpoint's, or made of its floats with a scale for each row.

    Checkpoints have `weight` in e4m3, [rows, columns], and scales as factors: one for each row,
    [rows, 1] or [rows], one for each block, [rows / 128, columns / 128], or one for the whole. The
    LM head and routers stay in floats.
    """

    def matrix(self, spec: LinearSpec, weights: Weights) -> Fp8Matrix:
        parts = spec.weights(weights.shard)
        data = weights.read(parts, dtype=FP8)
        if self.quantization.has_input_scale:
            for name in spec.modules:
                one_scale(f"{name}.input_scale", weights)
        if self.quantization.scales == "blocks":
            return self._blocks(spec, parts, data, weights)
        scales = torch.cat([self._row_scales(part, weights) for part in parts])
        return Fp8Channels(data, _checked(scales, spec, weights))

    def _row_scales(self, part: TensorSlice, weights: Weights) -> torch.Tensor:
        """[rows of the part]; a scale for the whole projection is repeated."""
        name, rows = self._scale_name(part), part.shape[0]
        if self.quantization.scales == "tensors":
            return one_scale(name, weights).expand(part.size[0])
        shape = weights.shape_of(name)
        whole = (rows,) if shape == (rows,) else (rows, 1)
        return weights.read([TensorSlice(name, whole, part.slices[:1])], dtype=torch.float32).view(
            -1
        )

    def _blocks(
        self,
        spec: LinearSpec,
        parts: list[TensorSlice],
        data: torch.Tensor,
        weights: Weights,
    ) -> Fp8Blocks:
        """Blocks of all projections. They are cut where a projection is no whole number of
        blocks.
        """
        rows = math.gcd(FP8_GROUP, *[part.size[0] for part in parts[:-1]])
        scales = []
        for part in parts:
            own = tuple(
                self._blocks_of(share, size, part, weights)
                for share, size in zip(part.slices, part.shape, strict=True)
            )
            whole = (-(-part.shape[0] // FP8_GROUP), -(-part.shape[1] // FP8_GROUP))
            scale = TensorSlice(self._scale_name(part), whole, own)
            read = weights.read([scale], dtype=torch.float32)
            count = -(-part.size[0] // rows)
            scales.append(read.repeat_interleave(FP8_GROUP // rows, 0)[:count])
        return Fp8Blocks(data, _checked(torch.cat(scales), spec, weights), rows)

    def _blocks_of(
        self, share: int | slice, size: int, part: TensorSlice, weights: Weights
    ) -> slice:
        """The blocks in a rank's share of an axis. Raises ModelError if the share begins within a
        block.
        """
        assert isinstance(share, slice)
        begin, end, _ = share.indices(size)
        if begin % FP8_GROUP:
            name = weights.full_name(part.name)
            what = "a rank's share begins" if weights.shard.size > 1 else "rows by head begin"
            raise ModelError(f"{name}: {what} within a block of {FP8_GROUP}")
        return slice(begin // FP8_GROUP, -(-end // FP8_GROUP))

    def _scale_name(self, part: TensorSlice) -> str:
        return f"{part.name.removesuffix('.weight')}.{self.quantization.scale_name}"

    def made(self, matrix: torch.Tensor) -> Fp8Channels:
        return quantise_fp8_channels(matrix)


def _checked(scales: torch.Tensor, spec: LinearSpec, weights: Weights) -> torch.Tensor:
    check_scales(scales, spec, weights, "scale")
    return scales.contiguous()
