"""Checks of KV pools, `[num_pages, ...]`."""

from __future__ import annotations

import torch


def has_dense_pages(pool: torch.Tensor) -> bool:
    """Whether a pool is contiguous within each page. Pages may lie apart by the tensor's first
    stride, such as those of a plane that shares pages with other planes.
    """
    return pool.is_contiguous() or pool[:1].is_contiguous()
