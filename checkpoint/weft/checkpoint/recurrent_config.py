"""Layers that keep a state of fixed size in place of K and V, as configurations say them.

Pure Python, as `weft.checkpoint.parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net (arXiv 2412.06464) behind a short convolution of q, k and v."""

    key_heads: int
    """Heads of q and k."""
    value_heads: int
    """Heads of v and of the state; a multiple of `key_heads`."""
    key_dim: int
    value_dim: int
    taps: int
    """Rows that the convolution sees, a row's own included."""
    eps: float
    """Epsilon of the norm of each head's result."""
    is_fused: bool = False
    """Whether the checkpoint keeps all rows of a key head together, `in_proj_qkvz` and
    `in_proj_ba`; else q, k and v, z, b and a.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaAttentionConfig:
    """Kimi Delta Attention (arXiv 2510.26692): every element of a key has a decay of its own."""

    heads: int
    dim: int
    taps: int
    """Rows that the convolution of q, k and v sees, a row's own included."""
    eps: float
    """Epsilon of the norm of each head's result."""
    is_low_rank: bool = True
    """Whether decays and gates are projected by way of as few columns as a head has."""
    least_decay: float | None = None
    """Least logarithm of a decay, of which it is a sigmoid's share; None: any, by a softplus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Mamba 2 (arXiv 2405.21060) behind a short convolution of x, B and C."""

    heads: int
    head_dim: int
    groups: int
    """Groups of heads that share B and C."""
    state_size: int
    """Elements of B and C."""
    taps: int
    """Rows that the convolution sees, a row's own included."""
    eps: float
    norm: Literal["behind gate", "before gate", "none"] = "behind gate"
    """Where the norm of each group's result is."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the projection to z, x, B, C and dt has a bias."""
    out_bias: bool = False
    least_step: float = 0.0
    largest_step: float | None = None
    """Bounds of dt; None: there is none."""
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on z, x, B, C and dt as they are projected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba (arXiv 2312.00752) with norms of dt, B and C (arXiv 2403.19887)."""

    width: int
    """Channels."""
    state_size: int
    """Elements of a channel's state, and of B and C."""
    rank: int
    """Width from which dt of all channels is projected."""
    taps: int
    """Rows that the convolution sees, a row's own included."""
    eps: float
    conv_bias: bool = True
    bias: bool = False
    """Whether the projections to x and z, and back, have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A short convolution between two gates (arXiv 2511.23404)."""

    width: int
    taps: int
    """Rows that the convolution sees, a row's own included."""
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningConfig:
    """Lightning attention (arXiv 2401.04658; arXiv 2501.08313): linear attention whose heads forget
    at rates that are fixed by head and layer.
    """

    heads: int
    dim: int
    num_layers: int
    """Number of the model's layers of all kinds."""
    eps: float
    """Epsilon of the norm of all heads' results together."""


RecurrentConfig = (
    GatedDeltaConfig
    | DeltaAttentionConfig
    | Mamba2Config
    | MambaConfig
    | ShortConvConfig
    | LightningConfig
)
