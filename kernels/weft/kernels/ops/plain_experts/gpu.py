"""Experts without gates on a GPU, computed like gated experts of many rows, with an activation in
between.
"""

from __future__ import annotations

import torch
from weft.kernels.ops.activation import activate
from weft.kernels.ops.activation.spec import Activation
from weft.kernels.ops.moe.spec import ExpertParts
from weft.kernels.ops.moe.tiles import tiles_for
from weft.kernels.ops.moe.triton_combine import combine
from weft.kernels.ops.moe.triton_products import multiply_sorted
from weft.kernels.ops.moe.triton_sort import sort_pairs
from weft.kernels.shared.dependent_launch import launch_options


def plain_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
    placement: torch.Tensor | None,
) -> torch.Tensor:
    """`weft.kernels.ops.plain_experts.plain_experts` for CUDA tensors; T must be at least 1.

    Args:
        ids: [T, k] int32, each below E, or E for an expert of another rank.
        up: [E, I, H].
        down: [E, H, I].
    """
    (rows, top_k), (experts, hidden, inner) = ids.shape, down.shape
    more = ExpertParts(placement=placement)
    tiles = tiles_for(rows, top_k, more.num_routed(experts), hidden, inner)
    blocks, options = sort_pairs(ids, experts, tiles.rows), launch_options(x.device)
    found = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    multiply_sorted(
        found, x, up, torch.ones_like(shares), blocks, None, tiles, top_k, options, is_gated=False
    )
    found = activate(found, activation, is_gated=False)
    products = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    multiply_sorted(products, found, down, shares, blocks, None, tiles, 1, options, is_gated=False)
    share = None if placement is None else (ids, experts)
    return combine(products, None, None, options, top_k, None, None, is_fixed=False, share=share)
