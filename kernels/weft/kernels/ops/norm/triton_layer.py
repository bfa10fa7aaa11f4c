"""Layer norm on a GPU with the addition before it; each program reads one row, once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import next_power_of_2


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    rows, width = x.shape
    out = torch.empty_like(x)
    block = next_power_of_2(width)
    if rows:
        _add_layer_norm_kernel[(rows,)](
            out,
            x,
            residual,
            weight,
            bias,
            width,
            eps,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **launch_options(x.device),
        )
    return out


@triton.jit
def _add_layer_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    width: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last()
    row = tl.load(x + begin + column, mask=mask, other=0.0).to(tl.float32)
    row += tl.load(residual + begin + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(row, axis=0) / width
    centred = tl.where(mask, row - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    normed = centred * scale * gain
    if bias is not None:
        normed += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + column, normed.to(out.dtype.element_ty), mask=mask)
