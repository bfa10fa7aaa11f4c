"""The router of a mixture of experts on a GPU: softmax, selection and order in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.gpu.dependent_launch import launch_options, release_next, wait_for_last


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.moe.route` for CUDA tensors: ids [T, k] int32 and shares [T, k] float32."""
    rows, experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or not 1 <= top_k <= experts:
        raise ValueError(f"{top_k} of logits {tuple(logits.shape)} {logits.dtype}, or strided")
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            ids,
            shares,
            logits,
            experts,
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1 if experts <= 256 else 4,
            **launch_options(logits.device),
        )
    return ids, shares


@triton.jit
def _route_kernel(
    ids: tl.tensor,
    shares: tl.tensor,
    logits: tl.tensor,
    experts: int,
    IS_DEPENDENT: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    release_next(IS_DEPENDENT)
    wait_for_last(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < experts
    values = tl.load(logits + row * experts + expert, mask=exists, other=float("-inf"))
    power = tl.exp(values - tl.max(values, axis=0))
    share = power / tl.sum(power, axis=0)
    # Shares that are no numbers must not make an expert be chosen twice: places would stay empty.
    share = tl.where(share == share, share, 0.0)
    left = tl.where(exists, share, -1.0)
    chosen = tl.zeros([BLOCK], tl.int32)
    for _ in range(TOP_K):
        best = tl.argmax(left, axis=0)
        chosen = tl.where(expert == best, 1, chosen)
        left = tl.where(expert == best, -2.0, left)
    share = tl.where(chosen == 1, share, 0.0)
    if RENORMALISE:
        share = share / tl.sum(share, axis=0)
    place = row * TOP_K + tl.cumsum(chosen, axis=0) - 1
    tl.store(ids + place, expert, mask=chosen == 1)
    tl.store(shares + place, share, mask=chosen == 1)
