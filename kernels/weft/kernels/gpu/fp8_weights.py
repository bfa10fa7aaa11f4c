"""FP8 weights inside a GPU's kernels: their scales, and their conversion to 16-bit floats."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.gpu import dependent_launch
from weft.kernels.quantised import FP8_GROUP, Fp8Blocks, Fp8Channels, Fp8Matrix

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
"""Four numbers at once: exponent and mantissa of e4m3 move to where bfloat16 has them, and 2^120
makes up for the difference of the exponents' biases; exact, numbers below 2^-6 included. The
instructions that convert e4m3 go through two other formats at an eighth of the rate.
"""


class WeightScales(NamedTuple):
    """Scales as kernels take them."""

    scales: torch.Tensor
    """[N] float32 of channels, or [N / SCALE_ROWS, K / GROUP]."""
    rows: int
    """Rows of a block; 0: each row has a scale over all of K."""

    @classmethod
    def of(cls, matrix: Fp8Matrix) -> WeightScales:
        """The scales of a weight."""
        match matrix:
            case Fp8Channels(_, scales):
                return cls(scales, 0)
            case Fp8Blocks(_, scales, rows):
                return cls(scales, rows)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of a kernel."""
        is_native = dependent_launch.is_dependent(device)
        return {"scales": self.scales, "SCALE_ROWS": self.rows, "IS_NATIVE": is_native}


@triton.jit
def widened(tile: tl.tensor, like: tl.constexpr, IS_NATIVE: tl.constexpr) -> tl.tensor:
    """A tile of FP8 in the 16-bit floats `like`, without its scales; exact.

    Native: the device has compute capability 9.0.
    """
    if IS_NATIVE and like == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            _FOUR_TO_BFLOAT16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        wide = tile.to(like)
    return wide
