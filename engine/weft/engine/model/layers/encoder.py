"""Layers of bidirectional encoders, over a ragged batch of whole prompts or images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from weft.checkpoint.pooling import ActivationName
from weft.engine.model.pooled_heads import ACTIVATIONS
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation import activate_alike, glu
from weft.kernels.ops.encoder_attention import encoder_attention
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import Group, LoraAddition
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.rope import rotate_heads
from weft.kernels.ops.stream import norm_of_sum
from weft.kernels.ops.stream.additions import Sum


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / deviation * weight + bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    @classmethod
    def read(
        cls, weights: Weights, name: str, size: int, eps: float, *, bias: bool = True
    ) -> LayerNorm:
        added = weights.read([TensorSlice(f"{name}.bias", (size,))]) if bias else None
        return cls(weights.norm(name, size), added, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, added: Sum, residual: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: the norm of `residual` plus the addition."""
        return norm_of_sum(added, residual, self.weight, self.bias, self.eps)


class Turns(NamedTuple):
    """Rotations of a batch's rows, each by its own."""

    cos_sin: torch.Tensor
    """[T, head_dim] float32: cosines of the pairs, then sines."""
    rows: torch.Tensor
    """[T] int64: numbers from 0."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """A batch of whole prompts or images."""

    bounds: Bounds
    """Where they begin."""
    step: Step | None = None
    """Positions and adapters of prompts' tokens; None: images, which have neither."""
    turns: Turns | None = None
    """Rotations of pictures' patches; None: there are none."""

    def added(self, group: Group, layer: int) -> LoraAddition | None:
        """The addition to a product of a layer (LoRA), or None."""
        return None if self.step is None else self.step.added(group, layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAttention:
    """Attention of each token to all of its prompt, or to the tokens near it."""

    layer: int
    num_heads: int
    qkv: LinearWeight
    out: LinearWeight
    reach: int | None = None
    """Tokens to each side that a token sees; None: all."""
    cos_sin: torch.Tensor | None = None
    """[max_positions, head_dim] float32: rotations of q and k; None: no rotation."""
    slopes: torch.Tensor | None = None
    """[num_heads] float32: decrease of scores with each token of distance; None: no decrease."""
    q_norm: LayerNorm | Norm | None = None
    """Norm of q of all heads together."""
    k_norm: LayerNorm | Norm | None = None
    order: torch.Tensor | None = None
    """[3 * hidden] int64: the columns of q, k and v in the order that rotations take; None: they
    are in that order.
    """

    def __call__(self, x: torch.Tensor, batch: Ragged) -> Sum:
        """[T, hidden] -> the addition to the stream."""
        qkv = linear(x, self.qkv, lora=batch.added("qkv", self.layer))
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = (part.contiguous() for part in qkv.chunk(3, dim=1))
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        if self.order is not None:
            qkv = qkv.index_select(1, self.order)
        qkv = qkv.view(len(x), 3, self.num_heads, -1)
        both = qkv.flatten(1, 2)[:, : 2 * self.num_heads]
        if batch.turns is not None:
            rotate_heads(both, batch.turns.rows, batch.turns.cos_sin)
        elif self.cos_sin is not None:
            assert batch.step is not None, "tables are for tokens"
            rotate_heads(both, batch.step.positions, self.cos_sin)
        q, k, v = qkv.unbind(1)
        mixed = encoder_attention(q, k, v, batch.bounds, self.reach, self.slopes)
        return Sum(mixed.view(len(x), -1), self.out, batch.added("o", self.layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderMLP:
    """down(activation(up(x))), or down(activation(a) * b), where one product computes a and b as
    its halves.
    """

    layer: int
    up: LinearWeight
    down: LinearWeight
    activation: ActivationName
    is_gated: bool = False
    is_fixed: bool = False
    """Whether a token's bits must not depend on the other rows of a step."""

    def __call__(self, x: torch.Tensor, batch: Ragged) -> Sum:
        """[T, hidden] -> the addition to the stream."""
        inner = linear(x, self.up, lora=batch.added("gate_up", self.layer))
        function = ACTIVATIONS[self.activation]
        if self.is_gated:
            activated = glu(inner, self.activation, function, is_fixed=self.is_fixed)
        else:
            activated = activate_alike(inner, function, is_fixed=self.is_fixed)
        return Sum(activated, self.down, batch.added("down", self.layer))


class PreNormLayer(NamedTuple):
    """A layer with a norm before attention and one before the MLP."""

    attention_norm: LayerNorm | Norm | None
    """None: the input is normalised already."""
    attention: EncoderAttention
    mlp_norm: LayerNorm | Norm
    mlp: EncoderMLP
    attention_scale: torch.Tensor | None = None
    """[hidden]: factors on what attention adds; None: there are none."""
    mlp_scale: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = _added(self.attention(normed, batch), x, self.attention_scale)
        return _added(self.mlp(self.mlp_norm(x), batch), x, self.mlp_scale)


def _added(what: Sum, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return what.added_to(x) if scale is None else torch.addcmul(x, what.value(), scale)
