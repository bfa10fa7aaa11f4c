"""Activations of MLPs on a GPU, gated and plain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv

_BLOCK = 1024


def activate(x: torch.Tensor, activation: str, *, is_gated: bool) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    rows, width = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _activate_kernel[(rows, cdiv(width, _BLOCK))](
            out,
            x,
            width,
            ACTIVATION=activation,
            IS_GATED=is_gated,
            BLOCK=_BLOCK,
            num_warps=4,
            **launch_options(x.device),
        )
    return out


@triton.jit
def _activate_kernel(
    out: tl.tensor,
    x: tl.tensor,
    width: int,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = x + row * width * (2 if IS_GATED else 1) + column
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACTIVATION == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(z) = 2 / (1 + exp(-2 z))
        twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-twice))
    elif ACTIVATION == "relu":
        value = tl.where(value > 0.0, value, 0.0 * value)
    else:
        value = tl.where(value > 0.0, value * value, 0.0 * value)
    if IS_GATED:
        value *= tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up
