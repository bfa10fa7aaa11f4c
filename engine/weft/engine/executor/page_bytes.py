"""Bytes of other things in pages of the first group, end to end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.engine.transfer.device_pages import Pages
from weft.kernels.ops.pages import page_index


def write_bytes(data: torch.Tensor, pages: Sequence[int], pool: Pages) -> None:
    """Copies bytes, [n] uint8, into pages, which together have room for them. Zeros follow.

    Args:
        pool: [num_pages, page_bytes] uint8, or the pages of all ranks.
    """
    page_bytes = pool.shape[1] if isinstance(pool, torch.Tensor) else pool.page_bytes
    room = data.new_zeros(len(pages) * page_bytes)
    room[: data.shape[0]] = data
    numbers = page_index(pages, data.device)
    if isinstance(pool, torch.Tensor):
        pool.index_copy_(0, numbers, room.view(len(pages), -1))
    else:
        pool.scatter(room.view(len(pages), -1), numbers)


def read_bytes(pages: Sequence[int], pool: Pages) -> torch.Tensor:
    """[len(pages) * page_bytes] uint8: a copy of what the pages have."""
    numbers = page_index(pages, pool.device)
    if isinstance(pool, torch.Tensor):
        return pool.index_select(0, numbers).view(-1)
    rows = torch.empty((len(pages), pool.page_bytes), dtype=torch.uint8, device=pool.device)
    pool.gather(numbers, rows)
    return rows.view(-1)
