"""Gated activations on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv

_BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul_kernel[(rows, cdiv(width, _BLOCK))](
            out, x, width, BLOCK=_BLOCK, num_warps=4, **launch_options(x.device)
        )
    return out


@triton.jit
def _silu_and_mul_kernel(
    out: tl.tensor,
    x: tl.tensor,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_at = x + row * 2 * width + column
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=mask, other=0.0).to(tl.float32)
    product = silu_and(gate, up)
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up
