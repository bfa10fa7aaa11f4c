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
