"""Ranks that divide the pages of their KV heads and have a GPU each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from weft.kernels.ops.pages import page_index
from weft.kernels.ops.pages.pool import row_in_pool
from weft.kernels.ops.peers.triton_pages import PagesMemory, gather_queries, merge_results

MAX_ROWS = 256
"""Rows of one exchange. Two ranks of DeepSeek-V3 have 142 MB for them."""


class DevicePageRanks:
    """Implements `weft.kernels.ops.attention.spec.PageRanks` through memory that all map."""

    has_one_pool = False

    def __init__(self, memory: PagesMemory) -> None:
        self.rank, self.size = memory.rank, memory.size
        self._memory = memory

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        return gather_queries(self._memory, q)

    def merge(
        self, values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return merge_results(self._memory, values, sums, sinks)


class DividedPool:
    """The pages of ranks that divide them, as one rank maps them.

    Args:
        ranks: The ranks.
        pools: The pool of each of them, [num_pages, ...].
        meet: Waits until all ranks have come to this call.
    """

    def __init__(
        self,
        ranks: DevicePageRanks,
        pools: Sequence[torch.Tensor],
        meet: Callable[[], None],
    ) -> None:
        self._ranks, self._meet = ranks, meet
        self._rows = [pool.view(torch.uint8).view(pool.shape[0], -1) for pool in pools]

    def here(self, pages: Sequence[int]) -> list[int]:
        """The numbers in this rank's pool of those pages that lie on it."""
        size = self._ranks.size
        return [row_in_pool(page, size) for page in pages if page % size == self._ranks.rank]

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies pages to pages, each by the rank of its destination. All ranks call it."""
        rank, size = self._ranks.rank, self._ranks.size
        own = self._rows[rank]
        self._meet()
        for other, rows in enumerate(self._rows):
            pairs = [
                (row_in_pool(source, size), row_in_pool(into, size))
                for source, into in zip(sources, destinations, strict=True)
                if into % size == rank and source % size == other
            ]
            if pairs:
                sent, got = (page_index(pages, own.device) for pages in zip(*pairs, strict=True))
                own.index_copy_(0, got, rows.index_select(0, sent))
        self._meet()
