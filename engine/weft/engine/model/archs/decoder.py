"""Builds a decoder from the parts that a family's configuration lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
import torch.nn.functional as F
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.moe_config import MoEConfig
from weft.checkpoint.parts import (
    AttentionConfig,
    DecoderConfig,
    GateConfig,
    HeadNormConfig,
    MlpConfig,
    NormConfig,
    ParallelConfig,
)
from weft.checkpoint.recurrent_config import (
    DeltaAttentionConfig,
    GatedDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    RecurrentConfig,
)
from weft.contract.layout import CacheLayout
from weft.engine.model.decoder_only import DecoderOnlyLM, place_in_pools, vocabulary_size
from weft.engine.model.layers.altup import AltUpLayer, Copies
from weft.engine.model.layers.attention import Attention, Gate, attention_spec, o_spec, qkv_spec
from weft.engine.model.layers.delta_attention import DeltaAttention
from weft.engine.model.layers.dual_norm import DualNorm, ExpertsBesideMLP
from weft.engine.model.layers.gated_conv import GatedConv
from weft.engine.model.layers.gated_delta import GatedDelta
from weft.engine.model.layers.heads import (
    Clip,
    HeadChange,
    LayerNorms,
    PlainNorms,
    Rotation,
    Values,
    WidthNorms,
)
from weft.engine.model.layers.latent import LatentAttention, latent_layout
from weft.engine.model.layers.layer import FeedForward, Form, Layer, Mixer, StackLayer
from weft.engine.model.layers.lightning import Lightning
from weft.engine.model.layers.mamba import Mamba
from weft.engine.model.layers.mamba2 import Mamba2
from weft.engine.model.layers.mlp import GatedMLP, PlainMLP, down_spec, gate_up_spec, up_spec
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.parallel_block import ParallelBlock
from weft.engine.model.layers.per_layer import PerLayerEmbedding, PerLayerPart
from weft.engine.model.layers.plain_moe import PlainSparseMLP
from weft.engine.model.layers.recurrent import RecurrentMixer
from weft.engine.model.layers.rotary import AxisTurns, Rotaries
from weft.engine.model.layers.shared_attention import SharedAttention
from weft.engine.model.stack import Stack
from weft.engine.model.stage import Stage
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.activation.spec import XIELU, Activation, Gating, GaussianTopK, limited_silu
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.norm import AnyNorm, LayerNorm, Norm


class Decoder(DecoderOnlyLM):
    """A decoder of configured parts, with its LM head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        names, parts = config.names, config.decoder or _plain_parts(config)
        self._parts = parts
        self._multiplier, self._softcap = parts.logit_multiplier, parts.logit_softcap
        body = next(
            (name for name in names.bodies if weights.at(name).has(f"{names.embedding}.weight")),
            names.bodies[-1],
        )
        head = next((n for n in names.heads if weights.has(f"{n}.weight")), names.heads[0])
        positions = config.max_position_embeddings
        self._rotaries = Rotaries(config.rotary_dim, positions, weights.device, weights.constant)
        below = weights.at(body) if body else weights
        stack = _build_stack(config, parts, below, self._rotaries)
        self._num_ranks = weights.shard.size
        self._take(config, weights, stack, head)
        self._head_bias: torch.Tensor | None = None
        if parts.has_head_bias and config.head == "tokens":
            bias = TensorSlice(f"{head}.bias", (config.vocab_size,))
            self._head_bias = weights.read([bias], config.num_added_tokens, dtype=torch.float32)

    def layout_of(self, stage: Stage | None, page_size: int) -> CacheLayout:
        parts, latent = self._parts, self.config.latent
        layout = super().layout_of(stage, page_size)
        if latent is not None:
            count = len(_of_stage(parts.attention_layers, stage))
            layout = latent_layout(latent, count, self.dtype, page_size)
        if not parts.recurrent_layers:
            return layout
        mixer = self.model.layers[parts.recurrent_layers[0]].mixer
        recurrent = mixer.recurrent if isinstance(mixer, ParallelBlock) else mixer
        assert isinstance(recurrent, RecurrentMixer)
        plane = recurrent.state_plane(len(_of_stage(parts.recurrent_layers, stage)))
        return replace(layout, states=plane.over_ranks(self._num_ranks))

    def further_layer(self, weights: Weights, first_position: int, *, is_sparse: bool) -> Layer:
        """Reads a layer that is not among the model's layers, built like the model's first layer
        with attention.

        Args:
            first_position: First position to which rows attend.
            is_sparse: Whether the layer has experts, if the model has some.
        """
        config, parts = self.config, self._parts
        attention = replace(parts.attention, first_position=first_position)
        parts = replace(parts, layers=(*parts.layers, attention))
        config = replace(config, decoder=parts, moe=config.moe if is_sparse else None)
        return _layer(config, parts, config.num_layers, weights, weights, self._rotaries)

    def finish_logits(self, logits: torch.Tensor, tokens: slice) -> None:
        if self._head_bias is not None:
            logits.add_(self._head_bias[tokens])
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _plain_parts(config: ModelConfig) -> DecoderConfig:
    """The parts of Llama, Mistral, Qwen2 and Qwen3, whose configurations list none."""
    norm = NormConfig(eps=config.rms_norm_eps)
    layer = AttentionConfig(
        rope=config.rope,
        scale=config.head_dim**-0.5,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        head_norm=HeadNormConfig(norm=norm) if config.qk_norm else None,
    )
    mlp = MlpConfig(bias=config.mlp_bias)
    return DecoderConfig(norm=norm, layers=(layer,) * config.num_layers, mlp=mlp)


def _of_stage(layers: Sequence[int], stage: Stage | None) -> Sequence[int]:
    return layers if stage is None else stage.of_pages(layers)


def _build_stack(
    config: ModelConfig, parts: DecoderConfig, weights: Weights, rotaries: Rotaries
) -> Stack:
    names, of_layers = config.names, weights.at(config.names.layers)
    top = weights.of_embedding(is_head=config.tie_word_embeddings)
    embed_tokens = top.vocabulary(names.embedding, *vocabulary_size(config))

    def layer(index: int) -> StackLayer:
        number, feed = names.blocks[index] if names.blocks else (index, index)
        own, of_feed = of_layers.at(number).of_layer(index), None
        if feed is not None and index not in parts.without_feed:
            of_feed = of_layers.at(feed).of_layer(index)
        made = _layer(config, parts, index, own, of_feed, rotaries)
        if parts.altup is None:
            return made
        return AltUpLayer.read(made, parts.altup, config.hidden_size, parts.norm.eps, own)

    layers = [layer(index) for index in range(config.num_layers)]
    place_in_pools(config, layers, weights.stage, weights.shard)
    last = read_norm(parts.norm, weights, config.names.last_norm, config.hidden_size)
    per_layer = _per_layer_embedding(config, parts, weights)
    factor = parts.embedding_multiplier
    positions, copies = _read_positions(config, parts, weights), None
    if parts.altup is not None:
        copies = Copies.read(config.hidden_size, parts.altup.copies, weights)
    axes, num_taps = _axes_and_taps(config, parts, rotaries)
    return Stack(
        embed_tokens,
        layers,
        last,
        factor,
        weights.peers,
        per_layer,
        positions,
        copies,
        axes,
        num_taps,
        weights.stage,
    )


def _axes_and_taps(
    config: ModelConfig, parts: DecoderConfig, rotaries: Rotaries
) -> tuple[AxisTurns | None, int]:
    """How the stack takes rows of images: rotations by several axes, and the first layers after
    which rows are added.
    """
    vision = config.vision
    if vision is None:
        return None, 0
    axes = None
    if vision.axes is not None:
        rope = parts.attention.rope
        assert rope is not None, "such models rotate"
        pairs = rope.rotary_dim(config.head_dim) // 2
        axes = AxisTurns(rotaries.of(rope).cos_sin, vision.axes.axis_of_pairs(pairs))
    return axes, 0 if vision.taps is None else len(vision.taps.layers)


def _read_positions(
    config: ModelConfig, parts: DecoderConfig, weights: Weights
) -> torch.Tensor | None:
    first, longest = parts.first_position_row, config.max_position_embeddings
    if first is None:
        return None
    if parts.has_sinusoids:
        return _sinusoids(first, longest, config.hidden_size).to(weights.device, weights.dtype)
    shape = (first + longest, config.hidden_size)
    rows = slice(first, first + longest)
    return weights.read([TensorSlice(f"{config.names.positions}.weight", shape, (rows,))])


def _sinusoids(first: int, count: int, width: int) -> torch.Tensor:
    """Positions from `first` on as sines and cosines of falling frequencies (Vaswani et al., arXiv
    1706.03762), [count, width] float32, in tensor2tensor's form: all sines before the cosines.
    `width` must be even.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000.0) / (half - 1)))
    positions = torch.arange(first, first + count, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _layer(
    config: ModelConfig,
    parts: DecoderConfig,
    index: int,
    own: Weights,
    of_feed: Weights | None,
    rotaries: Rotaries,
) -> Layer:
    names, order = config.names, parts.order

    def norm(name: str, below: Weights = own) -> AnyNorm:
        return read_norm(parts.norm, below, name, config.hidden_size)

    before = None if order == "after" else norm(names.input_norm)
    mixer = read_mixer(config, parts, index, own, rotaries)
    if of_feed is None:
        return Layer(index, before, mixer, None, None, Form(multiplier=parts.residual_multiplier))
    has_between = order in ("before", "around", "parallel by two norms")
    between = norm(names.feed_norm, of_feed) if has_between else before
    feed = _feed(config, parts, index, of_feed)
    if isinstance(feed, ExpertsBesideMLP):
        between = None  # Such a block has norms inside.
    is_behind = order in ("after", "around")
    last, last_post = _per_layer_part(config, parts, index, own)
    form = Form(
        norm(names.mixer_post) if is_behind else None,
        norm(names.feed_post) if is_behind else None,
        parts.residual_multiplier,
        order.startswith("parallel"),
        last,
        last_post,
        own.read([TensorSlice("layer_scalar", (1,))]) if parts.has_layer_factors else None,
        parts.kept[index] if parts.kept else None,
    )
    return Layer(index, before, mixer, between, feed, form)


def _per_layer_part(
    config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights
) -> tuple[PerLayerPart | None, AnyNorm | None]:
    if parts.per_layer is None:
        return None, None
    hidden, dim = config.hidden_size, parts.per_layer.dim
    gate, proj, norm = config.names.per_layer
    part = PerLayerPart(
        index,
        weights.shard.of(dim, 1, may_repeat=False),
        weights.linear(LinearSpec(names=(gate,), in_features=hidden, rows=(dim,), split="out")),
        weights.linear(LinearSpec(names=(proj,), in_features=dim, rows=(hidden,), split="in")),
        parts.mlp.activation,
    )
    return part, read_norm(parts.norm, weights, norm, hidden)


def _per_layer_embedding(
    config: ModelConfig, parts: DecoderConfig, weights: Weights
) -> PerLayerEmbedding | None:
    if parts.per_layer is None:
        return None
    dim, count = parts.per_layer.dim, config.num_layers
    table, proj, norm = config.names.per_layer_embedding
    spec = LinearSpec(names=(proj,), in_features=config.hidden_size, rows=(count * dim,))
    return PerLayerEmbedding(
        weights.vocabulary(table, parts.per_layer.vocab_size, count * dim),
        weights.linear(spec),
        _rms(parts.norm, weights, norm, dim),
        count,
        dim,
    )


def read_mixer(
    config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights, rotaries: Rotaries
) -> Mixer:
    """`weights` are below the prefix of layer `index`."""
    layer, names = parts.layers[index], config.names
    attention, recurrent = weights.at(names.attention), weights.at(names.recurrent)
    if isinstance(layer, ParallelConfig):
        return ParallelBlock(
            _attention(config, layer.attention, index, attention, rotaries),
            _recurrent(config, parts, layer.mamba, index, recurrent),
            (layer.attention_factor, layer.mamba_factor),
        )
    if not isinstance(layer, AttentionConfig):
        return _recurrent(config, parts, layer, index, recurrent)
    if config.latent is not None:
        sizes = (config.num_heads, config.latent.value_dim, config.hidden_size)
        gate = None if layer.gate is None else _gate(layer.gate, *sizes, attention)
        return LatentAttention.read(
            config, config.latent, layer, index, attention, rotaries.of(layer.rope),
            q_scales(config, layer, attention), gate,
        )  # fmt: skip
    if layer.kv_from is not None:
        return _shared_attention(config, layer, index, attention, rotaries)
    return _attention(config, layer, index, attention, rotaries)


def _recurrent(
    config: ModelConfig, parts: DecoderConfig, layer: RecurrentConfig, index: int, weights: Weights
) -> RecurrentMixer:
    own = _of_stage(parts.recurrent_layers, weights.stage)
    # A layer of another host has no place here.
    place = (config.hidden_size, index, own.index(index) if index in own else 0, weights)
    if isinstance(layer, GatedDeltaConfig):
        return GatedDelta.read(layer, *place)
    if isinstance(layer, DeltaAttentionConfig):
        return DeltaAttention.read(layer, *place, config.names.o)
    if isinstance(layer, Mamba2Config):
        return Mamba2.read(layer, *place)
    if isinstance(layer, MambaConfig):
        return Mamba.read(layer, *place)
    if isinstance(layer, LightningConfig):
        return Lightning.of(layer, *place)
    return GatedConv.read(layer, *place)


def _attention(
    config: ModelConfig, layer: AttentionConfig, index: int, weights: Weights, rotaries: Rotaries
) -> Attention:
    heads = (layer.heads or config.num_heads, *config.kv_shape(index))
    dim, hidden, names = heads[2], config.hidden_size, config.names
    rotary, changes = rotaries.of(layer.rope, dim), list[HeadChange]()
    norms: tuple[Norm | None, Norm | None] = (None, None)
    value_dim, value_norm = layer.value_dim or dim, layer.value_norm
    if value_dim != dim or layer.value_factor != 1.0 or value_norm is not None:
        eps = None if value_norm is None else value_norm.eps
        changes.append(Values(dim, value_dim, layer.value_factor, eps))
    if layer.clip is not None:
        changes.append(Clip(layer.clip))
    if layer.head_norm is not None:
        norms, change = _head_norms(heads, layer.head_norm, weights)
        if layer.head_norm.is_after_rotation:
            changes.append(Rotation(rotary))
            rotary = rotaries.of(None, dim)
        changes += [] if change is None else [change]
    spec = _spec(config, index, layer, weights)
    gate = None if layer.gate is None else _gate(layer.gate, heads[0], value_dim, hidden, weights)
    groups, order = names.qkv_rows(heads[1])
    qkv = qkv_spec(
        hidden,
        *heads,
        bias=layer.qkv_bias,
        fused=names.qkv,
        value_dim=value_dim,
        v_name="k_proj" if layer.is_value_key else "v_proj",
        has_gate=gate is not None and gate.proj is None,
        groups=groups,
        order=order,
    )
    return Attention(
        spec,
        index,
        rotary.cos_sin,
        qkv_proj=weights.linear(qkv),
        o_proj=weights.linear(o_spec(hidden, heads[0], value_dim, bias=layer.o_bias, name=names.o)),
        q_norm=norms[0],
        k_norm=norms[1],
        num_adjacent=rotary.num_adjacent,
        changes=changes,
        q_scales=q_scales(config, layer, weights),
        value_dim=value_dim,
        gate=gate,
    )


def _spec(
    config: ModelConfig, index: int, layer: AttentionConfig, weights: Weights
) -> AttentionSpec:
    heads, (kv_heads, dim) = layer.heads or config.num_heads, config.kv_shape(index)
    window = config.sliding_window
    spec = attention_spec(config, index)._replace(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        scale=layer.scale,
        softcap=layer.softcap,
        is_chunked=window is not None and window.is_chunked and index in window.layers,
        first_position=layer.first_position,
    )
    if not layer.has_sinks:
        return spec
    name = config.names.sinks
    own = weights.shard.of(heads, 1, may_repeat=False)
    sinks = weights.read([TensorSlice(name, (heads,), (own,))], dtype=torch.float32)
    return spec._replace(sinks=sinks)


def _gate(gate: GateConfig, heads: int, dim: int, hidden: int, weights: Weights) -> Gate:
    if gate.name is None:
        return Gate(activation=gate.activation)
    width = 1 if gate.is_by_head else dim
    spec = LinearSpec(
        names=(gate.name,),
        in_features=hidden,
        rows=(heads * width,),
        split="out",
        unit=width,
        is_gate=True,
    )
    return Gate(weights.linear(spec), gate.activation)


def _shared_attention(
    config: ModelConfig, layer: AttentionConfig, index: int, weights: Weights, rotaries: Rotaries
) -> SharedAttention:
    heads, (_, dim) = layer.heads or config.num_heads, config.kv_shape(index)
    hidden, head_norm, norm = config.hidden_size, layer.head_norm, None
    if head_norm is not None:
        norm = _rms(head_norm.norm, weights, head_norm.q_name, dim)
    q = LinearSpec(
        names=("q_proj",),
        in_features=hidden,
        rows=(heads * dim,),
        split="out",
        unit=dim,
        bias=layer.qkv_bias,
    )
    spec = _spec(config, index, layer, weights)
    of_q = weights.shard.of(heads, 1, may_repeat=False)
    of_kv = weights.shard.of(spec.kv_heads, 1, may_repeat=True)
    return SharedAttention(
        spec._replace(heads=of_q.stop - of_q.start, kv_heads=of_kv.stop - of_kv.start),
        index,
        rotaries.of(layer.rope, dim),
        q_proj=weights.linear(q),
        q_norm=norm,
        o_proj=weights.linear(o_spec(hidden, heads, dim, bias=layer.o_bias, name=config.names.o)),
    )


def _head_norms(
    heads: tuple[int, int, int], head_norm: HeadNormConfig, weights: Weights
) -> tuple[tuple[Norm | None, Norm | None], HeadChange | None]:
    """Norms that the rotation's kernel can apply, or else a separate change of the heads."""
    norm, dim = head_norm.norm, heads[2]
    if not head_norm.has_weight:
        return (None, None), PlainNorms(dim, norm.eps)
    of_heads = [(head_norm.q_name, heads[0]), (head_norm.k_name, heads[1])]
    if head_norm.over == "head":
        q, k = (_rms(norm, weights, name, dim) for name, _ in of_heads)
        return (q, k), None
    if head_norm.over == "width":
        q, k = (_rms(norm, weights, name, heads * dim) for name, heads in of_heads)
        return (None, None), WidthNorms(q, k)
    parts = [part for name, heads in of_heads for part in _by_head(weights, name, heads, dim)]
    return (None, None), LayerNorms(weights.read(parts).view(-1, dim), norm.eps)


def _by_head(weights: Weights, name: str, heads: int, dim: int) -> list[TensorSlice]:
    """The norm weights of a rank's heads, from one tensor for all heads or one tensor per head."""
    own = range(heads)[weights.shard.of(heads, 1, may_repeat=True)]
    if weights.has(f"{name}.0.weight"):
        return [TensorSlice(f"{name}.{head}.weight", (dim,)) for head in own]
    whole = TensorSlice(f"{name}.weight", (heads, dim))
    return [whole._replace(slices=(head,)) for head in own]


def q_scales(config: ModelConfig, layer: AttentionConfig, weights: Weights) -> torch.Tensor | None:
    """[max_positions] float32: factor on q by its position; None: q is not scaled."""
    if layer.llama4_query_scale is None:
        return None
    growth, original = layer.llama4_query_scale
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    turns = torch.floor((positions + layer.growth_counts_from) / original)
    return (1.0 + growth * torch.log1p(turns)).to(weights.device)


def _feed(config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights) -> FeedForward:
    names, moe = config.names, config.moe
    feeds = [weights.at(name) if name else weights for name in names.feeds]
    if moe is None or not moe.is_sparse(index):
        down = f"{names.down}.weight"
        found = next((feed for feed in feeds if feed.has(down)), feeds[-1])
        return _mlp(config, parts, index, found)
    if moe.is_beside_mlp:
        return _experts_beside(config, parts, moe, index, weights)
    router = f"{names.moe.router}.weight"
    found = next((feed for feed in feeds if feed.has(router)), feeds[0])
    if not moe.is_gated:
        return PlainSparseMLP.read(moe, index, config.hidden_size, found, names.moe)
    return SparseMLP.read(moe, index, config.hidden_size, found, names.moe, weights)


def _experts_beside(
    config: ModelConfig, parts: DecoderConfig, moe: MoEConfig, index: int, weights: Weights
) -> ExpertsBesideMLP:
    hidden, names = config.hidden_size, config.names
    experts = SparseMLP.read(moe, index, hidden, weights, names.moe)
    mlp = _mlp(config, parts, index, weights.at(names.feeds[-1]))
    assert isinstance(mlp, PlainMLP), "families with experts beside have a GELU"
    scale = weights.read([TensorSlice("router.scale", (hidden,))], dtype=torch.float32)
    post = names.feed_post
    of_parts = (names.feed_norm, f"{post}_1", f"{names.feed_norm}_2", f"{post}_2")
    read = (read_norm(parts.norm, weights, name, hidden) for name in of_parts)
    router = Norm(scale * hidden**-0.5, parts.norm.eps)
    before, behind, before_experts, behind_experts = read
    norms = DualNorm(before, behind, before_experts, behind_experts, router)
    return ExpertsBesideMLP(mlp, experts, norms, weights.peers)


def _mlp(config: ModelConfig, parts: DecoderConfig, index: int, weights: Weights) -> FeedForward:
    mlp, names = parts.mlp, config.names
    hidden = config.hidden_size
    inner = mlp.sizes[index] if mlp.sizes else config.intermediate_size
    limit = mlp.limits[index] if mlp.limits else 0.0
    of_down = down_spec(hidden, inner, bias=mlp.bias, name=names.down)
    if not mlp.is_gated:
        down = weights.linear(of_down)
        up = weights.linear(up_spec(hidden, inner, bias=mlp.bias, name=names.up))
        plain = _xielu(weights) if mlp.has_xielu else mlp.activation
        return PlainMLP(index, up, down, plain, is_gated=False)
    has_silu = mlp.activation == "silu" and mlp.factors == (1.0, 1.0) and not limit
    spec = gate_up_spec(
        hidden,
        inner,
        bias=mlp.bias,
        names=(names.gate, names.up),
        fused=names.gate_up,
        is_gated=has_silu,
    )
    both, down = weights.linear(spec), weights.linear(of_down)
    if has_silu:
        return GatedMLP(index, both, down)
    made: Activation | Gating | GaussianTopK = limited_silu(limit) if limit else mlp.activation
    sparsity = mlp.sparsities[index] if mlp.sparsities else 0.0
    if sparsity:
        made = GaussianTopK(NormalDist().inv_cdf(sparsity), mlp.activation)
    return PlainMLP(index, both, down, made, is_gated=True, factors=mlp.factors)


def _xielu(weights: Weights) -> XIELU:
    def number(name: str) -> torch.Tensor:
        return weights.read([TensorSlice(f"act_fn.{name}", (1,))], dtype=torch.float32)

    def constant(name: str, usual: float) -> float:
        if not weights.has(f"act_fn.{name}"):
            return usual
        return float(weights.tensor(TensorSlice(f"act_fn.{name}", ()), torch.float32))

    beta = constant("beta", 0.5)
    alpha_p, alpha_n = (F.softplus(number(name)) for name in ("alpha_p", "alpha_n"))
    return XIELU(alpha_p, beta + alpha_n, beta, constant("eps", -1e-6))


def read_norm(norm: NormConfig, weights: Weights, name: str, size: int) -> AnyNorm:
    if norm.kind == "rms":
        return _rms(norm, weights, name, size)
    if norm.kind == "plain layer":
        ones = torch.ones(size, dtype=weights.dtype, device=weights.device)
        return LayerNorm(ones, None, norm.eps)
    weight = weights.norm(name, size)
    bias = weights.read([TensorSlice(f"{name}.bias", (size,))]) if norm.has_bias else None
    return LayerNorm(weight + 1.0 if norm.adds_one else weight, bias, norm.eps)


def _rms(norm: NormConfig, weights: Weights, name: str, size: int) -> Norm:
    if not norm.adds_one:
        return Norm(weights.norm(name, size), norm.eps)
    weight = weights.read([TensorSlice(f"{name}.weight", (size,))], dtype=torch.float32)
    return Norm(weight + 1.0, norm.eps)
