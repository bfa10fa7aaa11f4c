"""A tower: from pixels of pictures to rows of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from weft.checkpoint.vision_config import NUM_CHANNELS, VisionConfig, VitConfig
from weft.contract.errors import InvalidRequest
from weft.engine.model.layers.encoder import (
    EncoderAttention,
    LayerNorm,
    PlainMLP,
    PreNormLayer,
    Ragged,
)
from weft.engine.model.vision.patches import PatchEmbedding
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight


class VisionTower:
    """A `MediaEncoder` of a vision transformer and its connector, whole on every rank."""

    def __init__(
        self,
        config: VisionConfig,
        embedding: PatchEmbedding,
        layers: list[PreNormLayer],
        last_norm: LayerNorm,
        projection: LinearWeight,
    ) -> None:
        """`projection` is [hidden of the language model, factor * factor * hidden]."""
        self.config = config
        self.digest = b""
        """Empty until all of the model is loaded."""
        self._embedding = embedding
        self._layers = layers
        self._last_norm = last_norm
        self._projection = projection

    @classmethod
    def read(cls, weights: Weights, config: VisionConfig) -> VisionTower:
        """Reads a tower by its names in a checkpoint, of which `weights` has all parameters. A
        reader may note missing tensors until it is finished.
        """
        vit, names = config.vit, config.names
        body, last = _below(weights, names.towers, names.last_norm), names.last_norm
        connector = _below(weights, names.connectors, names.projection)
        joined = vit.hidden_size * config.connector.factor**2
        layers = body.at(names.layers)
        return cls(
            config,
            PatchEmbedding.read(body, config),
            [_layer(config, number, layers.at(number)) for number in range(vit.num_layers)],
            LayerNorm.read(body, last, vit.hidden_size, vit.norm.eps, bias=vit.norm.has_bias),
            connector.linear(_spec(names.projection, joined, config.connector.out_features)),
        )

    @property
    def max_shape(self) -> tuple[int, ...]:
        return (self.config.tile_size, self.config.tile_size, NUM_CHANNELS)

    def rows_of(self, shape: Sequence[int]) -> int:
        self._check(shape)
        return self.config.tokens_per_tile

    def cost_of(self, shape: Sequence[int]) -> int:
        self._check(shape)
        return self.config.vit.num_patches

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Rows of tiles, in the model's dtype. On a CPU, and where products are in one order, a
        tile's rows do not depend on the others. Raises InvalidRequest for other pixels than the
        tower takes.
        """
        self._check(pixels.shape[1:])
        tokens = self.config.tokens_per_tile
        bounds = Bounds.even(len(pixels), self.config.vit.num_patches, pixels.device)
        x, batch = self._embedding(pixels), Ragged(bounds)
        for layer in self._layers:
            x = layer(x, batch)
        joined = self._last_norm(x).view(len(pixels) * tokens, -1)
        return linear(joined, self._projection).view(len(pixels), tokens, -1)

    def _check(self, shape: Sequence[int]) -> None:
        if tuple(shape) != self.max_shape:
            raise InvalidRequest(
                f"an image has the shape {list(shape)}; this model takes {list(self.max_shape)}",
                stage="validate",
                param="spans",
            )


def _below(weights: Weights, prefixes: tuple[str, ...], name: str) -> Weights:
    """The parameters below the first prefix that exists; the first one if none does."""
    found = (prefix for prefix in prefixes if weights.at(prefix).has(f"{name}.weight"))
    return weights.at(next(found, prefixes[0]))


def _layer(config: VisionConfig, number: int, weights: Weights) -> PreNormLayer:
    vit, names = config.vit, config.names
    size, inner, has_bias = vit.hidden_size, vit.intermediate_size, vit.has_bias
    norm = partial(_norm, vit, weights)
    qkv = LinearSpec(names=names.qkv, in_features=size, rows=(size,) * 3, bias=has_bias)
    return PreNormLayer(
        norm(names.attention_norm),
        EncoderAttention(
            layer=number,
            num_heads=vit.num_heads,
            qkv=weights.linear(qkv),
            out=weights.linear(_spec(names.o, size, size, bias=has_bias)),
        ),
        norm(names.mlp_norm),
        PlainMLP(
            layer=number,
            up=weights.linear(_spec(names.up, size, inner, bias=has_bias)),
            down=weights.linear(_spec(names.down, inner, size, bias=has_bias)),
            activation=vit.activation,
            # On a CPU rows never depend on the rest of a batch.
            is_fixed=True,
        ),
    )


def _norm(vit: VitConfig, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm.read(weights, name, vit.hidden_size, vit.norm.eps, bias=vit.norm.has_bias)


def _spec(name: str, in_features: int, out_features: int, *, bias: bool = False) -> LinearSpec:
    return LinearSpec(names=(name,), in_features=in_features, rows=(out_features,), bias=bias)
