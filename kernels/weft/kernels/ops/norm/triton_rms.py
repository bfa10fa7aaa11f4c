"""RMS normalisation on a GPU; each program reads one row, once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, empty_rows, store_fp8_row
from weft.kernels.ops.linear.triton_fp8_weights import GROUP
from weft.kernels.ops.lora.triton_fold import FOLDED, NOTHING, Folded, added_to_row, ranks_at_once
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.formats.quantised import FP8_GROUP
from weft.kernels.shared.launch_sizes import next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _launch(out, x, None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: Folded | None = None,
    tap: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.ops.norm.add_rms_norm` for CUDA tensors.

    `added` is what adapters add to `x`. `tap`, [T, H] with rows of any stride, receives the sum as
    well, and `rounded` the norm's result in FP8.
    """
    out = torch.empty_like(x)
    _launch(out, x, residual, weight, eps, added, tap, rounded)
    return out, residual


def add_rounding_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: Folded | None = None,
    tap: torch.Tensor | None = None,
    *,
    has_groups: bool,
) -> tuple[torch.Tensor, Fp8Rows]:
    """`add_rms_norm` that returns the norm's result and, in place of the sum, that result rounded
    to FP8 as by `quantise_rows`, all in one launch.
    """
    out = torch.empty_like(x)
    rounded = empty_rows(x.shape[0], x.shape[1], x.device, has_groups=has_groups)
    _launch(out, x, residual, weight, eps, added, tap, rounded)
    return out, rounded


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    added: Folded | None = None,
    tap: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> None:
    rows, width = x.shape
    is_typed = weight.dtype in (x.dtype, torch.float32)
    if weight.shape != (width,) or not is_typed or not x.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} "
            f"{x.dtype} contiguous={x.is_contiguous()}"
        )
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} is not like x")
    if tap is not None and (tap.shape != x.shape or tap.dtype != x.dtype or tap.stride(1) != 1):
        raise ValueError(f"tap {tuple(tap.shape)} {tap.dtype} is not like x")
    if rows == 0:
        return
    block = next_power_of_2(width if rounded is None else max(width, FP8_GROUP))
    sums, block_sums = (1, 1) if added is None else added.sums
    _rms_norm_kernel[(rows,)](
        *(out, x, residual, weight, tap, width, 0 if tap is None else tap.stride(0), eps),
        *(NOTHING if added is None else added.arguments()),
        *((None, None, 0) if rounded is None else (*rounded[:2], rounded.data.shape[0])),
        HAS_GROUPS=rounded is not None and rounded.has_groups,
        BLOCK=block, SUMS=sums, BLOCK_SUMS=block_sums,
        AT_ONCE=ranks_at_once(block, x.element_size()),
        num_warps=max(1, min(16, block // (512 if added is None else 256))),
        **launch_options(x.device, is_alone=added is not None and added.is_alone),
    )  # fmt: skip


@triton.jit(do_not_specialize=[*FOLDED, "whole_rows"])
def _rms_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    tap: tl.tensor,
    width: int,
    tap_stride: int,
    eps: float,
    ranks: tl.tensor,
    entries: tl.tensor,
    b: tl.tensor,
    rank_width: int,
    entry_width: int,
    stride: int,
    rounded: tl.tensor,
    rounded_scales: tl.tensor,
    whole_rows: int,
    HAS_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_SUMS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    release_next()
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    mask = column < width
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_last()
    row = tl.load(x + begin + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        stream = tl.load(residual + begin + column, mask=mask, other=0.0).to(tl.float32)
    if ranks is not None:
        token = tl.program_id(0)
        row += added_to_row(
            ranks + token * rank_width, entries + token * entry_width, b, width,
            column, mask, stride, SUMS, BLOCK_SUMS, AT_ONCE,
        )  # fmt: skip
    if residual is not None:
        # The stream keeps its dtype, and the norm reads the rounded sum.
        total = (stream + row).to(residual.dtype.element_ty)
        tl.store(residual + begin + column, total, mask=mask)
        if tap is not None:
            tap_at = tl.program_id(0).to(tl.int64) * tap_stride + column
            tl.store(tap + tap_at, total, mask=mask)
        row = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / width + eps)
    normed = (row * scale * gain).to(out.dtype.element_ty)
    tl.store(out + begin + column, normed, mask=mask)
    if rounded is not None:
        group = tl.arange(0, BLOCK // GROUP)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.reshape(tl.where(mask, normed.to(tl.float32), 0.0), [BLOCK // GROUP, GROUP])
        store_fp8_row(
            rounded, rounded_scales, values, tl.program_id(0).to(tl.int64), whole_rows, group,
            (width + GROUP - 1) // GROUP, at, at < width, width, HAS_GROUPS,
        )  # fmt: skip
