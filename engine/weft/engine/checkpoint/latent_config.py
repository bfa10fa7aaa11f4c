"""What config.json says of multi-head latent attention.

Pure Python, as `weft.engine.checkpoint.config`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Of each position one latent is kept, of which all heads make their keys and values, and one
    rotated key that all heads share.
    """

    q_rank: int | None
    """Width of the latent that queries are made of; None: they are made of the stream."""
    kv_rank: int
    """Width of the latent."""
    nope_dim: int
    """Elements of a query head that meet what is made of the latent."""
    rope_dim: int
    """Rotated elements of a query head, and of the shared key."""
    value_dim: int
    """Elements of a head's value."""
