"""Projectors: what makes rows of the language model's width of an encoder's rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from weft.checkpoint.audio_config import AudioConfig
from weft.engine.model.audio.parts import plain_product
from weft.engine.model.layers.encoder import LayerNorm
from weft.engine.model.pooled_heads import ACTIVATIONS
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation import activate_alike
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight


class Projector(Protocol):
    """Makes one row of some consecutive ones."""

    @property
    def joined(self) -> int:
        """Rows that become one."""

    def __call__(self, x: torch.Tensor, last_norm: LayerNorm) -> torch.Tensor:
        """[rows, hidden], before the encoder's last norm -> [rows / joined, out_features]."""


class StackedRows(NamedTuple):
    """An MLP of rows side by side, as Voxtral has it."""

    joined: int
    up: LinearWeight
    down: LinearWeight

    def __call__(self, x: torch.Tensor, last_norm: LayerNorm) -> torch.Tensor:
        inner = linear(last_norm(x).view(-1, self.up.in_features), self.up)
        # On a CPU rows never depend on the rest of a batch.
        return linear(activate_alike(inner, ACTIVATIONS["gelu"], is_fixed=True), self.down)


class MeanRows(NamedTuple):
    """A product of the mean of rows, as Qwen2-Audio has it."""

    joined: int
    projection: LinearWeight

    def __call__(self, x: torch.Tensor, last_norm: LayerNorm) -> torch.Tensor:
        # A mean does not depend on the others.
        mean = x.view(-1, self.joined, x.shape[1]).mean(1)
        return linear(last_norm(mean), self.projection)


def read_projector(config: AudioConfig, weights: Weights) -> Projector | None:
    """Reads a projector; `weights` has all parameters. None: the model has none."""
    made, names = config.projector, config.names
    if made is None:
        return None
    own, size, out = weights.at(names.projector), config.hidden_size, made.out_features
    if made.is_mean:
        projection = plain_product(own, names.projections[0], out, size, bias=True)
        return MeanRows(made.joined, projection)
    up, down = names.projections
    return StackedRows(
        made.joined,
        plain_product(own, up, out, size * made.joined, bias=False),
        plain_product(own, down, out, out, bias=False),
    )
