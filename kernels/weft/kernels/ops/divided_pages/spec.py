"""Types of attention to pages that several ranks divide among them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata


class PageRanks(Protocol):
    """Ranks that would hold the same KV heads, as one of them sees them.

    The page with number p lies on rank p % size. The calls are collective: every rank makes the
    same calls in the same order, with the same shapes.
    """

    rank: int
    size: int
    has_one_pool: bool
    """Whether the ranks' pages lie in one pool, under their own numbers; else a rank has a pool of
    its pages alone, in which page p is page 1 + p // size, after a null page.
    """

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        """Queries of all ranks' heads.

        Args:
            q: [T, H, D]: queries of this rank's heads.

        Returns:
            [T, size * H, D], the same on all ranks.
        """
        ...

    def merge(
        self, values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Merges the attention of this rank's heads to the pages of all ranks, in float32 and in
        the order of the ranks.

        Args:
            values: [T, size * H, V]: attention of all heads to this rank's pages.
            sums: [T, size * H] float32: the logarithm of each softmax's sum.
            sinks: [H] float32: `AttentionSpec.sinks` of this rank's heads, or None.

        Returns:
            [T, H, V], dtype of `values`.
        """
        ...


class PagesHere(NamedTuple):
    """The pages of a step that lie on this rank."""

    ranks: PageRanks
    step: AttentionMetadata
    """The step's requests as this rank's pages hold them. `page_table` has their pages here in
    their order, and `kv_lens` counts positions in them. Row t attends to the first `key_ends[t]` of
    its request's, which may be none. On a GPU each row is a request.
    """
