"""The most likely token of each row on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_TILE = 4096
_MOST_AT_ONCE = 8192
"""Largest vocabulary that one program takes whole, which saves a launch."""


def greedy_rows(
    logits: torch.Tensor, names: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`weft.kernels.ops.greedy.greedy_rows` for CUDA tensors.

    Args:
        logits: [L, vocab_size] float32, rows contiguous.
        names: [vocab_size] int64: ids that tokens have in the result; the first also stands for
            rows that are not finite. None: tokens keep their numbers.
        out: [L] int64, contiguous: where the result goes; None: new memory.
    """
    rows, vocab_size = logits.shape
    tokens = out
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    if vocab_size <= _MOST_AT_ONCE:
        _largest_kernel[(rows,)](
            tokens,
            logits,
            names,
            logits.stride(0),
            vocab_size,
            BLOCK=next_power_of_2(vocab_size),
            num_warps=8,
            **launch_options(logits.device),
        )
        return tokens
    tiles = cdiv(vocab_size, _TILE)
    largest = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    _largest_of_tile_kernel[(rows, tiles)](
        largest,
        ids,
        logits,
        logits.stride(0),
        vocab_size,
        TILE=_TILE,
        num_warps=8,
        **launch_options(logits.device),
    )
    _largest_of_row_kernel[(rows,)](
        tokens,
        largest,
        ids,
        names,
        tiles,
        TILES=next_power_of_2(tiles),
        num_warps=1,
        **launch_options(logits.device),
    )
    return tokens


@triton.jit
def _largest_kernel(
    tokens: tl.tensor,
    logits: tl.tensor,
    names: tl.tensor,
    stride: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    _, token = _largest(logits + row * stride, 0, vocab_size, BLOCK)
    tl.store(tokens + row, _name(token, token < 0, names))


@triton.jit
def _largest_of_tile_kernel(
    largest: tl.tensor,
    ids: tl.tensor,
    logits: tl.tensor,
    stride: int,
    vocab_size: int,
    TILE: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    best, token = _largest(logits + row * stride, tile * TILE, vocab_size, TILE)
    at = row * tl.num_programs(1) + tile
    tl.store(largest + at, best)
    tl.store(ids + at, token)


@triton.jit
def _largest_of_row_kernel(
    tokens: tl.tensor,
    largest: tl.tensor,
    ids: tl.tensor,
    names: tl.tensor,
    tiles: int,
    TILES: tl.constexpr,
) -> None:
    release_next()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    token = tl.load(ids + row * tiles + tile, mask=tile < tiles, other=2147483647)
    value = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    best = tl.max(value, axis=0)
    first = tl.min(tl.where(value == best, token, 2147483647), axis=0)
    tl.store(tokens + row, _name(first, tl.min(token, axis=0) < 0, names))


@triton.jit
def _largest(
    begin: tl.tensor, first: int, vocab_size: int, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The token is -1 if a logit from `first` on is not finite."""
    column = first + tl.arange(0, TILE)
    mask = column < vocab_size
    values = tl.load(begin + column, mask=mask, other=float("-inf"))
    # x - x is 0 only for finite numbers.
    num_bad = tl.sum((mask & (values - values != 0.0)).to(tl.int32), axis=0)
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, column, vocab_size), axis=0)
    return best, tl.where(num_bad > 0, -1, token)


@triton.jit
def _name(token: tl.tensor, is_bad: tl.tensor, names: tl.tensor) -> tl.tensor:
    if names is None:
        chosen = tl.where(is_bad, -1, token).to(tl.int64)
    else:
        chosen = tl.load(names + tl.where(is_bad, 0, token))
    return chosen
