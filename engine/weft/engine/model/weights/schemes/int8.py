"""Products in int8 with one scale for each row of their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.quantization import Quantization
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
from weft.kernels.quantised import Int8Channels, quantise_channels


class Int8Scheme:
    """A `Scheme` of int8 weights: the checkpoint's, or made of its floats.

    Checkpoints have them as compressed-tensors' int-quantized does: `weight`, int8 [rows, columns],
    and `weight_scale` [rows, 1]. Of floats each row that a rank has is rounded by itself.
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._is_of_checkpoint = quantization.source == "checkpoint"
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
        # compressed-tensors leaves it in floats; one that is not fails where it is read as such.
        if self._is_of_checkpoint:
            return self._plain.head(matrix, weights)
        return pack_linear(_quantised(matrix, weights), None, weights.arena, weights.dtype)

    def _matrix(self, spec: LinearSpec, weights: Weights) -> Int8Channels:
        parts = spec.weights(weights.shard)
        if not self._is_of_checkpoint:
            return _quantised(weights.read(parts), weights)
        data = weights.read(parts, dtype=torch.int8)
        scales = weights.read(spec.channel_scales(weights.shard), dtype=torch.float32)[:, 0]
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            names = ", ".join(weights.full_name(name) for name in spec.modules)
            raise ModelError(f"{names}: a weight_scale is negative or not finite")
        return Int8Channels(data, scales)

    def _experts(
        self, spec: ExpertSpec, weights: Weights
    ) -> Iterator[tuple[torch.Tensor | Int8Channels, torch.Tensor | Int8Channels]]:
        if not self._is_of_checkpoint:
            for gate_up, down in read_experts(spec, weights):
                yield _quantised(gate_up, weights), _quantised(down, weights)
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


def _quantised(matrix: torch.Tensor, weights: Weights) -> Int8Channels:
    try:
        return quantise_channels(matrix)
    except ValueError as error:
        raise ModelError(f"{weights.full_name('')}: {error}") from error
