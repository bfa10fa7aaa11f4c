"""Gated norms on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.gated_norm.spec import GateForm
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last

_ELEMENTS = 2048
"""Elements of a program."""


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    form: GateForm,
    gates_first: bool,
) -> torch.Tensor:
    """`weft.kernels.ops.gated_norm.gated_norm` for CUDA tensors; the gate has four axes."""
    rows, groups, width = x.shape
    x = x.contiguous()
    gate = gate if gate.stride(3) == 1 else gate.contiguous()
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    # Computed here, since Triton's own functions for sizes take microseconds.
    block = 1 << (width - 1).bit_length()
    together = min(max(1, _ELEMENTS // block), 1 << max(0, rows * groups - 1).bit_length())
    _norm_kernel[(-(-rows * groups // together),)](
        *(x, gate, weight, out, *gate.stride()[:3], rows * groups, groups, eps),
        *(0 if weight is None or weight.dim() == 1 else width,),
        WIDTH=width, BLOCK=block, TOGETHER=together, INNER=gate.shape[2], IS_SILU=form == "silu",
        GATES_FIRST=gates_first, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_row: int,
    gate_group: int,
    gate_inner: int,
    count: int,
    groups: int,
    eps: float,
    weight_group: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    INNER: tl.constexpr,
    IS_SILU: tl.constexpr,
    GATES_FIRST: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    number = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    element = tl.arange(0, BLOCK)
    mask = (number < count)[:, None] & (element < WIDTH)[None]
    place = number[:, None] * WIDTH + element[None]
    row, group = number // groups, number % groups
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    of_group = row * gate_row + group // INNER * gate_group + group % INNER * gate_inner
    at = gate + of_group[:, None] + element[None]
    given = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.sigmoid(given)
    if IS_SILU:
        factor *= given
    if GATES_FIRST or weight is None:
        wide *= factor
    if weight is not None:
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
        at = weight + (group * weight_group)[:, None] + element[None]
        wide *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if not GATES_FIRST:
            wide *= factor
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)
