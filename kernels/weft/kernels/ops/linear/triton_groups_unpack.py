"""Numbers of 4 bits inside a GPU's kernels: their conversion to floats."""

from __future__ import annotations

import triton
import triton.language as tl

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
_FOUR_E2M1 = tl.constexpr(
    """
    {
    .reg .b32 pair, sign, power;
    mov.b32 power, 0x7E807E80;
    prmt.b32 pair, $4, 0, 0x1404;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 $0, pair, 2;
    and.b32 $0, $0, 0x01C001C0;
    or.b32 $0, $0, sign;
    mul.bf16x2 $0, $0, power;
    and.b32 sign, pair, 0x80008000;
    shr.u32 $2, pair, 6;
    and.b32 $2, $2, 0x01C001C0;
    or.b32 $2, $2, sign;
    mul.bf16x2 $2, $2, power;
    prmt.b32 pair, $4, 0, 0x3424;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 $1, pair, 2;
    and.b32 $1, $1, 0x01C001C0;
    or.b32 $1, $1, sign;
    mul.bf16x2 $1, $1, power;
    and.b32 sign, pair, 0x80008000;
    shr.u32 $3, pair, 6;
    and.b32 $3, $3, 0x01C001C0;
    or.b32 $3, $3, sign;
    mul.bf16x2 $3, $3, power;
    }
    """
)
"""Like `_FOUR_INTEGERS` for e2m1: exponent and mantissa move to their places in bfloat16, and a
factor of 2^126 corrects the exponents' bias; exact, halves included.
"""


@triton.jit
def unpacked(
    tile: tl.tensor, like: tl.constexpr, IS_E2M1: tl.constexpr, IS_NATIVE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The numbers in the lower and in the upper bits of bytes, in floats `like`: e2m1, or the
    stored number less 8; exact.

    IS_NATIVE: the device has compute capability 9.0.
    """
    if IS_NATIVE and like == tl.bfloat16:
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


_FOUR_SCALED = tl.constexpr(
    """
    {
    .reg .b32 pair, sign, power, upper;
    shr.u32 pair, $5, $9;
    shl.b32 power, pair, 4;
    and.b32 power, power, 0x00000FF0;
    add.u32 power, power, 0x00007580;
    shr.u32 upper, pair, 4;
    and.b32 upper, upper, 0x00000FF0;
    add.u32 upper, upper, 0x00007580;
    prmt.b32 power, power, 0, 0x1010;
    prmt.b32 upper, upper, 0, 0x1010;
    prmt.b32 pair, $4, 0, 0x1404;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 $0, pair, 2;
    and.b32 $0, $0, 0x01C001C0;
    or.b32 $0, $0, sign;
    mul.bf16x2 $0, $0, power;
    and.b32 sign, pair, 0x80008000;
    shr.u32 $2, pair, 6;
    and.b32 $2, $2, 0x01C001C0;
    or.b32 $2, $2, sign;
    mul.bf16x2 $2, $2, upper;
    prmt.b32 pair, $4, 0, 0x3424;
    shl.b32 sign, pair, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 $1, pair, 2;
    and.b32 $1, $1, 0x01C001C0;
    or.b32 $1, $1, sign;
    mul.bf16x2 $1, $1, power;
    and.b32 sign, pair, 0x80008000;
    shr.u32 $3, pair, 6;
    and.b32 $3, $3, 0x01C001C0;
    or.b32 $3, $3, sign;
    mul.bf16x2 $3, $3, upper;
    }
    """
)
"""Like `_FOUR_E2M1`, with the factor of 2^126 times the byte scale of the lower numbers, and of the
upper ones: its exponent's bias moves from 18 to 127 - 126.
"""


@triton.jit
def unpacked_scaled(
    tile: tl.tensor, words: tl.tensor, like: tl.constexpr, IS_NATIVE: tl.constexpr
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
    if IS_NATIVE and like == tl.bfloat16:
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
