"""K and V of a pool in FP8 inside a GPU's kernels (`weft.kernels.fp8_kv`)."""

from __future__ import annotations

import triton
import triton.language as tl
from weft.kernels.fp8_kv import SCALE_BYTES as _SCALE_BYTES
from weft.kernels.gpu.fp8_weights import FOUR_TO_BFLOAT16

SCALE_BYTES = tl.constexpr(_SCALE_BYTES)


@triton.jit
def scales_at(
    pool: tl.tensor,
    page: tl.tensor,
    position: tl.tensor,
    kv_head: tl.tensor,
    layer: int,
    LAYERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Where the scales of K of positions are; those of V are one page's rows behind."""
    OF_ROWS: tl.constexpr = PAGE_SIZE * (DIM + SCALE_BYTES)
    in_page = (kv_head * LAYERS + layer) * (2 * OF_ROWS) + PAGE_SIZE * DIM
    at = page.to(tl.int64) * PAGE_STRIDE + in_page + position % PAGE_SIZE * SCALE_BYTES
    return (pool + at).to(tl.pointer_type(tl.float32))


@triton.jit
def dequantised(
    numbers: tl.tensor,
    at: tl.tensor,
    exists: tl.tensor,
    like: tl.constexpr,
    IS_NATIVE: tl.constexpr = False,
    IS_FIRST: tl.constexpr = False,
) -> tl.tensor:
    """Vectors [TILE, D] in floats `like`, of their bytes and of where their scales are.

    `exists`: [TILE], or None: all do. Native: the device has compute capability 9.0. First: numbers
    are widened before threads exchange them, which takes long of bytes that are turned.
    """
    scale = tl.load(at) if exists is None else tl.load(at, mask=exists, other=0.0)
    if IS_NATIVE and like == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            FOUR_TO_BFLOAT16, "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=not IS_FIRST, pack=4
        ).to(tl.float32)
    else:
        wide = numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (wide * scale[:, None]).to(like)
