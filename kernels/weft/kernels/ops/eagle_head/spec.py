"""Types of the draft head of EAGLE-1 and EAGLE-2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.peers.spec import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHeadWeight:
    """Parameters of a head; H is its hidden size, and the target's."""

    fc: LinearWeight
    """[H, 2 * H]: for embedding and state, side by side."""
    qkv: LinearWeight
    """[(Hq + 2 * Hkv) * D, H]."""
    kv: LinearWeight
    """[2 * Hkv * D, 2 * H]: `qkv` without the rows of q."""
    o: LinearWeight
    """[H, Hq * D]."""
    gate_up: LinearWeight
    """[2 * I, H], from `pack_gate_up`."""
    down: LinearWeight
    """[H, I]."""
    lm_head: LinearWeight
    """[vocab, H]."""
    post_norm: torch.Tensor
    """[H]: norm before the MLP."""
    embedding: torch.Tensor
    """[vocab, H]."""
    cos_sin: torch.Tensor
    """[max_positions, D] float32, as in `rope_and_cache`."""
    num_heads: int
    eps: float
    peers: Peers | None = None
    """Ranks that hold the other shares of the layer's heads and MLP; None: this process has all of
    it.
    """
