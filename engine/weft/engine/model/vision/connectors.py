"""Connectors: what makes rows of the language model's width of a vision transformer's patches."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from weft.checkpoint.parts import NormConfig
from weft.checkpoint.pooling import ActivationName
from weft.checkpoint.vision_config import (
    ConnectorConfig,
    MeanPoolConfig,
    MergerConfig,
    MlpConnectorConfig,
    VisionNamesConfig,
)
from weft.engine.model.layers.encoder import LayerNorm
from weft.engine.model.pooled_heads import ACTIVATIONS
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation import activate_alike
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm

AnyNorm = LayerNorm | Norm


class Connector(Protocol):
    """Joins the patches of each square."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], square after square -> [squares, out_features]."""


class PixelShuffle(NamedTuple):
    """One product of all patches of a square."""

    projection: LinearWeight
    """[out_features, factor * factor * hidden]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.view(-1, self.projection.in_features), self.projection)


class Merger(NamedTuple):
    """A norm and an MLP of all patches of a square."""

    norm: AnyNorm | None
    is_norm_of_square: bool
    join: LinearWeight | None
    up: LinearWeight
    activation: ActivationName
    down: LinearWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        width = (self.join or self.up).in_features
        if self.is_norm_of_square:
            x = x.view(-1, width)
        joined = (x if self.norm is None else self.norm(x)).view(-1, width)
        inner = linear(joined if self.join is None else linear(joined, self.join), self.up)
        # On a CPU rows never depend on the rest of a batch.
        activated = activate_alike(inner, ACTIVATIONS[self.activation], is_fixed=True)
        return linear(activated, self.down)


class MlpConnector(NamedTuple):
    """An MLP of all patches of a square, whose result is activated, and a product."""

    up: LinearWeight
    down: LinearWeight
    projection: LinearWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.up.in_features)
        for product in (self.up, self.down):
            # On a CPU rows never depend on the rest of a batch.
            x = activate_alike(linear(x, product), ACTIVATIONS["gelu"], is_fixed=True)
        return linear(x, self.projection)


class MeanPool(NamedTuple):
    """The mean of a square's patches, a norm, and a product."""

    square: int
    """Patches of a square."""
    norm: AnyNorm
    projection: LinearWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # On a CPU and on a GPU a square's sum does not depend on the others.
        mean = x.view(-1, self.square, x.shape[1]).mean(1)
        return linear(self.norm(mean), self.projection)


def read_connector(
    config: ConnectorConfig,
    hidden: int,
    names: VisionNamesConfig,
    weights: Weights,
    body: Weights,
) -> Connector:
    """Reads a connector, whose parameters lie below `weights`, and those of an MLP of its own below
    `body`, for patches of this width.
    """
    joined = hidden * config.factor**2
    if isinstance(config, MlpConnectorConfig):
        inner, mlp = config.inner_features, body.at(names.connector_mlp)
        return MlpConnector(
            up=mlp.linear(product_spec(names.connector_up, joined, inner)),
            down=mlp.linear(product_spec(names.down, inner, inner)),
            projection=weights.linear(product_spec(names.projection, inner, config.out_features)),
        )
    if isinstance(config, MergerConfig):
        norm_size = joined if config.is_norm_of_square else hidden
        norm = None
        if config.norm is not None:
            norm = read_norm(weights, names.connector_norm, norm_size, config.norm)
        before, inner = hidden if config.has_join else joined, config.inner_features or joined
        up = product_spec(names.connector_up, before, inner, bias=config.has_bias)
        down = product_spec(names.projection, inner, config.out_features, bias=config.has_bias)
        return Merger(
            norm=norm,
            is_norm_of_square=config.is_norm_of_square,
            join=_join(config, hidden, names, weights) if config.has_join else None,
            up=weights.linear(up),
            activation=config.activation,
            down=weights.linear(down),
        )
    if isinstance(config, MeanPoolConfig):
        matrix = weights.read([TensorSlice(names.projection, (hidden, config.out_features))])
        return MeanPool(
            square=config.factor**2,
            norm=read_norm(weights, names.connector_norm, hidden, config.norm),
            projection=pack_linear(matrix.t().contiguous(), None, weights.arena),
        )
    return PixelShuffle(weights.linear(product_spec(names.projection, joined, config.out_features)))


def _join(
    config: MergerConfig, hidden: int, names: VisionNamesConfig, weights: Weights
) -> LinearWeight:
    """Files have it channel by channel, each with a square's patches; here patches follow one
    another.
    """
    size = config.factor**2
    matrix = weights.read([TensorSlice(f"{names.connector_join}.weight", (hidden, hidden * size))])
    by_patch = matrix.view(hidden, hidden, size).transpose(1, 2).reshape(hidden, -1)
    return pack_linear(by_patch.contiguous(), None, weights.arena)


def read_norm(weights: Weights, name: str, size: int, config: NormConfig) -> AnyNorm:
    if config.kind == "rms" and config.adds_one:
        weight = weights.read([TensorSlice(f"{name}.weight", (size,))], dtype=torch.float32)
        return Norm(weight + 1.0, config.eps)
    if config.kind == "rms":
        return Norm(weights.norm(name, size), config.eps)
    return LayerNorm.read(weights, name, size, config.eps, bias=config.has_bias)


def product_spec(
    name: str, in_features: int, out_features: int, *, bias: bool = False
) -> LinearSpec:
    return LinearSpec(names=(name,), in_features=in_features, rows=(out_features,), bias=bias)
