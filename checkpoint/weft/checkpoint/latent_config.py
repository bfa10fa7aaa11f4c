"""Sizes of multi-head latent attention from config.json. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    For each position the cache keeps one latent, from which all heads derive their keys and values,
    and one rotated key that all heads share.
    """

    q_rank: int | None
    """Width of the latent from which queries are projected; None: they are projected from the
    stream.
    """
    kv_rank: int
    """Width of the latent."""
    nope_dim: int
    """Elements of a query head without rotation; they match the latent's part of the key."""
    rope_dim: int
    """Rotated elements of a query head, and of the shared key."""
    value_dim: int
