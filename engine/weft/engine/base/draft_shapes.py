"""Shapes of drafts: the chains and trees that a step may verify, and those that a gate compares."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.base.config import MAX_TREE_NODES


class DraftShape(NamedTuple):
    """Number and shape of the drafts of each request in a step."""

    num_drafts: int
    """Drafts per request."""
    depth: int
    """Most drafts that one step can accept; for a chain all of them."""
    width: int = 1
    """Width of a tree: this many nodes of a level get as many children each. 1: a chain."""

    @classmethod
    def chain(cls, num_drafts: int) -> DraftShape:
        """A chain of drafts, each following the one before."""
        return cls(num_drafts, num_drafts)

    @property
    def is_tree(self) -> bool:
        """Whether several drafts may follow one token."""
        return self.width > 1

    @property
    def num_grown(self) -> int:
        """Number of nodes that the drafter grows; it chooses the nodes of the tree from them."""
        return self.width + self.width * self.width * (self.depth - 1)

    @property
    def num_places(self) -> int:
        """Number of positions after the last token where the drafter writes K and V of drafts."""
        return max(self.num_drafts, self.width * (self.depth - 1)) if self.is_tree else self.depth


DEPTHS = (0, 1, 2, 3, 4, 5, 7)
"""Lengths of the chains that a gate compares; 0: no drafts."""


TREES = ((7, 5), (15, 6), (MAX_TREE_NODES, 6))
"""Nodes and depths of the trees that a gate compares with the chains. The depth never falls as the
number of nodes rises.
"""


def depths_up_to(max_drafts: int) -> list[int]:
    """Lengths of the chains that a gate compares, up to a maximum."""
    return [*(depth for depth in DEPTHS if depth < max_drafts), max_drafts]


def tree_shapes(width: int) -> list[DraftShape]:
    """Trees of this width that a gate compares; none for width 1."""
    if width == 1:
        return []
    shapes = [DraftShape(nodes, depth, width) for nodes, depth in TREES]
    return [shape for shape in shapes if shape.num_drafts <= shape.num_grown]
