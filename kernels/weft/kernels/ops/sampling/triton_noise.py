"""Device functions of the samplers: the noise of `weft.kernels.ops.sampling.noise`, and weights.

Kernels that use them are launched with `enable_fp_fusion=False`, since the noise is defined without
fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl
from weft.kernels.ops.sampling.noise import LN2_HIGH, LN2_LOW, LOG_COEFFICIENTS, PURPOSE_TOKEN

_LN2_HIGH = tl.constexpr(LN2_HIGH)
_LN2_LOW = tl.constexpr(LN2_LOW)
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(c) for c in LOG_COEFFICIENTS)
_PURPOSE = tl.constexpr(PURPOSE_TOKEN)
_LOG2_E = tl.constexpr(1.44269504088896340736)
_ROUNDING_SHIFT = tl.constexpr(6755399441055744.0)
"""1.5 * 2^52: adding and subtracting it rounds to a whole number."""


@triton.jit
def natural_log(x: tl.tensor) -> tl.tensor:
    """ln(x) of positive normal float64 numbers, bit by bit `noise.natural_log`."""
    bits = x.to(tl.int64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E00000000)
    k = ((bits >> 52) - 1023).to(tl.float64)
    mantissa = (bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E00000000
    f = mantissa.to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    t1 = w * (w * (w * _C6 + _C4) + _C2)
    t2 = z * (w * (w * (w * _C7 + _C5) + _C3) + _C1)
    half_square = f * 0.5 * f
    return (s * (half_square + (t2 + t1)) + k * _LN2_LOW - half_square + f) + k * _LN2_HIGH


@triton.jit
def gumbel_of_words(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """Noise from the two 32-bit words that a token takes from its block."""
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -natural_log(-natural_log(uniform))


@triton.jit
def _block(pairs: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tuple:
    counter = pairs.to(tl.uint32)
    zeros = counter * 0
    low = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, counter, low, high, zeros + _PURPOSE)


@triton.jit
def gumbel_noise(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Noise of any tokens; `ids`: [n] int32."""
    w0, w1, w2, w3 = _block(ids >> 1, seed, position)
    is_odd = (ids & 1) != 0
    return gumbel_of_words(tl.where(is_odd, w2, w0), tl.where(is_odd, w3, w1))


@triton.jit
def gumbel_run(
    seed: tl.tensor, position: tl.tensor, first: tl.tensor, COUNT: tl.constexpr
) -> tl.tensor:
    """Noise of tokens first to first + COUNT - 1, where `first` is even: two tokens share a
    block.
    """
    w0, w1, w2, w3 = _block(first // 2 + tl.arange(0, COUNT // 2), seed, position)
    return gumbel_of_words(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def exp_of_negative(x: tl.tensor) -> tl.tensor:
    """e^x of float64 x <= 0, to about 1 ulp; 0 below -700. As in csrc/sampling.c."""
    clamped = tl.where(x < -700.0, -700.0, x)
    n = (clamped * _LOG2_E + _ROUNDING_SHIFT) - _ROUNDING_SHIFT
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -700.0, 0.0, p * power)


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """int32 keys in the order of float32 values; both zeros have the same key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(keys: tl.tensor) -> tl.tensor:
    """The float32 value of a key."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
