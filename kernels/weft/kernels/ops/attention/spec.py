"""Types of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from weft.kernels.ops.latent_attention.spec import EarlierLatents, LatentPlan

MAX_TREE_ROWS = 32
"""Most rows of a request whose rows form a tree, including those of earlier steps; a sliding window
must be larger.
"""


class AttentionSpec(NamedTuple):
    """The constants of one layer's attention."""

    heads: int
    """Hq."""
    kv_heads: int
    """Hkv, which divides Hq."""
    dim: int
    """D."""
    scale: float
    """Factor on the scores."""
    window: int | None = None
    """Most positions that a row attends to; None: all. On a GPU a window excludes a
    `first_position`.
    """
    is_fixed: bool = False
    """Whether a row's result must be independent of the step's other rows on a GPU too; excludes
    ancestors.
    """
    sinks: torch.Tensor | None = None
    """[Hq] float32, on the model's device, or None. A sink is a learned logit of each head: it
    joins every row's softmax and weighs no value (gpt-oss, arXiv 2508.10925).
    """
    softcap: float | None = None
    """Scaled scores become cap * tanh(score / cap) before masking (Gemma 2, arXiv 2408.00118,
    section 2); None: no cap.
    """
    first_position: int = 0
    """First position to attend to; draft heads have nothing at position 0."""
    is_chunked: bool = False
    """Whether the window is a chunk: it begins at the last multiple of its length that is not after
    the row, and does not slide.
    """


class AttentionMetadata(NamedTuple):
    """One step as the layers of one page group see it: T rows of R requests, on the model's device.

    Layers of a group share page numbers, and so the page table.
    """

    page_table: torch.Tensor
    """[R, max_pages] int32, contiguous along a row; entries beyond kv_len are undefined."""
    places: torch.Tensor
    """[T] int64: page * page_size + offset where each row's K and V go."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32; request r has the rows cu_q_lens[r] : cu_q_lens[r + 1]."""
    kv_lens: torch.Tensor
    """[R] int32: positions in pages, new rows included."""
    max_q_len: int
    """Largest number of rows of a request, or a bound."""
    max_kv_len: int
    """Largest kv_len, or a bound."""
    ancestors: torch.Tensor | None = None
    """[T] int64, contiguous, or None: every row sees all earlier rows of its request. Bit i of row
    j's word says that row j sees row i of its request, i <= j. Bit j must be set, and bit 63 stands
    for all rows from 63 on. So -1 is causal. Only requests of at most MAX_TREE_ROWS rows may have
    other words.
    """
    is_cold: bool = False
    """Whether requests of several rows are known to have no cached positions."""
    num_earlier: int | None = None
    """For latents: cached positions of the requests with several rows, if it pays to compute keys
    and values by head for all of them; None: it does not pay, or the number is unknown.
    """
    is_settled: bool = False
    """Set by `settled`, for consecutive layers in which all rows attend. The step has been checked,
    and kernels may read it and the pool's earlier positions before the preceding launches end.
    """
    prompts: PromptRows | None = None
    """The rows of a settled step that FlashAttention-3 computes."""
    latents: LatentPlan | None = None
    """How FlashMLA attends to latents in pages; None: it does not."""
    earlier: EarlierLatents | None = None
    """For latents: places in the pool of the `num_earlier` positions; None: no keys and values by
    head are computed for them.
    """
    divided: tuple[torch.Tensor, torch.Tensor] | None = None
    """For latents: page and offset of each of `places`, [T] int64 each; None: not computed."""
    key_ends: torch.Tensor | None = None
    """[T] int32, contiguous: the position after the last one that each row attends to, at least its
    own and at most kv_len; within a request no row's is less than that of the row before. None:
    every row attends to none after its own. Excludes ancestors.
    """
    several: SeveralRows | None = None
    """Which requests may bring several rows; None: any."""
    here: PagesHere | None = None
    """This rank's share of the pages, where ranks divide them; None: this process has all."""
    pool: torch.Tensor | None = None
    """[num_pages, Hkv, layers of the group, 2, page_size, D]: the group's pages; None: they are in
    the pool of the first group.
    """

    def pool_of(self, first: torch.Tensor) -> torch.Tensor:
        """The pool of the group's pages, given the pool of the first group."""
        return first if self.pool is None else self.pool


class PageRanks(Protocol):
    """Ranks that would hold the same KV heads and divide pages instead, as one of them sees them.

    The page with number p lies on rank p % size. The calls are collective: every rank makes the
    same calls in the same order, with the same shapes.
    """

    rank: int
    size: int
    has_one_pool: bool
    """Whether the ranks' pages lie in one pool, under their own numbers; else a rank has a pool of
    its pages alone, in the rows of `weft.kernels.ops.pages.pool.row_in_pool`.
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


class SeveralRows(NamedTuple):
    """A range of requests; those outside it bring one row each, or none."""

    first: torch.Tensor
    """[1] int32: number of the first of them, on the step's device."""
    most: int
    """Bound of how many they are. It bounds the programs of a launch, of which those without work
    take time too.
    """


class PromptRows(NamedTuple):
    """The rows of a step by request; padding counts as one more request."""

    cu_lens: torch.Tensor
    """[R + 2] int32: first row of each request, and the number of all rows."""
    lens: torch.Tensor
    """[R + 1] int32: number of rows; 0 for a request that brings one row."""


class OwnKv(NamedTuple):
    """K and V of a step's own rows, as they were written to the pool."""

    k: torch.Tensor
    """[T, Hkv, D], rotated; heads contiguous, any stride between rows."""
    v: torch.Tensor
    """[T, Hkv, D]; heads contiguous, any stride between rows."""
    prompts: PromptRows | None = None
    """For FlashAttention-3: set if requests of several rows have no cached positions."""
