"""A KV pool as native operations on a CPU read it."""

from __future__ import annotations

import torch
from weft.kernels.ops.pages.pool import has_dense_pages
from weft.kernels.ops.pages.scaled_kv import head_dim
from weft.kernels.shared.cpu import PoolStruct

_KEPT = {torch.uint8: 1, torch.int8: 2}
"""`Kept` of csrc/rows.h, by dtype, for pools whose dtype is not that of the rows."""


def describe_pool(pool: torch.Tensor, dtype: torch.dtype) -> PoolStruct:
    """Describes a KV pool [num_pages, kv_heads, layers, 2, page_size, dim], contiguous within a
    page, for the native operations on rows of a dtype; of that dtype or in 8 bits
    (`weft.kernels.ops.pages.scaled_kv`).

    Valid as long as `pool` lives.
    """
    if pool.dim() != 6 or pool.shape[3] != 2 or not has_dense_pages(pool):
        raise ValueError(
            "a KV pool is [pages, kv_heads, layers, 2, page_size, dim], contiguous within a page, "
            f"got {tuple(pool.shape)} with strides {pool.stride()}"
        )
    pages, kv_heads, layers, _, page_size, _ = pool.shape
    return PoolStruct(
        *(pool.data_ptr(), pages, pool.stride(0), kv_heads, layers, page_size, head_dim(pool)),
        dtype == torch.bfloat16,
        _KEPT.get(pool.dtype, 0),
    )
