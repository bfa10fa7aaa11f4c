"""Copies rows of tables by slot, the state that steps and drafts read and write for their
requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.slot_rows import triton_rows as _triton_rows
else:
    _triton_rows = deferred(__name__, "weft.kernels.ops.slot_rows.triton_rows")


def take_rows(rows: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a few tables, in one launch on a GPU.

    Args:
        rows: [R] int64.
        tables: Up to three of [N] or [N, W]; rows contiguous, of a multiple of 4 bytes.

    Returns:
        For each table [R] or [R, W].

    Raises:
        ValueError: There are too many tables, or rows are not as described.
    """
    if rows.is_cuda:
        return _triton_rows.take_rows(rows, *tables)
    return [table.index_select(0, rows) for table in tables]


def hold_rows(memory: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Holds rows for the work that follows: on a GPU in fixed memory, as captured graphs need it,
    on a CPU as they are.

    Args:
        memory: [N, W]; on a GPU changed.
        rows: [T, W]; on a GPU only the first N are held.

    Returns:
        `memory` on a GPU, else `rows`.
    """
    if not rows.is_cuda:
        return rows
    count = min(rows.shape[0], memory.shape[0])
    memory[:count].copy_(rows[:count])
    return memory


def put_rows(
    to: torch.Tensor, to_rows: torch.Tensor, source: torch.Tensor, rows: torch.Tensor
) -> None:
    """Copies rows of one table to another, in one launch on a GPU: to[to_rows] = source[rows].

    Args:
        to: [N, W] as in `take_rows`; changed.
        to_rows: [R] int64; equal numbers must receive equal rows.
        source: [M, W], dtype of `to`.
        rows: [R] int64.

    Raises:
        ValueError: Rows are not as described, or differ between the tables.
    """
    if to.is_cuda:
        _triton_rows.put_rows(to, to_rows, source, rows)
        return
    to.index_copy_(0, to_rows, source.index_select(0, rows))
