"""Sampling noise: the definition that every device's sampler follows bit by bit.

The noise of a token is a pure function of (seed, absolute position, token id), so a token drawn
again, alone or in a batch, on another worker or while verifying a draft, is the same token.

1. `Philox4x32-10` (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
   key = (seed low word, seed high word),
   counter = (token_id >> 1, position low word, position high word, purpose) -> words w0..w3.
2. An even token id takes (high, low) = (w0, w1), an odd one (w2, w3): one block serves two tokens.
3. u = ((high << 20 | low >> 12) + 0.5) * 2^-52: 52 random bits, exact in float64,
   2^-53 <= u <= 1 - 2^-53.
4. g = -ln(-ln(u)), with `ln` as written in `natural_log`: IEEE float64 operations in that order,
   no fused multiply-add. -3.61 < g < 36.74.

`ln` is spelled out because libraries differ in the last bit; these operations do not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
Float64Array = npt.NDArray[np.float64]

PURPOSE_TOKEN = 0
"""Fourth counter word of the noise that picks a token; other uses take other numbers."""

NUM_ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[UInt32Array, ...], key: tuple[int, int]) -> tuple[UInt32Array, ...]:
    """The Philox4x32-10 block function. `counter` has four uint32 arrays that broadcast to one
    shape, first word first, and so has the result.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    shift = np.uint64(32)
    for i in range(NUM_ROUNDS):
        key0 = np.uint32((key[0] + i * KEY_INCREMENTS[0]) & WORD)
        key1 = np.uint32((key[1] + i * KEY_INCREMENTS[1]) & WORD)
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2  # uint64
        c0, c2 = (
            (second >> shift).astype(np.uint32) ^ c1 ^ key0,
            (first >> shift).astype(np.uint32) ^ c3 ^ key1,
        )
        c1, c3 = second.astype(np.uint32), first.astype(np.uint32)
    return c0, c1, c2, c3


LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LOG_COEFFICIENTS = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
"""Coefficients of the odd series in s = f / (2 + f), lowest first (FreeBSD msun, e_log.c)."""
SQRT_HALF_BITS = np.int64(0x3FE6A09E00000000)
ONE_BITS = np.int64(0x3FF0000000000000)
MANTISSA_MASK = np.int64(0x000FFFFFFFFFFFFF)


def natural_log(x: Float64Array) -> Float64Array:
    """ln(x) of positive normal float64 numbers, below 1 ulp of error, the same on every device.

    x = 2^k * m with m in [sqrt(1/2), sqrt(2)); ln(m) by the odd series of (m - 1) / (m + 1).
    """
    shifted = x.view(np.int64) + (ONE_BITS - SQRT_HALF_BITS)
    k = ((shifted >> np.int64(52)) - np.int64(1023)).astype(np.float64)
    f = ((shifted & MANTISSA_MASK) + SQRT_HALF_BITS).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    c1, c2, c3, c4, c5, c6, c7 = LOG_COEFFICIENTS
    t1 = w * (c2 + w * (c4 + w * c6))
    t2 = z * (c1 + w * (c3 + w * (c5 + w * c7)))
    half_square = 0.5 * f * f
    log: Float64Array = (s * (half_square + (t2 + t1)) + k * LN2_LOW - half_square + f) + (
        k * LN2_HIGH
    )
    return log


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> Float64Array:
    """Standard Gumbel noise of candidate tokens.

    Args:
        seed: Unsigned 64 bits.
        position: Absolute position of the token to be drawn, 0 <= position < 2^63.
        token_ids: [n], any integer dtype, 0 <= id < 2^32.

    Returns:
        [n] float64.
    """
    ids = token_ids.astype(np.uint32)
    counter = (ids >> np.uint32(1), *_words(position), np.uint32(PURPOSE_TOKEN))
    w0, w1, w2, w3 = philox4x32(
        tuple(np.asarray(word, np.uint32) for word in counter), (seed & WORD, seed >> 32)
    )
    is_odd = (ids & np.uint32(1)).astype(bool)
    high = np.where(is_odd, w2, w0).astype(np.uint64)
    low = np.where(is_odd, w3, w1).astype(np.uint64)
    bits = high << np.uint64(20) | low >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return -natural_log(-natural_log(uniform))


def _words(value: int) -> tuple[np.uint32, np.uint32]:
    """Low word first."""
    return np.uint32(value & WORD), np.uint32(value >> 32)
