"""The interface of indexes of a companion's pieces, which belong to nodes of the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from weft.pages.memory.prefix_cache import PageIndex
from weft.pages.memory.tree import Node


class CompanionIndex(PageIndex, Protocol):
    """Index of pieces. `PageMemory` owns their numbers, and they are evicted as pages are. A node
    of the tree has one piece or none.
    """

    on_lost: Callable[[int, Node], None]
    """Called with each unused piece whose node has left the tree, and with the node."""

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        """The most leading pages of a path, up to `num_pages`, after which a request finds all
        pieces that it needs.
        """
        ...

    def piece_of(self, node: Node) -> int | None:
        """The piece of a node; None: it has none."""
        ...

    def add(self, node: Node, piece: int) -> bool:
        """Adds a piece, which is in use, to a node; False: the node already has one."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError unless pieces and nodes belong together."""
        ...
