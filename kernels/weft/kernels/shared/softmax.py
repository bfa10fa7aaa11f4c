"""Changes to attention's softmax on a GPU: a soft cap on its scores, and sinks in its sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """cap * tanh(scores / cap) of products before scaling, with a cap in the same units; 0:
    no cap.
    """
    if SOFTCAP > 0:
        ratio = scores / SOFTCAP
        # tanh by an exponential that cannot overflow: 2 * log2(e) = 2.885390...
        small = tl.exp2(tl.abs(ratio) * -2.8853900817779268)
        bound = SOFTCAP * (1.0 - small) / (1.0 + small)
        scores = tl.where(ratio < 0, -bound, bound)
    return scores


@triton.jit
def with_sink(
    total: tl.tensor, largest: tl.tensor, sinks: tl.tensor, head: tl.tensor, scale: float
) -> tl.tensor:
    """Sums of weights relative to the largest scores, with the weights of their heads' sinks.

    `scale`, the factor on the scores, includes log2(e). If the sink is so much larger that its
    weight would not be finite, or if no position is seen, nothing remains of the other weights
    either way.
    """
    logit = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    return total + tl.exp2(tl.minimum(logit - largest * scale, 126.0))


@triton.jit
def log_of_sum(total: tl.tensor, largest: tl.tensor, scale: float) -> tl.tensor:
    """Logarithms of softmaxes' sums; of no position a very negative number. `scale` includes
    log2(e).
    """
    is_any = total > 0.0
    found = tl.where(is_any, largest, 0.0) * scale + tl.log2(tl.where(is_any, total, 1.0))
    return tl.where(is_any, found * 0.6931471805599453, -1e38)


@triton.jit
def weigh_tile(
    largest: tl.tensor,
    total: tl.tensor,
    scores: tl.tensor,
    scale: float,
    IS_FUSED: tl.constexpr,
    MAY_SEE_NONE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Each row's largest score and sum of weights with one more tile, the factor on its earlier
    sums, and the tile's weights.
    """
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    reference = new_largest
    if MAY_SEE_NONE:
        # The maximum over this tile and those before it, kept finite, since infinities have no
        # difference.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    # Scaled after the subtraction, so that it is exactly 1 where a tile brings nothing larger, also
    # where a row sees none of it. A difference of products would not be 1, since a fused
    # multiply-add does not round one of them.
    shrink = tl.exp2((largest - reference) * scale)
    if IS_FUSED:
        # One instruction a score; its error is far below the rounding of the weights.
        weights = tl.exp2(tl.fma(scores, scale, -(reference * scale)[:, None]))
    else:
        # As above: exact for the scores that matter.
        weights = tl.exp2((scores - reference[:, None]) * scale)
    total = tl.fma(total, shrink, tl.sum(weights, axis=1))
    return new_largest, total, shrink, weights
