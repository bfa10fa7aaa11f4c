"""Layers made of the parts that a family's configuration lists."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    HeadNormConfig,
    NormConfig,
    ParallelConfig,
)
from weft.engine.checkpoint.recurrent_config import (
    DeltaAttentionConfig,
    GatedDeltaConfig,
    Mamba2Config,
    MambaConfig,
    RecurrentConfig,
)
from weft.engine.memory.layout import CacheLayout
from weft.engine.model.decoder_only import DecoderOnlyLM, place_in_pools, vocabulary_size
from weft.engine.model.layers.attention import Attention, attention_spec, o_spec, qkv_spec
from weft.engine.model.layers.delta_attention import DeltaAttention
from weft.engine.model.layers.gated_conv import GatedConv
from weft.engine.model.layers.gated_delta import GatedDelta
from weft.engine.model.layers.heads import HeadChange, LayerNorms, Rotation, WidthNorms
from weft.engine.model.layers.latent import LatentAttention, latent_layout
from weft.engine.model.layers.layer import FeedForward, Form, Layer, Mixer
from weft.engine.model.layers.mamba import Mamba
from weft.engine.model.layers.mamba2 import Mamba2
from weft.engine.model.layers.mlp import GatedMLP, PlainMLP, down_spec, gate_up_spec, up_spec
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.plain_moe import PlainSparseMLP
from weft.engine.model.layers.recurrent import RecurrentMixer
from weft.engine.model.layers.rotary import Rotaries
from weft.engine.model.layers.side_by_side import SideBySide
from weft.engine.model.stack import Stack
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.norm import AnyNorm, LayerNorm, Norm


class Decoder(DecoderOnlyLM):
    """A decoder of parts with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Reads all parameters, one layer after another."""
        names, parts = config.names, config.decoder
        assert parts is not None, "its configuration is read by a family"
        self._multiplier, self._softcap = parts.logit_multiplier, parts.logit_softcap
        body = next(
            (name for name in names.bodies if weights.at(name).has(f"{names.embedding}.weight")),
            names.bodies[-1],
        )
        head = next((n for n in names.heads if weights.has(f"{n}.weight")), names.heads[0])
        self._take(config, weights, _build_stack(config, parts, weights.at(body)), head)

    def kv_layout(self, page_size: int) -> CacheLayout:
        """See `Model.kv_layout`."""
        parts, latent = self.config.decoder, self.config.latent
        assert parts is not None
        layout = super().kv_layout(page_size)
        if latent is not None:
            layout = latent_layout(latent, len(parts.attention_layers), self.dtype, page_size)
        if not parts.recurrent_layers:
            return layout
        mixer = self.model.layers[parts.recurrent_layers[0]].mixer
        recurrent = mixer.recurrent if isinstance(mixer, SideBySide) else mixer
        assert isinstance(recurrent, RecurrentMixer)
        return replace(layout, states=recurrent.state_plane(len(parts.recurrent_layers)))

    def scale_logits(self, logits: torch.Tensor) -> None:
        """See `DecoderOnlyLM.scale_logits`."""
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _build_stack(config: ModelConfig, parts: DecoderConfig, weights: Weights) -> Stack:
    embed_tokens = weights.vocabulary(config.names.embedding, *vocabulary_size(config))
    rotaries = Rotaries(config.rotary_dim, config.max_position_embeddings, weights.device)
    layers = [
        _layer(config, parts, index, weights.at("layers"), rotaries)
        for index in range(config.num_layers)
    ]
    place_in_pools(config, layers)
    last = read_norm(parts.norm, weights, config.names.last_norm, config.hidden_size)
    return Stack(embed_tokens, layers, last, parts.embedding_multiplier)


def _layer(
    config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights, rotaries: Rotaries
) -> Layer:
    names, order = config.names, parts.order
    number, feed_number = names.blocks[index] if names.blocks else (index, index)
    own = weights.at(number)

    def norm(name: str, below: Weights = own) -> AnyNorm:
        return read_norm(parts.norm, below, name, config.hidden_size)

    before = None if order == "after" else norm(names.input_norm)
    mixer = read_mixer(config, parts, index, own, rotaries)
    if index in parts.without_feed:
        return Layer(index, before, mixer, None, None, Form(multiplier=parts.residual_multiplier))
    assert feed_number is not None, "the layer has a feed-forward block"
    of_feed = weights.at(feed_number)
    between = norm(names.feed_norm, of_feed) if order in ("before", "around") else before
    is_behind = order in ("after", "around")
    form = Form(
        norm(names.mixer_post) if is_behind else None,
        norm(names.feed_post) if is_behind else None,
        parts.residual_multiplier,
        order == "parallel",
    )
    return Layer(index, before, mixer, between, _feed(config, parts, index, of_feed), form)


def read_mixer(
    config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights, rotaries: Rotaries
) -> Mixer:
    """Reads the mixer of a layer (its index); `weights` are below the layer's prefix."""
    layer, names = parts.layers[index], config.names
    attention, recurrent = weights.at(names.attention), weights.at(names.recurrent)
    if isinstance(layer, ParallelConfig):
        return SideBySide(
            _attention(config, layer.attention, index, attention, rotaries),
            _recurrent(config, parts, layer.mamba, index, recurrent),
            (layer.attention_factor, layer.mamba_factor),
        )
    if not isinstance(layer, AttentionConfig):
        return _recurrent(config, parts, layer, index, recurrent)
    if config.latent is not None:
        rotary = rotaries.of(layer.rope)
        return LatentAttention.read(config, config.latent, layer, index, attention, rotary)
    return _attention(config, layer, index, attention, rotaries)


def _recurrent(
    config: ModelConfig, parts: DecoderConfig, layer: RecurrentConfig, index: int, weights: Weights
) -> RecurrentMixer:
    place = (config.hidden_size, index, parts.recurrent_layers.index(index), weights)
    if isinstance(layer, GatedDeltaConfig):
        return GatedDelta.read(layer, *place)
    if isinstance(layer, DeltaAttentionConfig):
        return DeltaAttention.read(layer, *place)
    if isinstance(layer, Mamba2Config):
        return Mamba2.read(layer, *place)
    if isinstance(layer, MambaConfig):
        return Mamba.read(layer, *place)
    return GatedConv.read(layer, *place)


def _attention(
    config: ModelConfig, layer: AttentionConfig, index: int, weights: Weights, rotaries: Rotaries
) -> Attention:
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    rotary, change = rotaries.of(layer.rope), None
    norms: tuple[Norm | None, Norm | None] = (None, None)
    if layer.head_norm is not None:
        norms, change = _head_norms(config, layer.head_norm, weights)
        if layer.head_norm.is_after_rotation:
            change, rotary = Rotation(rotary), rotaries.of(None)
    spec = attention_spec(config, index)._replace(scale=layer.scale, softcap=layer.softcap)
    if layer.has_sinks:
        sinks = weights.read([TensorSlice("sinks", heads[:1])], dtype=torch.float32)
        spec = spec._replace(sinks=sinks)
    hidden, names = config.hidden_size, config.names
    return Attention(
        spec,
        index,
        rotary.cos_sin,
        qkv_proj=weights.linear(
            qkv_spec(hidden, *heads, bias=layer.qkv_bias, fused=names.qkv, has_gate=layer.has_gate)
        ),
        o_proj=weights.linear(
            o_spec(hidden, config.num_heads, config.head_dim, bias=layer.o_bias, name=names.o)
        ),
        q_norm=norms[0],
        k_norm=norms[1],
        num_adjacent=rotary.num_adjacent,
        change=change,
        q_scales=None if layer.q_growth is None else _q_scales(config, *layer.q_growth, weights),
        has_gate=layer.has_gate,
    )


def _head_norms(
    config: ModelConfig, head_norm: HeadNormConfig, weights: Weights
) -> tuple[tuple[Norm | None, Norm | None], HeadChange | None]:
    """Norms that the kernel of the rotation can apply, or else a separate change of the heads."""
    norm, dim = head_norm.norm, config.head_dim
    of_heads = [(head_norm.q_name, config.num_heads), (head_norm.k_name, config.num_kv_heads)]
    if head_norm.over == "head":
        q, k = (_rms(norm, weights, name, dim) for name, _ in of_heads)
        return (q, k), None
    if head_norm.over == "width":
        q, k = (_rms(norm, weights, name, heads * dim) for name, heads in of_heads)
        return (None, None), WidthNorms(q, k)
    parts = [part for name, heads in of_heads for part in _by_head(weights, name, heads, dim)]
    return (None, None), LayerNorms(weights.read(parts).view(-1, dim), norm.eps)


def _by_head(weights: Weights, name: str, heads: int, dim: int) -> list[TensorSlice]:
    """The norm weights of the heads: one tensor for all heads, or one tensor per head."""
    if weights.has(f"{name}.0.weight"):
        return [TensorSlice(f"{name}.{head}.weight", (dim,)) for head in range(heads)]
    whole = TensorSlice(f"{name}.weight", (heads, dim))
    return [whole._replace(slices=(head,)) for head in range(heads)]


def _q_scales(config: ModelConfig, growth: float, original: int, weights: Weights) -> torch.Tensor:
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    scales = 1.0 + growth * torch.log1p(torch.floor(positions / original))
    return scales.to(weights.device)


def _feed(config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights) -> FeedForward:
    names, moe = config.names, config.moe
    feeds = [weights.at(name) if name else weights for name in names.feeds]
    if moe is None or not moe.is_sparse(index):
        down = f"{names.down}.weight"
        found = next((feed for feed in feeds if feed.has(down)), feeds[-1])
        return _mlp(config, parts, index, found)
    router = f"{names.moe.router}.weight"
    found = next((feed for feed in feeds if feed.has(router)), feeds[0])
    if not moe.is_gated:
        return PlainSparseMLP.read(moe, config.hidden_size, found, names.moe)
    return SparseMLP.read(moe, index, config.hidden_size, found, names.moe)


def _mlp(config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights) -> FeedForward:
    mlp, names = parts.mlp, config.names
    hidden, inner = config.hidden_size, config.intermediate_size
    down = weights.linear(down_spec(hidden, inner, bias=mlp.bias, name=names.down))
    if not mlp.is_gated:
        up = weights.linear(up_spec(hidden, inner, bias=mlp.bias, name=names.up))
        return PlainMLP(index, up, down, mlp.activation, is_gated=False)
    has_silu = mlp.activation == "silu" and mlp.factors == (1.0, 1.0)
    spec = gate_up_spec(
        hidden,
        inner,
        bias=mlp.bias,
        names=(names.gate, names.up),
        fused=names.gate_up,
        is_gated=has_silu,
    )
    both = weights.linear(spec)
    if has_silu:
        return GatedMLP(index, both, down)
    return PlainMLP(index, both, down, mlp.activation, is_gated=True, factors=mlp.factors)


def read_norm(norm: NormConfig, weights: Weights, name: str, size: int) -> AnyNorm:
    """Reads a norm of the stream."""
    if norm.kind == "rms":
        return _rms(norm, weights, name, size)
    weight = weights.norm(name, size)
    bias = weights.read([TensorSlice(f"{name}.bias", (size,))]) if norm.has_bias else None
    return LayerNorm(weight + 1.0 if norm.adds_one else weight, bias, norm.eps)


def _rms(norm: NormConfig, weights: Weights, name: str, size: int) -> Norm:
    if not norm.adds_one:
        return Norm(weights.norm(name, size), norm.eps)
    weight = weights.read([TensorSlice(f"{name}.weight", (size,))], dtype=torch.float32)
    return Norm(weight + 1.0, norm.eps)
