"""The parts of a decoder whose layers are not Llama's or Qwen's, as configurations say them.

Pure Python. An architecture is a function that reads one family's config.json into these records
(`weft.engine.checkpoint.families`); `weft.engine.model.archs.decoder` makes layers of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.engine.checkpoint.moe_config import MoENamesConfig
from weft.engine.checkpoint.recurrent_config import Mamba2Config, RecurrentConfig
from weft.engine.checkpoint.rope import RopeConfig, rope_values


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm of rows."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_bias: bool = False
    """Of a layer norm."""
    adds_one: bool = False
    """Whether the weight is what the checkpoint has plus 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormConfig:
    """Norms of q and k."""

    norm: NormConfig
    over: Literal["head", "each", "width"] = "head"
    """head: each head, by one weight for all of them; each: by a weight of its own; width: all
    heads together.
    """
    is_after_rotation: bool = False
    q_name: str = "q_norm"
    k_name: str = "k_norm"


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
    """Bound of the scores; None: there is none."""
    has_sinks: bool = False
    """Whether each head has a logit of its own in the softmax: `sinks`."""
    q_growth: tuple[float, int] | None = None
    """(b, n): q at position p is multiplied by 1 + b * log(1 + p // n)."""
    has_gate: bool = False
    """Whether each head's result is weighed by sigmoids, projected with its q: `q_proj` has each
    head's q and gate.
    """
    first_position: int = 0
    """First position to which rows attend."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint: a gate only where there is one."""
        values = asdict(self)
        if self.rope is not None:
            values["rope"] = rope_values(self.rope)
        if not self.has_gate:
            del values["has_gate"]
        del values["first_position"]  # Of draft heads alone.
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Attention and Mamba 2 side by side, reading the same rows; their results are added up."""

    attention: AttentionConfig
    mamba: Mamba2Config
    attention_factor: float
    """On the result of attention."""
    mamba_factor: float
    """On the other result."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint."""
        return {**asdict(self), "attention": self.attention.values()}


MixerConfig = AttentionConfig | ParallelConfig | RecurrentConfig
"""The block of a layer in which rows exchange information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The feed-forward block of every layer."""

    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    is_gated: bool = True
    bias: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    """On the gate before its activation, and on the result."""

    def values(self) -> dict[str, Any]:
        """The fields for a fingerprint: factors only where there are some."""
        values = asdict(self)
        if self.factors == (1.0, 1.0):
            del values["factors"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What layers compute, beyond the sizes that `ModelConfig` has."""

    norm: NormConfig
    """Of the stream, before and behind blocks and at the end."""
    layers: tuple[MixerConfig, ...]
    """Attention, or what is in its place, by layer."""
    mlp: MlpConfig
    order: Literal["before", "after", "around", "parallel"] = "before"
    """Where norms are: before each block, behind it (in place of before), both, or one before both
    blocks, which read the same.
    """
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what each block adds."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    without_feed: tuple[int, ...] = ()
    """Layers, from 0, that have no feed-forward block."""

    def values(self) -> Mapping[str, Any]:
        """The fields for a fingerprint."""
        values = {**asdict(self), "mlp": self.mlp.values()}
        if not self.without_feed:
            del values["without_feed"]
        values["layers"] = [_mixer_values(layer) for layer in self.layers]
        return values

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that have K and V."""
        kinds = AttentionConfig | ParallelConfig
        return tuple(n for n, layer in enumerate(self.layers) if isinstance(layer, kinds))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers, from 0, that have a state."""
        return tuple(
            n for n, layer in enumerate(self.layers) if not isinstance(layer, AttentionConfig)
        )

    @property
    def attention(self) -> AttentionConfig:
        """The attention of the first layer that has some."""
        layers = (n.attention if isinstance(n, ParallelConfig) else n for n in self.layers)
        return next(layer for layer in layers if isinstance(layer, AttentionConfig))


def _mixer_values(layer: MixerConfig) -> dict[str, Any]:
    if isinstance(layer, AttentionConfig | ParallelConfig):
        return layer.values()
    return {"kind": type(layer).__name__, **asdict(layer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesConfig:
    """What a checkpoint calls its parts."""

    bodies: tuple[str, ...] = ("model",)
    """Prefixes of embedding, layers and last norm; the first that there is counts."""
    heads: tuple[str, ...] = ("lm_head",)
    """The same of the LM head."""
    left_out: tuple[str, ...] = ()
    """Prefixes of tensors that have no part in text: towers of images, further predictions."""
    input_norm: str = "input_layernorm"
    """Norm before attention."""
    mixer_post: str = "post_attention_layernorm"
    """Norm behind it."""
    feed_norm: str = "post_attention_layernorm"
    """Norm before the feed-forward block."""
    feed_post: str = "post_feedforward_layernorm"
    """Norm behind it."""
    last_norm: str = "norm"
    embedding: str = "embed_tokens"
    attention: str = "self_attn"
    """The block of attention."""
    recurrent: str = "linear_attn"
    """The block that has a state."""
    blocks: tuple[tuple[int, int | None], ...] = ()
    """Where a checkpoint numbers blocks and not layers: the numbers of each layer's mixer and
    feed-forward block, None for no such block.
    """
    qkv: str | None = None
    """Module of all rows of q, k and v; None: each is one of its own."""
    o: str = "o_proj"
    gate_up: str | None = None
    """Module of all rows of gate and up."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    feeds: tuple[str, ...] = ("mlp",)
    """The feed-forward block; the first that a layer has counts."""
    moe: MoENamesConfig = MoENamesConfig()  # noqa: RUF009 - frozen
    """Parameters of a mixture of experts."""

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has no part in text."""
        return name.startswith(self.left_out) if self.left_out else False
