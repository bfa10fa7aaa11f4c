"""The parts of a decoder whose layers are not Llama's or Qwen's, as configurations say them.

Pure Python. An architecture is a function that reads one family's config.json into these records
(`weft.engine.checkpoint.families`); `weft.engine.model.archs.decoder` makes layers of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.engine.checkpoint.moe_config import MoENamesConfig
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
    first_position: int = 0
    """First position to which rows attend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """The feed-forward block of every layer."""

    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    is_gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What layers compute, beyond the sizes that `ModelConfig` has."""

    norm: NormConfig
    """Of the stream, before and behind blocks and at the end."""
    layers: tuple[AttentionConfig, ...]
    """Attention by layer."""
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

    def values(self) -> Mapping[str, Any]:
        """The fields for a fingerprint."""
        values = asdict(self)
        for layer, config in zip(values["layers"], self.layers, strict=True):
            del layer["first_position"]  # Of draft heads alone.
            if config.rope is not None:
                layer["rope"] = rope_values(config.rope)
        return values


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
    qkv: str | None = None
    """Module of all rows of q, k and v; None: each is one of its own."""
    o: str = "o_proj"
    gate_up: str | None = None
    """Module of all rows of gate and up."""
    up: str = "up_proj"
    down: str = "down_proj"
    feeds: tuple[str, ...] = ("mlp",)
    """The feed-forward block; the first that a layer has counts."""
    moe: MoENamesConfig = MoENamesConfig()  # noqa: RUF009 - frozen
    """Parameters of a mixture of experts."""

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has no part in text."""
        return name.startswith(self.left_out) if self.left_out else False
