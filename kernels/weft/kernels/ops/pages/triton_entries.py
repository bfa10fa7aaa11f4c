"""K and V of a pool in 8 bits inside a GPU's kernels (`weft.kernels.ops.pages.scaled_kv`)."""

from __future__ import annotations

import triton
import triton.language as tl
from weft.kernels.ops.pages.scaled_kv import INT8_MAX
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES as _SCALE_BYTES
from weft.kernels.shared.formats.fp8 import FP8_MAX
from weft.kernels.shared.sm90 import on_sm90

FP8_MOST = tl.constexpr(FP8_MAX)
INT8_MOST = tl.constexpr(INT8_MAX)
SCALE_BYTES = tl.constexpr(_SCALE_BYTES)
_FOUR_TO_FLOAT16 = tl.constexpr(
    """
    {
    .reg .b16 lower, upper;
    mov.b32 {lower, upper}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
    }
    """
)
_FOUR_INTEGERS_TO_FLOAT16 = tl.constexpr(
    """
    {
    .reg .b32 shifted, lower, upper, high, offset;
    mov.b32 high, 0x64646464;
    mov.b32 offset, 0x64806480;
    xor.b32 shifted, $2, 0x80808080;
    prmt.b32 lower, shifted, high, 0x4140;
    prmt.b32 upper, shifted, high, 0x4342;
    sub.f16x2 $0, lower, offset;
    sub.f16x2 $1, upper, offset;
    }
    """
)
"""0x6400 + n is 1024 + n in float16, where n is the integer plus 128."""
_UNIT_OF_QUERY = tl.constexpr(2.0**12)
LEAST_UNIT = tl.constexpr(1e-30)


@triton.jit
def load_scales(at: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """Scales at `at`, where those that do not exist count as 0; all exist if `exists` is None."""
    return tl.load(at) if exists is None else tl.load(at, mask=exists, other=0.0)


@triton.jit
def dequantised(
    numbers: tl.tensor, at: tl.tensor, exists: tl.tensor, like: tl.constexpr
) -> tl.tensor:
    """Numbers in 8 bits times their scales, rounded once to the float dtype `like`.

    Args:
        numbers: [TILE, D], uint8 (FP8) or int8.
        at: [TILE] pointers to float32 scales, with `exists` as `load_scales` takes them.

    Returns:
        [TILE, D].
    """
    scale = load_scales(at, exists)
    if numbers.dtype == tl.int8:
        wide = numbers.to(tl.float32)
    else:
        wide = numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (wide * scale[:, None]).to(like)


@triton.jit
def widened(numbers: tl.tensor, like: tl.constexpr, IS_FIRST: tl.constexpr = False) -> tl.tensor:
    """Vectors [TILE, D] in floats `like`, float16 or float32, exactly, without their scales.

    IS_FIRST: whether numbers become floats before threads exchange them, since exchanging the bytes
    of a transposed tile is slow.
    """
    IS_INT8: tl.constexpr = numbers.dtype == tl.int8
    if on_sm90() and like == tl.float16:
        FOUR: tl.constexpr = _FOUR_INTEGERS_TO_FLOAT16 if IS_INT8 else _FOUR_TO_FLOAT16
        wide = tl.inline_asm_elementwise(
            FOUR, "=r,=r,r", [numbers], dtype=tl.float16, is_pure=not IS_FIRST, pack=4
        )
    elif IS_INT8:
        wide = numbers.to(like)
    else:
        wide = numbers.to(tl.float8e4nv, bitcast=True).to(like)
    return wide


@triton.jit
def query_in_units(query: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Queries [M, D] in float16, and the power of two that they must be multiplied by.

    Products with numbers in 8 bits take float16, which has more mantissa bits than bfloat16 but a
    smaller range. So queries are divided by a power of two that makes the largest element at least
    2^12 and less than 2^13. Queries in float32 are returned as they are, with 1.
    """
    unit = 1.0
    if query.dtype != tl.float32:
        wide = query.to(tl.float32)
        most = tl.maximum(tl.max(tl.max(tl.abs(wide), axis=1), axis=0), LEAST_UNIT)
        power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = power / _UNIT_OF_QUERY
        query = (wide * (1.0 / unit)).to(tl.float16)
    return query, unit


@triton.jit
def weights_in_units(
    weights: tl.tensor, v_scales: tl.tensor, shrink: tl.tensor, unit: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights [M, TILE] times the scales of V, in units of the largest scale so far, so that
    float16 holds them; the factor on sums in earlier units; and the new unit.
    """
    largest = tl.maximum(unit, tl.max(v_scales, axis=0))
    return weights * (v_scales / largest)[None, :], shrink * (unit / largest), largest


@triton.jit
def bytes_of(values: tl.tensor, most: tl.tensor, IS_INT8: tl.constexpr) -> tl.tensor:
    """Bytes of numbers in 8 bits; `most` is the largest magnitude of each row."""
    LARGEST: tl.constexpr = INT8_MOST if IS_INT8 else FP8_MOST
    inverse = tl.where(most > 1e-30, LARGEST / most, 0.0)
    # Rounding may exceed the format's largest number.
    scaled = tl.minimum(tl.maximum(values * inverse[:, None], -LARGEST), LARGEST)
    if IS_INT8:
        # 1.5 * 2^23: adding it rounds to an integer.
        numbers = (scaled + 12582912.0 - 12582912.0).to(tl.int8)
    else:
        numbers = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return numbers
