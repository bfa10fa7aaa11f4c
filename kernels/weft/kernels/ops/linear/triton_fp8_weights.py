"""FP8 weights inside a GPU's kernels: their scales, and their conversion to 16-bit floats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.shared.formats.quantised import (
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Experts,
    Fp8Matrix,
    Int8Channels,
)
from weft.kernels.shared.sm90 import on_sm90

GROUP = tl.constexpr(FP8_GROUP)
"""Elements of K that share a scale where scales lie in blocks."""

_FOUR_TO_BFLOAT16 = tl.constexpr(
    """
    {
    .reg .b32 lower, upper, sign, power;
    mov.b32 power, 0x7B807B80;
    prmt.b32 lower, $2, 0, 0x1404;
    prmt.b32 upper, $2, 0, 0x3424;
    and.b32 sign, lower, 0x80008000;
    and.b32 lower, lower, 0x7F007F00;
    shr.u32 lower, lower, 4;
    or.b32 lower, lower, sign;
    and.b32 sign, upper, 0x80008000;
    and.b32 upper, upper, 0x7F007F00;
    shr.u32 upper, upper, 4;
    or.b32 upper, upper, sign;
    mul.bf16x2 $0, lower, power;
    mul.bf16x2 $1, upper, power;
    }
    """
)
"""Converts four numbers at once. Exponent and mantissa of e4m3 move to their places in bfloat16,
and a factor of 2^120 corrects the exponents' bias; this is exact, also for numbers below 2^-6. The
instructions that convert e4m3 go through two other formats at an eighth of the rate.
"""


class WeightScales(NamedTuple):
    """Scales in the form that kernels take."""

    scales: torch.Tensor
    """[N] float32 of channels, or [N / SCALE_ROWS, K / GROUP]."""
    rows: int
    """Rows of a block; 0: each row has a scale over all of K."""

    @classmethod
    def of(cls, matrix: Fp8Matrix | Int8Channels | Fp8Experts) -> WeightScales:
        match matrix:
            case Fp8Channels(_, scales) | Int8Channels(_, scales):
                return cls(scales, 0)
            case Fp8Blocks(_, scales, rows) | Fp8Experts(_, scales, rows):
                return cls(scales, rows)

    def arguments(self) -> dict[str, Any]:
        return {"scales": self.scales, "SCALE_ROWS": self.rows}


def data_of(
    weight: torch.Tensor | Fp8Matrix | Fp8Experts,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The numbers of a weight, and the further arguments of a kernel that takes floats and FP8."""
    if isinstance(weight, torch.Tensor):
        return weight, {"scales": None, "SCALE_ROWS": 0}
    return weight.data, WeightScales.of(weight).arguments()


@triton.jit
def widened(tile: tl.tensor, like: tl.constexpr) -> tl.tensor:
    """A tile of FP8 in the 16-bit floats `like`, without its scales; exact."""
    if on_sm90() and like == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            _FOUR_TO_BFLOAT16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        wide = tile.to(like)
    return wide


@triton.jit
def scales_of_expert(
    scales: tl.tensor, expert: tl.tensor, rows: int, K: tl.constexpr, SCALE_ROWS: tl.constexpr
) -> tl.tensor:
    """Where the scales of experts' matrices of `rows` rows begin; floats have none."""
    begin = scales
    if scales is not None:
        if SCALE_ROWS > 0:
            begin = scales + expert * tl.cdiv(rows, SCALE_ROWS) * ((K + GROUP - 1) // GROUP)
        else:
            begin = scales + expert * rows
    return begin


@triton.jit
def scaled(
    tile: tl.tensor,
    of_expert: tl.tensor,
    column: tl.tensor,
    at: tl.tensor,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
) -> tl.tensor:
    """Numbers at rows `column` and columns `at` of a matrix, times their scales, in float32."""
    wide = tile.to(tl.float32)
    if of_expert is not None:
        if SCALE_ROWS > 0:
            place = of_expert + column // SCALE_ROWS * ((K + GROUP - 1) // GROUP)
            wide *= tl.load(place + at // GROUP, mask=at < K, other=0.0)
        else:
            wide *= tl.load(of_expert + column)
    return wide


@triton.jit
def summed_row(
    tile: tl.tensor,
    values: tl.tensor,
    of_expert: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
) -> tl.tensor:
    """The product of the first TILE numbers of one row of a matrix with `values`, [TILE]
    float32.
    """
    product = tile.to(tl.float32) * values
    if SCALE_ROWS == 0:
        total = tl.sum(product, axis=0)
        if of_expert is not None:
            total *= tl.load(of_expert + column)
    else:
        NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        place = of_expert + column // SCALE_ROWS * NUM_GROUPS
        if NUM_GROUPS == 1:
            total = tl.sum(product, axis=0) * tl.load(place)
        else:
            SIZE: tl.constexpr = GROUP
            GROUPS: tl.constexpr = tile.shape[0] // SIZE
            group = tl.arange(0, GROUPS)
            scale = tl.load(place + group, mask=group < NUM_GROUPS, other=0.0)
            sums = tl.sum(tl.reshape(product, [GROUPS, SIZE]), axis=1)
            total = tl.sum(sums * scale, axis=0)
    return total


@triton.jit
def scaled_experts(
    product: tl.tensor,
    of_expert: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
) -> tl.tensor:
    """[EXPERTS, COLUMNS, TILE] times the scales of some rows, [COLUMNS], of experts, [EXPERTS]."""
    if SCALE_ROWS == 0:
        product *= tl.load(of_expert[:, None] + column[None, :])[:, :, None]
    else:
        NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        place = of_expert[:, None] + (column // SCALE_ROWS * NUM_GROUPS)[None, :]
        if NUM_GROUPS == 1:
            product *= tl.load(place)[:, :, None]
        else:
            SIZE: tl.constexpr = GROUP
            EXPERTS: tl.constexpr = product.shape[0]
            COLUMNS: tl.constexpr = product.shape[1]
            GROUPS: tl.constexpr = product.shape[2] // SIZE
            group = tl.arange(0, GROUPS)[None, None, :]
            scale = tl.load(place[:, :, None] + group, mask=group < NUM_GROUPS, other=0.0)
            parts = tl.reshape(product, [EXPERTS, COLUMNS, GROUPS, SIZE]) * scale[:, :, :, None]
            product = tl.reshape(parts, [EXPERTS, COLUMNS, GROUPS * SIZE])
    return product
