"""The parts of decoders whose layers are not those of Llama or Qwen, as configurations describe
them.

Pure Python. An architecture is a function that reads one family's config.json into these records
(`weft.checkpoint.families`); `weft.engine.model.archs.decoder` makes layers of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from weft.checkpoint.moe_config import MoENamesConfig, without_defaults
from weft.checkpoint.recurrent_config import (
    DeltaAttentionConfig,
    Mamba2Config,
    RecurrentConfig,
)
from weft.checkpoint.rope import RopeConfig, rope_values


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    eps: float
    kind: Literal["rms", "layer", "plain layer"] = "rms"
    """A plain layer norm has no weight."""
    has_bias: bool = False
    """Whether a layer norm has a bias."""
    adds_one: bool = False
    """Whether the weight is the checkpoint's plus 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormConfig:
    """Norms of q and k."""

    norm: NormConfig
    over: Literal["head", "each", "width"] = "head"
    """head: each head, with one weight for all heads; each: each head, with a weight of its own;
    width: all heads together.
    """
    is_after_rotation: bool = False
    q_name: str = "q_norm"
    k_name: str = "k_norm"
    has_weight: bool = True
    """Whether the checkpoint has weights for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """A factor on the heads of attention's result, from a projection of the layer's input."""

    name: str | None = None
    """Name of the projection; None: `q_proj` has each head's factors after its q."""
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    is_by_head: bool = False
    """Whether there is one factor for each head instead of one for each element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerConfig:
    """A second embedding of which each layer adds its own part (per-layer embeddings of Gemma 3n
    and 4): a gate of the stream times the part, projected and normalised.
    """

    vocab_size: int
    dim: int
    """Elements of one layer's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Layers over several copies of the stream (AltUp), with a learned addition to attention
    (LAuReL), as in Gemma 3n.
    """

    copies: int
    """Copies of the stream, of which each layer computes the first."""
    laurel_rank: int
    """Inner width of the addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer."""

    rope: RopeConfig | None
    """None: heads are not rotated."""
    scale: float
    """Factor on the scores."""
    qkv_bias: bool = False
    o_bias: bool = False
    head_norm: HeadNormConfig | None = None
    softcap: float | None = None
    """Cap of the scores; None: there is none."""
    has_sinks: bool = False
    """Whether each head has a logit of its own in the softmax, in `sinks`."""
    llama4_query_scale: tuple[float, int] | None = None
    """(b, n): q at position p is multiplied by 1 + b * log(1 + p // n)."""
    growth_counts_from: int = 0
    """The number of the first position in `llama4_query_scale`."""
    heads: int | None = None
    """Query heads; None: the model's."""
    kv_heads: int | None = None
    """K and V heads; None: the model's."""
    head_dim: int | None = None
    """Elements of a head; None: the model's."""
    value_dim: int | None = None
    """Elements of a head of V; None: as many as of K."""
    value_factor: float = 1.0
    value_norm: NormConfig | None = None
    """Norm of each head of V, without weight; None: there is none."""
    is_value_key: bool = False
    """Whether V is the projection of K, before K's norm and rotation."""
    kv_from: int | None = None
    """Index of the earlier layer whose K and V the layer attends to; None: the layer has its
    own.
    """
    gate: GateConfig | None = None
    """A gate on attention's result; None: there is none."""
    clip: float | None = None
    """Bound of q, k and v after their projection; None: there is none."""
    first_position: int = 0
    """First position to which rows attend."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        values = without_defaults(self, 8)
        if self.rope is not None:
            values["rope"] = rope_values(self.rope)
        if self.head_norm is not None:
            values["head_norm"] = without_defaults(self.head_norm, 5)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Attention and Mamba 2 side by side, which read the same rows; their results are added up."""

    attention: AttentionConfig
    mamba: Mamba2Config
    attention_factor: float
    """Factor on the result of attention."""
    mamba_factor: float
    """Factor on the result of Mamba 2."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return {**asdict(self), "attention": self.attention.values()}


MixerConfig = AttentionConfig | ParallelConfig | RecurrentConfig
"""The block of a layer in which rows exchange information."""
MlpActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The feed-forward block of every layer."""

    activation: MlpActivation = "silu"
    is_gated: bool = True
    bias: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors on the gate before its activation, and on the result."""
    sizes: tuple[int, ...] = ()
    """Inner width by layer; empty: all layers have the model's."""
    limits: tuple[float, ...] = ()
    """For each layer, the largest activated gate and the largest magnitude of the gated value; 0 or
    no entry: no limit. They hold for shared experts too.
    """
    has_xielu: bool = False
    """Whether the activation is xIELU without a gate; the checkpoint has its parameters."""
    sparsities: tuple[float, ...] = ()
    """For each layer, the share of a row's gates that become 0 (Gaussian top-k); 0 or no entry:
    gates stay as they are.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What layers compute, in addition to the sizes that `ModelConfig` has."""

    norm: NormConfig
    """The norms of the stream, before and after blocks and at the end."""
    layers: tuple[MixerConfig, ...]
    """Attention, or the mixer in its place, by layer."""
    mlp: MlpConfig
    order: Literal["before", "after", "around", "parallel", "parallel by two norms"] = "before"
    """Where norms are. before: before each block. after: after each block instead. around: both.
    parallel: one before both blocks, which read the same rows. parallel by two norms: each block
    reads the same stream through a norm of its own.
    """
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what each block adds."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    without_feed: tuple[int, ...] = ()
    """Indices of layers that have no feed-forward block."""
    per_layer: PerLayerConfig | None = None
    """A second embedding; None: there is none."""
    altup: AltUpConfig | None = None
    """Copies of the stream; None: there is one stream."""
    has_layer_factors: bool = False
    """Whether each layer ends with a factor on the stream, which the checkpoint has."""
    kept: tuple[tuple[float, float], ...] = ()
    """For each layer, the factors on what its blocks read. A block's result is then added to what
    it read, and not to the stream; empty: results are added to the stream.
    """
    has_head_bias: bool = False
    """Whether the LM head has a bias."""
    first_position_row: int | None = None
    """Row of the table of learned positions that is added to position 0; None: there is no
    table.
    """
    has_sinusoids: bool = False
    """Whether that table has sines and cosines, which the checkpoint does not contain."""

    def values(self) -> Mapping[str, Any]:
        """The fields for a fingerprint."""
        values = without_defaults(self, 8)
        values["mlp"] = without_defaults(self.mlp, 3)
        values["layers"] = [_mixer_values(layer) for layer in self.layers]
        return values

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have K and V."""
        kinds = AttentionConfig | ParallelConfig
        return tuple(n for n, layer in enumerate(self.layers) if isinstance(layer, kinds))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a state."""
        return tuple(
            n for n, layer in enumerate(self.layers) if not isinstance(layer, AttentionConfig)
        )

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The form of the layers that have a state, which are all alike; None: there are none."""
        for layer in self.layers:
            if isinstance(layer, ParallelConfig):
                return layer.mamba
            if not isinstance(layer, AttentionConfig):
                return layer
        return None

    @property
    def attentions(self) -> list[AttentionConfig]:
        """The attention of the layers that have attention."""
        return [self.attention_of(layer) for layer in self.attention_layers]

    @property
    def attention(self) -> AttentionConfig:
        """The attention of the first layer that has attention."""
        return self.attention_of(self.attention_layers[0])

    def attention_of(self, layer: int) -> AttentionConfig:
        """The attention of a layer that has attention."""
        config = self.layers[layer]
        config = config.attention if isinstance(config, ParallelConfig) else config
        assert isinstance(config, AttentionConfig), "a recurrent layer has no attention"
        return config


def _mixer_values(layer: MixerConfig) -> dict[str, Any]:
    if isinstance(layer, AttentionConfig | ParallelConfig):
        return layer.values()
    first = 4 if isinstance(layer, DeltaAttentionConfig) else len(fields(layer))
    return {"kind": type(layer).__name__, **without_defaults(layer, first)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesConfig:
    """Names of the checkpoint's parts."""

    bodies: tuple[str, ...] = ("model",)
    """Prefixes of embedding, layers and last norm; the first one that exists counts."""
    heads: tuple[str, ...] = ("lm_head",)
    """Names of the LM head; the first one that exists counts."""
    left_out: tuple[str, ...] = ()
    """Prefixes of tensors that text does not need: image towers, further predictions."""
    constants: tuple[str, ...] = ()
    """Ends of the names of tensors that old files have although they depend on no training."""
    unused: tuple[str, ...] = ()
    """Parts of the names of tensors that files have although no layer reads them."""
    has_transposed: bool = False
    """Whether products of layers are stored as [columns, rows]."""
    input_norm: str = "input_layernorm"
    """Norm before attention."""
    mixer_post: str = "post_attention_layernorm"
    """Norm after attention."""
    feed_norm: str = "post_attention_layernorm"
    """Norm before the feed-forward block."""
    feed_post: str = "post_feedforward_layernorm"
    """Norm after the feed-forward block."""
    last_norm: str = "norm"
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    """Learned positions."""
    layers: str = "layers"
    attention: str = "self_attn"
    """The attention block."""
    recurrent: str = "linear_attn"
    """The block with a state."""
    blocks: tuple[tuple[int, int | None], ...] = ()
    """If a checkpoint numbers blocks instead of layers: the numbers of each layer's mixer and
    feed-forward block, None for a block that does not exist.
    """
    qkv: str | None = None
    """Module with all rows of q, k and v; None: each is a module."""
    is_qkv_by_head: bool = False
    """Whether that module keeps the rows of each K and V head and of its queries together."""
    qkv_parts: int = 1
    """Parts of that module's rows, one after another, each with an equal share of all heads."""
    has_value_before_key: bool = False
    """Whether V's rows precede K's there."""
    o: str = "o_proj"
    sinks: str = "sinks"
    gate_up: str | None = None
    """Module with all rows of gate and up; None: each is a module."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    feeds: tuple[str, ...] = ("mlp",)
    """The feed-forward block; the first one that a layer has counts."""
    per_layer: tuple[str, str, str] = (
        "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
    )  # fmt: skip
    """Gate, projection and norm of a layer's part of a second embedding."""
    per_layer_embedding: tuple[str, str, str] = (
        "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
    )  # fmt: skip
    """The second embedding, the projection of the first one that is added to it, and its norm."""
    moe: MoENamesConfig = MoENamesConfig()  # noqa: RUF009 - frozen
    """Parameters of a mixture of experts."""

    def qkv_rows(self, kv_heads: int) -> tuple[int, tuple[int, ...]]:
        """Number of groups of rows in a fused qkv, and the order of q, k and v (0, 1, 2) in each
        group.
        """
        order = (0, 2, 1) if self.has_value_before_key else (0, 1, 2)
        return kv_heads if self.is_qkv_by_head else self.qkv_parts, order

    def is_left_out(self, name: str) -> bool:
        """Whether text does not need a tensor of the checkpoint."""
        if name.startswith(self.left_out) or name.endswith(self.constants):
            return True
        return any(part in name for part in self.unused)
