"""Experts without gates: each is an MLP of two products with an activation between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.activation import activate
from weft.kernels.ops.linear import linear
from weft.kernels.ops.moe.spec import Routing
from weft.kernels.ops.plain_experts.spec import PlainExperts
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.plain_experts import gpu as _gpu
else:
    _gpu = deferred(__name__, "weft.kernels.ops.plain_experts.gpu")


def are_stacked(device: torch.device) -> bool:
    """Whether a device multiplies the weights of all experts as one stack in floats."""
    return device.type == "cuda"


def stack_experts(
    experts: Iterable[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes `PlainExperts.stacked`; each expert may be dropped when the next one is asked for.

    Args:
        experts: For each expert [I, H] and [H, I].
    """
    stacks: tuple[torch.Tensor, torch.Tensor] | None = None
    for number, (up, down) in enumerate(experts):
        if stacks is None:
            stacks = up.new_empty((count, *up.shape)), down.new_empty((count, *down.shape))
        stacks[0][number], stacks[1][number] = up, down
    assert stacks is not None, "a layer has experts"
    return stacks


def plain_experts(x: torch.Tensor, routing: Routing, w: PlainExperts) -> torch.Tensor:
    """The sum over a row's experts of share * down(activation(up(x))).

    Args:
        x: [T, H], contiguous, dtype and device of the weights.

    Returns:
        [T, H], dtype of `x`; summed in float32, on a CPU in ascending order of experts.
    """
    if w.stacked is not None:
        return _gpu.plain_moe(x, *routing, *w.stacked, w.activation, w.placement)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in sorted(set(routing.ids.flatten().tolist())):
        if w.placement is not None and expert == len(w.up):
            continue  # An expert of another rank.
        rows, places = torch.where(routing.ids == expert)
        inner = linear(x.index_select(0, rows), w.up[expert])
        inner = activate(inner, w.activation, is_gated=False)
        product = linear(inner, w.down[expert], out_dtype=torch.float32)
        total.index_add_(0, rows, product * routing.weights[rows, places, None])
    return total.to(x.dtype)
