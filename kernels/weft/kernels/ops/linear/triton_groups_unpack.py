"""Numbers of 4 bits inside a GPU's kernels: their conversion to floats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.sm90 import on_sm90

_FOUR_INTEGERS = tl.constexpr(
    """
    {
    .reg .b32 pair, upper, centre;
    mov.b32 centre, 0x43084308;
    shr.u32 upper, $4, 4;
    prmt.b32 pair, $4, 0x43, 0x4140;
    and.b32 pair, pair, 0xFF0FFF0F;
    sub.bf16x2 $0, pair, centre;
    prmt.b32 pair, $4, 0x43, 0x4342;
    and.b32 pair, pair, 0xFF0FFF0F;
    sub.bf16x2 $1, pair, centre;
    prmt.b32 pair, upper, 0x43, 0x4140;
    and.b32 pair, pair, 0xFF0FFF0F;
    sub.bf16x2 $2, pair, centre;
    prmt.b32 pair, upper, 0x43, 0x4342;
    and.b32 pair, pair, 0xFF0FFF0F;
    sub.bf16x2 $3, pair, centre;
    }
    """
)
"""Turns four bytes into four lower and four upper numbers. A number in the last bits of 128's
mantissa is 128 more than itself, from which 136 is subtracted; exact.
"""


def _four_e2m1(registers: str, scales: str, low: str, high: str) -> tl.constexpr:
    """Like `_FOUR_INTEGERS` for e2m1: exponent and mantissa move to their places in bfloat16, and
    the factors `low` and `high` correct the exponents' bias; exact, halves included.
    """

    def pair(select: str, lower: str, upper: str) -> str:
        return f"""
    prmt.b32 pair, $4, 0, {select};
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 {lower}, pair, 2;
    and.b32 {lower}, {lower}, 0x01C001C0;
    or.b32 {lower}, {lower}, sign;
    mul.bf16x2 {lower}, {lower}, {low};
    and.b32 sign, pair, 0x80008000;
    shr.u32 {upper}, pair, 6;
    and.b32 {upper}, {upper}, 0x01C001C0;
    or.b32 {upper}, {upper}, sign;
    mul.bf16x2 {upper}, {upper}, {high};"""

    pairs = pair("0x1404", "$0", "$2") + pair("0x3424", "$1", "$3")
    return tl.constexpr(f"""
    {{
    .reg .b32 {registers};{scales}{pairs}
    }}
    """)


_FOUR_E2M1 = _four_e2m1("pair, sign, power", "\n    mov.b32 power, 0x7E807E80;", "power", "power")
"""The factor is 2^126."""
_FOUR_SCALED = _four_e2m1(
    "pair, sign, power, upper",
    """
    shr.u32 pair, $5, $9;
    shl.b32 power, pair, 4;
    and.b32 power, power, 0x00000FF0;
    add.u32 power, power, 0x00007580;
    shr.u32 upper, pair, 4;
    and.b32 upper, upper, 0x00000FF0;
    add.u32 upper, upper, 0x00007580;
    prmt.b32 power, power, 0, 0x1010;
    prmt.b32 upper, upper, 0, 0x1010;""",
    "power",
    "upper",
)
"""The factors are 2^126 times the byte scale of the lower numbers, and of the upper ones: its
exponent's bias moves from 18 to 127 - 126.
"""


class GroupsForm(NamedTuple):
    """What a kernel knows of a matrix in groups when it is compiled; fields of `PackedGroups`."""

    half: int
    unit: int
    is_e2m1: bool


class GroupsTensors(NamedTuple):
    """The tensors of a matrix in groups, or of experts' matrices, for kernels."""

    data: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    factors: torch.Tensor | None


def groups_arguments(weight: PackedGroups | PackedExperts) -> dict[str, Any]:
    """A kernel's arguments for a matrix in groups, or for those of all experts."""
    first = weight.first if isinstance(weight, PackedExperts) else weight
    return {
        "weight": GroupsTensors(weight.data, weight.scales, weight.offsets, weight.factors),
        "width": weight.scales.shape[-1],
        "FORM": GroupsForm(first.half, first.unit, first.is_e2m1),
    }


@triton.jit
def begin_of_expert(
    expert: tl.tensor, rows: int, width: int, BLOCKS: tl.constexpr, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Where the data and the scales of an expert's matrix of `rows` rows begin."""
    wide = expert.to(tl.int64)
    at_scale = wide * (BLOCKS * (2 * FORM.half // FORM.unit)) * width
    return wide * rows * (BLOCKS * FORM.half), at_scale


@triton.jit
def stored_scales(
    scales: tl.tensor,
    offsets: tl.tensor,
    at: tl.tensor,
    exists: tl.tensor,
    width: int,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Scales and offsets of a block's rows as they are stored, of its first and its second half;
    zero for blocks that do not exist. Without offsets their place holds a value that is not read.
    """
    scale = tl.load(scales + at, mask=exists, other=0)
    offset = scale
    if offsets is not None:
        offset = tl.load(offsets + at, mask=exists, other=0)
    scale_high = scale
    offset_high = offset
    if FORM.unit == FORM.half:
        scale_high = tl.load(scales + at + width, mask=exists, other=0)
        if offsets is not None:
            offset_high = tl.load(offsets + at + width, mask=exists, other=0)
    return scale, offset, scale_high, offset_high


@triton.jit
def unpacked(
    tile: tl.tensor, like: tl.constexpr, IS_E2M1: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The numbers in the lower and in the upper bits of bytes, in floats `like`: e2m1, or the
    stored number less 8; exact.
    """
    if on_sm90() and like == tl.bfloat16:
        if IS_E2M1:
            lower, upper = tl.inline_asm_elementwise(
                _FOUR_E2M1, "=&r,=&r,=&r,=&r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=4,
            )  # fmt: skip
        else:
            lower, upper = tl.inline_asm_elementwise(
                _FOUR_INTEGERS, "=&r,=&r,=&r,=&r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=4,
            )  # fmt: skip
    else:
        lower = _plain(tile.to(tl.int32) & 15, IS_E2M1).to(like)
        upper = _plain(tile.to(tl.int32) >> 4 & 15, IS_E2M1).to(like)
    return lower, upper


@triton.jit
def _plain(number: tl.tensor, IS_E2M1: tl.constexpr) -> tl.tensor:
    if IS_E2M1:
        bits = number & 7
        normal = 2 + (bits & 1) << tl.maximum(bits >> 1, 1) - 1
        size = tl.where(bits < 2, bits, normal)
        wide = tl.where(number >= 8, -size, size).to(tl.float32) / 2
    else:
        wide = (number - 8).to(tl.float32)
    return wide


@triton.jit
def unpacked_scaled(
    tile: tl.tensor, words: tl.tensor, like: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The lower and upper numbers of blocks of NVFP4, times their scales; exact, as these have few
    bits.

    Args:
        tile: [..., 32] uint8.
        words: [...] int32, as in `weft.kernels.shared.formats.packed_groups.PackedGroups.scales`.
    """
    column = tl.arange(0, 32)
    shift = column // 16 * 16
    shift = shift[None, None, :] if len(tile.shape) == 3 else shift[None, :]
    wide = tl.expand_dims(words, -1)
    if on_sm90() and like == tl.bfloat16:
        lower, upper = tl.inline_asm_elementwise(
            _FOUR_SCALED,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [tile, tl.broadcast_to(wide, tile.shape), tl.broadcast_to(shift, tile.shape)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        bytes_ = wide >> shift
        lower = _plain(tile.to(tl.int32) & 15, True) * byte_scale(bytes_)
        upper = _plain(tile.to(tl.int32) >> 4 & 15, True) * byte_scale(bytes_ >> 8)
        lower, upper = lower.to(like), upper.to(like)
    return lower, upper


@triton.jit
def byte_scale(word: tl.tensor) -> tl.tensor:
    """The scale of NVFP4 in a word's lowest byte, in float32."""
    return (((word & 255) << 20) + ((127 - 18) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^(exponent - 127) in float32, for exponents 0 to 254."""
    normal = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == 0, 2.0**-127, normal)
