"""Types of draft tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from weft.kernels.ops.lora.spec import LoraStep


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrees:
    """Inputs for growing a tree after the last token of each of R requests."""

    width: int
    depth: int
    num_nodes: int
    """Nodes to keep of each tree: at most as many as are grown, and at most 31."""
    starts: torch.Tensor
    """[R] int64: positions of the last tokens."""
    slots: torch.Tensor
    """[1 + width * (depth - 1), R] int64: page * page_size + offset of the places from `starts` on;
    a place without a page is in the null page, page 0.
    """
    is_whole: torch.Tensor
    """[R] bool: whether all places have pages; if not, the tree ends with its first level."""
    max_depths: torch.Tensor
    """[R] int64: depth of the deepest node that is kept."""
    page_table: torch.Tensor
    """[R, max_pages] int32, contiguous along a row; wide enough for all places."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32: 0, 1, 2 ..., the offsets of one row for each request."""
    max_kv_len: int
    root_lora: LoraStep | None = None
    """What adapters add to the head's layer, number 0, for the R rows of the first run."""
    lora: LoraStep | None = None
    """What adapters add for the R * width rows of the later runs, request by request."""

    @property
    def num_grown(self) -> int:
        """Nodes of all levels of one tree."""
        return self.width + self.width * self.width * (self.depth - 1)


class Nodes(NamedTuple):
    """All nodes grown, M for each of R trees, level by level."""

    tokens: torch.Tensor
    """[R, M] int64, ids of the target's vocabulary."""
    scores: torch.Tensor
    """[R, M] float32: logarithms of path probabilities; -inf: the node must not be kept."""
    paths: torch.Tensor
    """[R, M] int64: one bit for each expanded node on the way from the root to this node."""
    chosen: torch.Tensor
    """[R, width * (depth - 1)] int64: which of the M nodes were expanded."""


class Expanded(NamedTuple):
    """Nodes that get children, P for each of R trees: the rows of the head's next run."""

    tokens: torch.Tensor
    """[R * P] int64."""
    scores: torch.Tensor
    """[R * P] float32."""
    paths: torch.Tensor
    """[R * P] int64: bits of the expanded nodes on the way to each node, and of the node itself."""
    rows: torch.Tensor
    """[R * P] int64: row of each node's parent in the run before."""
