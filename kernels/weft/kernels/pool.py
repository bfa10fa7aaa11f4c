"""What operations ask of a KV pool, `[num_pages, ...]`."""

from __future__ import annotations

import torch


def has_dense_pages(pool: torch.Tensor) -> bool:
    """Whether a pool is contiguous within each page; pages may lie apart, as those of a plane do
    that is one of several in a page. The distance is the tensor's first stride.
    """
    return pool.is_contiguous() or pool[:1].is_contiguous()
