"""Checks of KV pools, `[num_pages, ...]`, and of the rows and tables that lead into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES, is_scaled

if TYPE_CHECKING:
    from weft.kernels.ops.attention.spec import AttentionMetadata


class PlaneInPage(NamedTuple):
    """One plane of a pool `[num_pages, elements]` in which several planes follow one another in
    each page.
    """

    before: int
    """Elements of a position in the planes before this one, scales not counted."""
    width: int
    """Elements of a position in all planes, scales not counted."""
    vectors_before: int
    """Vectors of a position in the planes before this one."""
    vectors: int
    """Vectors of a position in all planes."""
    heads: int
    layers: int
    parts: int
    dim: int

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """A view of the plane, `[num_pages, heads, layers, parts, page_size, dim]`."""
        more = SCALE_BYTES if is_scaled(pool) else 0
        page_size = pool.shape[1] // (self.width + self.vectors * more)
        kept = self.dim + more
        of_layer = self.parts * page_size * kept
        strides = (self.layers * of_layer, of_layer, page_size * kept, kept, 1)
        shape = (self.heads, self.layers, self.parts, page_size, kept)
        begin = (self.before + self.vectors_before * more) * page_size + pool.storage_offset()
        return pool.as_strided((pool.shape[0], *shape), (pool.stride(0), *strides), begin)


_Page = TypeVar("_Page", int, torch.Tensor)


def row_in_pool(page: _Page, size: int) -> _Page:
    """The row of a page, or of each of several, in that of `size` pools that has it. Row 0 of each
    pool receives what no one reads.
    """
    return 1 + page // size


class PageShare(NamedTuple):
    """The pages of a pool that divides all pages with others by their numbers."""

    rank: int = 0
    size: int = 1
    """Number of pools. If it is 1, page p is row p; else `row_in_pool` of pool p % size."""

    def row(self, page: int) -> int | None:
        """None: the page is in another pool."""
        if self.size == 1:
            return page
        return row_in_pool(page, self.size) if page % self.size == self.rank else None


ALL_PAGES = PageShare()


def has_dense_pages(pool: torch.Tensor) -> bool:
    """Whether a pool is contiguous within each page. The first stride may exceed a page, as it does
    for a plane that shares pages with other planes.
    """
    return pool.is_contiguous() or pool[:1].is_contiguous()


def check_rows(rows: int, positions: torch.Tensor, slots: torch.Tensor) -> None:
    """Raises ValueError unless `positions` and `slots` have one entry for each of `rows` rows."""
    for name, index in (("positions", positions), ("slots", slots)):
        if index.shape != (rows,) or index.dtype != torch.int64 or not index.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{rows}] int64")


def check_tables(step: AttentionMetadata) -> None:
    """Raises ValueError unless the page table and the lengths of a step's requests fit together."""
    page_table, requests = step.page_table, step.page_table.shape[0]
    if page_table.dtype != torch.int32 or page_table.stride(1) != 1:
        raise ValueError("page_table must be [R, max_pages] int32, contiguous along a row")
    for name, tensor, shape in (
        ("cu_q_lens", step.cu_q_lens, (requests + 1,)),
        ("kv_lens", step.kv_lens, (requests,)),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {tuple(shape)} int32")
