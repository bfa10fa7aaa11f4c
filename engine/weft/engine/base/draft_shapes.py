"""Shapes of drafts: which chains and trees may be verified, and which are compared."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.base.config import MAX_TREE_NODES


class DraftShape(NamedTuple):
    """Number and shape of the drafts that requests may bring to a step."""

    num_drafts: int
    """Drafts per request."""
    depth: int
    """Most drafts that can be accepted at once; of a chain all."""
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
        """Number of nodes grown, from which those of a tree are chosen."""
        return self.width + self.width * self.width * (self.depth - 1)

    @property
    def num_places(self) -> int:
        """Number of positions behind the last token where K and V of drafts are written."""
        return max(self.num_drafts, self.width * (self.depth - 1)) if self.is_tree else self.depth


DEPTHS = (0, 1, 2, 3, 4, 5, 7)
"""Numbers of drafts of chains that are compared; 0: none."""


TREES = ((7, 5), (15, 6), (MAX_TREE_NODES, 6))
"""Nodes and depths of trees that are compared with them; no tree is less deep than one with fewer
nodes.
"""


def depths_up_to(max_drafts: int) -> list[int]:
    """Numbers of drafts that are compared, up to a maximum."""
    return [*(depth for depth in DEPTHS if depth < max_drafts), max_drafts]


def tree_shapes(width: int) -> list[DraftShape]:
    """Trees that are compared, with this many children per node; none for chains."""
    if width == 1:
        return []
    shapes = [DraftShape(nodes, depth, width) for nodes, depth in TREES]
    return [shape for shape in shapes if shape.num_drafts <= shape.num_grown]
