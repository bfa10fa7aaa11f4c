"""Products in int8 with one scale for each row of their weights."""

from __future__ import annotations

import torch
from weft.engine.base.errors import ModelError
from weft.engine.checkpoint.quantization import Quantization
from weft.engine.model.weights.schemes.plain import PlainScheme, read_bias, read_experts
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import LinearWeight, pack_gate_up, pack_linear
from weft.kernels.moe import ExpertWeights, pack_experts
from weft.kernels.quantised import Int8Channels, quantise_channels


class Int8Scheme:
    """A `Scheme` of int8 weights, which are made of the checkpoint's floats.

    Of each projection all rows are rounded by themselves, so that shards are parts of the whole.
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._plain = PlainScheme()

    def fingerprint(self) -> bytes:
        """See `Scheme.fingerprint`."""
        return self._quantization.fingerprint()

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        """See `Scheme.linear`."""
        if self._ignores(weights, *spec.names):
            return self._plain.linear(spec, weights)
        pack = pack_gate_up if spec.is_gated else pack_linear
        matrix = _quantised(weights.read(spec.weights(weights.shard)), weights)
        return pack(matrix, read_bias(spec, weights), weights.arena, weights.dtype)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        """See `Scheme.experts`."""
        experts = (
            (_quantised(gate_up, weights), _quantised(down, weights))
            for gate_up, down in read_experts(spec, weights)
        )
        return pack_experts(experts, spec.num_experts, weights.arena, weights.dtype)

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        """See `Scheme.head`."""
        if self._ignores(weights, "lm_head"):
            return self._plain.head(matrix, weights)
        return pack_linear(_quantised(matrix, weights), None, weights.arena, weights.dtype)

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
