"""Inputs of log-probabilities on a GPU: only the most likely tokens of each row are kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.sampling.spec import TopLogits
from weft.kernels.ops.sampling.triton_noise import exp_of_negative, key_of, natural_log, value_of
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

TILE = 1024

_LARGEST_INT = tl.constexpr(2**31 - 1)
_MIN_LONG = tl.constexpr(-(2**63))


def top_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    heats: torch.Tensor | None = None,
) -> TopLogits:
    """`weft.kernels.ops.sampling.device.top_logits` for CUDA tensors or Triton's interpreter."""
    vocab, count, device = logits.shape[1], len(rows), logits.device
    result = TopLogits(
        torch.empty(count, dtype=torch.float64, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty((count, num_top), dtype=torch.int64, device=device),
        torch.empty((count, num_top), dtype=torch.float32, device=device),
    )
    if count == 0:
        return result
    tiles = cdiv(vocab, TILE)
    # A tile's mass is measured in units of its largest logit, which is therefore always kept.
    kept = max(1, num_top)
    packed = torch.empty((count, tiles, kept), dtype=torch.int64, device=device)
    masses = torch.empty((count, tiles), dtype=torch.float64, device=device)
    exact = {"enable_fp_fusion": False}
    divides = heats is not None and len(heats) > 0
    heats = heats if heats is not None and divides else masses
    _top_of_tile_kernel[(count, tiles)](
        packed, masses, logits, logits.stride(0), vocab, rows, heats, kept, TILE=TILE,
        DIVIDES=divides, **exact,
    )  # fmt: skip
    _top_of_row_kernel[(count,)](
        result, packed, masses, logits, logits.stride(0), rows, tokens, heats, tiles, kept,
        num_top, DIVIDES=divides,
        TILES=next_power_of_2(tiles), PACKED=next_power_of_2(tiles * kept),
        num_warps=8, **exact,
    )  # fmt: skip
    return result


@triton.jit
def _cooled(values: tl.tensor, heat: tl.tensor) -> tl.tensor:
    return tl.div_rn(values, tl.zeros_like(values) + heat.to(tl.float32))


@triton.jit
def _top_of_tile_kernel(
    packed: tl.tensor,
    masses: tl.tensor,
    logits: tl.tensor,
    stride: int,
    vocab: int,
    rows: tl.tensor,
    heats: tl.tensor,
    kept: int,
    TILE: tl.constexpr,
    DIVIDES: tl.constexpr,
) -> None:
    """Keys and ids of the tile's largest logits in order, and its mass, NaN if a logit is not
    finite.
    """
    index, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < vocab
    values = tl.load(logits + tl.load(rows + index) * stride + column, mask=inside, other=0.0)
    if DIVIDES:
        values = _cooled(values, tl.load(heats + index))
    num_bad = tl.sum((values - values != 0.0).to(tl.int32), axis=0)
    both = (key_of(values).to(tl.int64) << 32) | (column ^ _LARGEST_INT).to(tl.int64)
    both = tl.where(inside, both, _MIN_LONG)
    best = tl.max(both, axis=0)
    largest = value_of((best >> 32).to(tl.int32)).to(tl.float64)
    weights = exp_of_negative(tl.minimum(values.to(tl.float64) - largest, 0.0))
    mass = tl.sum(tl.where(inside, weights, 0.0), axis=0)
    at = index * tl.num_programs(1) + tile
    tl.store(masses + at, tl.where(num_bad > 0, float("nan"), mass))
    for i in range(kept):
        tl.store(packed + at * kept + i, best)
        both = tl.where(both == best, _MIN_LONG, both)
        best = tl.max(both, axis=0)


@triton.jit
def _top_of_row_kernel(
    result: TopLogits,
    packed: tl.tensor,
    masses: tl.tensor,
    logits: tl.tensor,
    stride: int,
    rows: tl.tensor,
    tokens: tl.tensor,
    heats: tl.tensor,
    tiles: int,
    kept: int,
    num_top: int,
    TILES: tl.constexpr,
    PACKED: tl.constexpr,
    DIVIDES: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    place = tl.arange(0, PACKED)
    mine = packed + index * tiles * kept
    both = tl.load(mine + place, mask=place < tiles * kept, other=_MIN_LONG)
    best = tl.max(both, axis=0)
    largest = value_of((best >> 32).to(tl.int32)).to(tl.float64)
    tile = tl.arange(0, TILES)
    of_tile = tl.load(mine + tile * kept, mask=tile < tiles, other=best)
    away = value_of((of_tile >> 32).to(tl.int32)).to(tl.float64) - largest
    mass = tl.load(masses + index * tiles + tile, mask=tile < tiles, other=0.0)
    total = tl.sum(mass * exp_of_negative(away), axis=0)
    is_finite = total - total == 0.0
    log_sum = largest + natural_log(tl.where(is_finite, total, 1.0))
    tl.store(result.log_sums + index, tl.where(is_finite, log_sum, float("nan")))
    token = tl.maximum(tl.load(tokens + row), 0)
    own = tl.load(logits + row * stride + token)
    if DIVIDES:
        own = _cooled(own, tl.load(heats + index))
    tl.store(result.drawn + index, own)
    for i in range(num_top):
        tl.store(result.ids + index * num_top + i, (best & _LARGEST_INT) ^ _LARGEST_INT)
        tl.store(result.logits + index * num_top + i, value_of((best >> 32).to(tl.int32)))
        both = tl.where(both == best, _MIN_LONG, both)
        best = tl.max(both, axis=0)
