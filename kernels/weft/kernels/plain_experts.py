"""Experts without gates: each is an MLP of two products with an activation between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.kernels.activation import Activation, activate
from weft.kernels.linear import LinearWeight, linear
from weft.kernels.moe import Routing


class PlainExperts(NamedTuple):
    """The MLPs of all experts of a layer."""

    up: tuple[LinearWeight, ...]
    """[I, H] each."""
    down: tuple[LinearWeight, ...]
    """[H, I] each."""
    activation: Activation
    placement: torch.Tensor | None = None
    """See `weft.kernels.moe.ExpertWeights`."""


def plain_experts(x: torch.Tensor, routing: Routing, w: PlainExperts) -> torch.Tensor:
    """The sum over a row's experts of share * down(activation(up(x))), expert by expert.

    Args:
        x: [T, H], contiguous, dtype of the weights, on a CPU.
        routing: From `weft.kernels.moe.route`.
        w: The experts.

    Returns:
        [T, H], dtype of `x`; summed in float32, in ascending order of experts.

    Raises:
        ValueError: `x` is on another device.
    """
    if x.device.type != "cpu":
        raise ValueError(f"experts without gates are not supported on {x.device}")
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(routing.ids.flatten().tolist())):
        if w.placement is not None and expert == len(w.up):
            continue  # Another rank's.
        rows, places = torch.where(routing.ids == expert)
        inner = linear(x.index_select(0, rows), w.up[expert])
        inner = activate(inner, w.activation, is_gated=False)
        product = linear(inner, w.down[expert], out_dtype=torch.float32)
        total.index_add_(0, rows, product * routing.weights[rows, places, None])
    return total.to(x.dtype)
