"""Products and norms of Whisper's encoder and decoder."""

from __future__ import annotations

import torch
from weft.engine.model.layers.encoder import EncoderMLP, LayerNorm
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight

EPS = 1e-5
_WITHOUT_BIAS = "k_proj"


def product(weights: Weights, names: tuple[str, ...], rows: int, columns: int) -> LinearWeight:
    """Modules with biases as one product of `rows` outputs each. Only keys have no bias."""
    matrix = weights.read([TensorSlice(f"{name}.weight", (rows, columns)) for name in names])
    biases = [
        torch.zeros(rows, dtype=weights.dtype, device=weights.device)
        if name == _WITHOUT_BIAS
        else weights.read([TensorSlice(f"{name}.bias", (rows,))])
        for name in names
    ]
    return pack_linear(matrix, torch.cat(biases), weights.arena)


def plain_product(
    weights: Weights, name: str, rows: int, columns: int, *, bias: bool
) -> LinearWeight:
    """A module as one product of `rows` outputs."""
    matrix = weights.read([TensorSlice(f"{name}.weight", (rows, columns))])
    added = weights.read([TensorSlice(f"{name}.bias", (rows,))]) if bias else None
    return pack_linear(matrix, added, weights.arena)


def norm(weights: Weights, name: str, size: int) -> LayerNorm:
    return LayerNorm.read(weights, name, size, EPS)


def mlp(weights: Weights, layer: int, sizes: tuple[int, int]) -> EncoderMLP:
    """The feed-forward block of a layer, whose parameters are below `weights`; `sizes` are those of
    the stream and inside.
    """
    size, inner = sizes
    return EncoderMLP(
        layer=layer,
        up=product(weights, ("fc1",), inner, size),
        down=product(weights, ("fc2",), size, inner),
        activation="gelu",
        is_fixed=True,
    )
