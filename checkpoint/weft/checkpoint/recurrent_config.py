"""Layers that keep a state of fixed size in place of K and V, as configurations describe them. Pure
Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """A gated delta net (arXiv 2412.06464) after a short convolution of q, k and v."""

    key_heads: int
    value_heads: int
    """Heads of v and of the state; a multiple of `key_heads`."""
    key_dim: int
    value_dim: int
    taps: int
    """Rows that the convolution sees, a row's own included."""
    eps: float
    """Epsilon of the norm of each head's result."""
    is_fused: bool = False
    """Whether the checkpoint keeps all rows of a key head together, in `in_proj_qkvz` and
    `in_proj_ba`; if not, it has modules for q, k and v, for z, for b and for a.
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
    """Whether decays and gates are projected through as few columns as a head has."""
    least_decay: float | None = None
    """Least logarithm of a decay, which is then a sigmoid's share of it; None: no bound, with a
    softplus.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Mamba 2 (arXiv 2405.21060) after a short convolution of x, B and C."""

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
    """Bounds of dt; None: no upper bound."""
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on z, x, B, C and dt after their projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba (arXiv 2312.00752) with norms of dt, B and C (arXiv 2403.19887)."""

    width: int
    state_size: int
    """Elements of a channel's state, and of B and C."""
    rank: int
    """Width of the vector from which dt of all channels is projected."""
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
    """Lightning attention (arXiv 2401.04658; arXiv 2501.08313): linear attention whose heads decay
    at rates that head and layer fix.
    """

    heads: int
    dim: int
    num_layers: int
    """Layers of the model, of all kinds."""
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
