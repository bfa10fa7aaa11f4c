"""`weft.kernels.ops.slot_rows` on a GPU. Rows of any dtype are copied as words of 4 bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.lora.triton_parts import pick, three

_BLOCK = 1024
_MAX_TABLES = 3


def take_rows(rows: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
    if not 0 < len(tables) <= _MAX_TABLES:
        raise ValueError(f"{len(tables)} tables; 1 to {_MAX_TABLES} are taken from at once")
    given = [_words(table) for table in tables]
    found = [table.new_empty((rows.shape[0], *table.shape[1:])) for table in tables]
    if rows.shape[0]:
        _take_kernel[(rows.shape[0], len(tables))](
            *three([_words(one) for one in found]),
            *three(given),
            *three([words.stride(0) for words in given]),
            *three([words.shape[1] for words in given]),
            rows,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return found


def put_rows(
    to: torch.Tensor, to_rows: torch.Tensor, source: torch.Tensor, rows: torch.Tensor
) -> None:
    if to.dtype != source.dtype or to.shape[1:] != source.shape[1:]:
        raise ValueError(f"rows of {source.dtype} {tuple(source.shape)} do not fit {to.dtype}")
    words, given = _words(to), _words(source)
    if rows.shape[0]:
        _put_kernel[(rows.shape[0],)](
            *(words, to_rows, given, rows, words.stride(0), given.stride(0), words.shape[1]),
            BLOCK=_BLOCK,
            num_warps=4,
        )


def _words(table: torch.Tensor) -> torch.Tensor:
    """[N] or [N, W] as [N, words] int32."""
    rows = table.unsqueeze(1) if table.dim() == 1 else table
    if rows.dim() != 2 or rows.stride(1) != 1 or rows.shape[1] * rows.element_size() % 4:
        raise ValueError(f"rows of {tuple(table.shape)} {table.dtype} are no words of 4 bytes")
    return rows.view(torch.int32)


_SIZES = [f"{name}{n}" for name in ("stride", "width") for n in range(3)]


@triton.jit(do_not_specialize=_SIZES)
def _take_kernel(
    to0: tl.tensor,
    to1: tl.tensor,
    to2: tl.tensor,
    table0: tl.tensor,
    table1: tl.tensor,
    table2: tl.tensor,
    stride0: int,
    stride1: int,
    stride2: int,
    width0: int,
    width1: int,
    width2: int,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = pick(number, width0, width1, width2)
    begin = pick(number, table0, table1, table2)
    begin += tl.load(rows + at) * pick(number, stride0, stride1, stride2)
    _copy(pick(number, to0, to1, to2) + at * width, begin, width, BLOCK)


@triton.jit(do_not_specialize=["to_stride", "source_stride", "width"])
def _put_kernel(
    to: tl.tensor,
    to_rows: tl.tensor,
    source: tl.tensor,
    rows: tl.tensor,
    to_stride: int,
    source_stride: int,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0)
    begin = source + tl.load(rows + at) * source_stride
    _copy(to + tl.load(to_rows + at) * to_stride, begin, width, BLOCK)


@triton.jit
def _copy(to: tl.tensor, begin: tl.tensor, width: int, BLOCK: tl.constexpr) -> None:
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        tl.store(to + column, tl.load(begin + column, mask=mask), mask=mask)
