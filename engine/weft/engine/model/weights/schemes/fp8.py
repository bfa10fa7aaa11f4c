"""Products with FP8 weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.quantization import Quantization
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.plain import (
    PlainScheme,
    packed_experts,
    read_bias,
    read_experts,
)
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import LinearWeight, pack_gate_up, pack_linear
from weft.kernels.moe import ExpertWeights
from weft.kernels.quantised import (
    FP8,
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Matrix,
    quantise_fp8_channels,
)

_NAN = 0x7F
"""Bits of a number that is none, but for its sign."""


class Fp8Scheme:
    """A `Scheme` of FP8 weights: the checkpoint's, or made of its floats, a scale for each row.

    Checkpoints have `weight` in e4m3 [rows, columns], and scales that it is multiplied with: of
    each row [rows, 1] or [rows], of each block [rows / 128, columns / 128], or one number of all.
    The LM head and routers stay in floats.
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._plain = PlainScheme()

    def fingerprint(self) -> bytes:
        """See `Scheme.fingerprint`."""
        return self._quantization.fingerprint()

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        """See `Scheme.linear`."""
        if self._ignores(weights, *spec.modules):
            return self._plain.linear(spec, weights)
        pack = pack_gate_up if spec.is_gated else pack_linear
        matrix = self._matrix(spec, weights)
        return pack(matrix, read_bias(spec, weights), weights.arena, weights.dtype)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        """See `Scheme.experts`."""
        return packed_experts(self._experts(spec, weights), spec, weights)

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        """See `Scheme.head`."""
        return self._plain.head(matrix, weights)

    def _matrix(self, spec: LinearSpec, weights: Weights) -> Fp8Matrix:
        if self._quantization.source == "load":
            return _made(weights.read(spec.weights(weights.shard)), weights)
        parts = spec.weights(weights.shard)
        data = weights.read(parts, dtype=FP8)
        if _has_nan(data):
            raise ModelError(f"{_listing(spec, weights)}: a weight is not a number")
        if self._quantization.has_input_scale:
            for name in spec.modules:
                self._one_scale(f"{name}.input_scale", weights)
        if self._quantization.scales == "blocks":
            return self._blocks(spec, parts, data, weights)
        scales = torch.cat([self._row_scales(part, weights) for part in parts])
        return Fp8Channels(data, _checked(scales, spec, weights))

    def _row_scales(self, part: TensorSlice, weights: Weights) -> torch.Tensor:
        """[rows of the part]: of a scale for the whole projection, the same for all."""
        name, rows = self._scale_name(part), part.shape[0]
        if self._quantization.scales == "tensors":
            return self._one_scale(name, weights).expand(part.size[0])
        shape = weights.shape_of(name)
        whole = (rows,) if shape == (rows,) else (rows, 1)
        return weights.read([TensorSlice(name, whole, part.slices[:1])], dtype=torch.float32).view(
            -1
        )

    def _one_scale(self, name: str, weights: Weights) -> torch.Tensor:
        """[1]: a tensor of one number, of whatever shape."""
        shape = weights.shape_of(name)
        shape = (1,) if shape is None else shape
        if math.prod(shape) != 1:
            raise ModelError(f"{weights.full_name(name)} has shape {shape}, not one number")
        scale = weights.tensor(TensorSlice(name, shape), torch.float32).view(1)
        if not 0 <= scale.item() < math.inf:
            raise ModelError(f"{weights.full_name(name)}: {scale.item()} is no scale")
        return scale

    def _blocks(
        self,
        spec: LinearSpec,
        parts: list[TensorSlice],
        data: torch.Tensor,
        weights: Weights,
    ) -> Fp8Blocks:
        """Blocks of all projections, cut where one of them is no whole number of blocks."""
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
        """The blocks that a rank's share of an axis has.

        Raises:
            ModelError: It begins within a block.
        """
        assert isinstance(share, slice)
        begin, end, _ = share.indices(size)
        if begin % FP8_GROUP:
            name = weights.full_name(part.name)
            raise ModelError(f"{name}: a rank's share begins within a block of {FP8_GROUP}")
        return slice(begin // FP8_GROUP, -(-end // FP8_GROUP))

    def _scale_name(self, part: TensorSlice) -> str:
        return f"{part.name.removesuffix('.weight')}.{self._quantization.scale_name}"

    def _experts(
        self, spec: ExpertSpec, weights: Weights
    ) -> Iterator[tuple[torch.Tensor | Fp8Matrix, torch.Tensor | Fp8Matrix]]:
        if self._quantization.source == "load":
            for gate_up, down in read_experts(spec, weights):
                yield _made(gate_up, weights), _made(down, weights)
            return
        for number in range(spec.num_experts):
            expert = weights.at(number)
            if self._ignores(expert, *spec.gate_up.names, *spec.down.names):
                own = expert.shard
                yield expert.read(spec.gate_up.weights(own)), expert.read(spec.down.weights(own))
            else:
                yield self._matrix(spec.gate_up, expert), self._matrix(spec.down, expert)

    def _ignores(self, weights: Weights, *names: str) -> bool:
        """Whether all of these modules stay in floats.

        Raises:
            ModelError: Some do, and they are one product.
        """
        ignored = [name for name in names if self._quantization.ignores(weights.full_name(name))]
        if ignored and len(ignored) < len(names):
            raise ModelError(
                f"{', '.join(weights.full_name(name) for name in names)} are one product, of which "
                f"quantization_config ignores only {', '.join(ignored)}"
            )
        return bool(ignored)


def _made(matrix: torch.Tensor, weights: Weights) -> Fp8Channels:
    try:
        return quantise_fp8_channels(matrix)
    except ValueError as error:
        raise ModelError(f"{weights.full_name('')}: {error}") from error


def _checked(scales: torch.Tensor, spec: LinearSpec, weights: Weights) -> torch.Tensor:
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise ModelError(f"{_listing(spec, weights)}: a scale is negative or not finite")
    return scales.contiguous()


def _has_nan(data: torch.Tensor) -> bool:
    return bool(((data.view(torch.uint8) & _NAN) == _NAN).any())


def _listing(spec: LinearSpec, weights: Weights) -> str:
    return ", ".join(weights.full_name(name) for name in spec.modules)
