"""Decay and beta of gated delta nets on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def delta_gates(
    ba: torch.Tensor, rates: torch.Tensor, dt_bias: torch.Tensor, shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = ba.shape[0], rates.shape[0]
    ba = ba if ba.stride(1) == 1 else ba.contiguous()
    made = torch.empty((2, rows, heads), dtype=torch.float32, device=ba.device)
    _gates_kernel[(-(-rows * heads // 256),)](
        *(ba, rates, dt_bias, made[0], made[1], ba.stride(0), rows * heads, heads, shared),
        BLOCK=256, num_warps=4,
    )  # fmt: skip
    return made[0], made[1]


@triton.jit(do_not_specialize=["count"])
def _gates_kernel(
    ba: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    ba_row: int,
    count: int,
    heads: int,
    shared: int,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = number < count
    row, head = (number // heads).to(tl.int64), number % heads
    at = ba + row * ba_row + head // shared * 2 * shared + head % shared
    b = tl.load(at, mask=mask, other=0.0)
    a = tl.load(at + shared, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(dt_bias + head, mask=mask, other=0.0)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    tl.store(decay + number, tl.load(rates + head, mask=mask, other=0.0) * soft, mask=mask)
    made = tl.sigmoid(b.to(tl.float32)).to(ba.dtype.element_ty).to(tl.float32)
    tl.store(beta + number, made, mask=mask)
