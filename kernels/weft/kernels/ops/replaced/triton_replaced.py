"""Embeddings and LM heads of adapters that replace the model's, on a GPU.

Grids do not depend on the adapters of a step, so that a captured graph serves any mix. Programs
whose tokens have no matrix of their own end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.spec import LoraSegments
from weft.kernels.ops.lora.triton_parts import dot
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_FEW = 16
"""Tokens that are multiplied together in small steps, the fewest that tensor cores take."""
_MANY = 64
"""Tokens that are multiplied together in larger steps."""
_TILE, _EXACT_TILE = 128, 32
"""Elements of K that are taken at once; fewer for float32, of which shared memory holds fewer."""


def replace_embeddings(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    matrices: torch.Tensor,
    places: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    if out.shape[0] == 0:
        return
    _, vocabulary, width = matrices.shape
    _embedding_kernel[(out.shape[0],)](
        out, token_ids, token_slots, places, matrices, vocabulary, width,
        BLOCK=min(4096, next_power_of_2(width)), num_warps=4,
    )  # fmt: skip


def replace_products(
    out: torch.Tensor,
    x: torch.Tensor,
    matrices: torch.Tensor,
    places: torch.Tensor,
    segments: LoraSegments,
    *,
    is_fixed: bool,
) -> None:
    """Overwrites products of tokens whose adapters have a matrix of their own.

    Args:
        out: [T, N] float32, contiguous.
        x: [T, K], contiguous.
        matrices: [n, N, K], contiguous, dtype of `x`.
        places: [slots] int32: each slot's matrix, or -1.
    """
    if out.shape[0] == 0:
        return
    _, width, depth = matrices.shape
    is_few, is_exact = is_fixed or out.shape[0] <= _FEW, x.dtype == torch.float32
    columns, warps = (64, 4) if is_few else (128, 8)
    _product_kernel[(cdiv(width, columns),)](
        out, x, matrices, places, segments.order, segments.starts, segments.slots,
        segments.slots.shape[0], places.shape[0], width, K=depth, COLUMNS=columns,
        TOKENS=_FEW if is_few else _MANY, TILE=_EXACT_TILE if is_exact else _TILE,
        IS_EXACT=is_exact, num_warps=warps, num_stages=4,
    )  # fmt: skip


@triton.jit
def _embedding_kernel(
    out: tl.tensor,
    token_ids: tl.tensor,
    token_slots: tl.tensor,
    places: tl.tensor,
    matrices: tl.tensor,
    vocabulary: int,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + tl.load(token_slots + token)).to(tl.int64)
    if place < 0:
        return
    row = matrices + (place * vocabulary + tl.load(token_ids + token)) * width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(row + column, mask=column < width, other=0.0)
        tl.store(out + token * width + column, values, mask=column < width)


@triton.jit(do_not_specialize=["segments", "slots"])
def _product_kernel(
    out: tl.tensor,
    x: tl.tensor,
    matrices: tl.tensor,
    places: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    segment_slots: tl.tensor,
    segments: int,
    slots: int,
    width: int,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:
    """Some columns for all tokens that have a matrix."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    for segment in range(segments):
        slot = tl.load(segment_slots + segment)
        # Segments without tokens have a slot after the last one.
        place = tl.load(places + slot, mask=slot < slots, other=-1).to(tl.int64)
        if place >= 0:
            weight = matrices + (place * width + column.to(tl.int64)[None, :]) * K
            end = tl.load(starts + segment + 1)
            for start in range(tl.load(starts + segment), end, TOKENS):
                index = start + tl.arange(0, TOKENS)
                token = tl.load(order + index, mask=index < end, other=0).to(tl.int64)
                total = tl.zeros([TOKENS, COLUMNS], tl.float32)
                for first in range(0, K, TILE):
                    depth = first + tl.arange(0, TILE)
                    mask = (index < end)[:, None] & (depth < K)[None, :]
                    values = tl.load(x + token[:, None] * K + depth[None, :], mask=mask, other=0.0)
                    mask = (depth < K)[:, None] & is_column[None, :]
                    tile = tl.load(weight + depth[:, None], mask=mask, other=0.0)
                    total = dot(values, tile, total, IS_EXACT)
                to = out + token[:, None] * width + column[None, :]
                tl.store(to, total, mask=(index < end)[:, None] & is_column[None, :])
