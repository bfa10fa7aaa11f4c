"""Index of the pages of a window group, which belong to nodes of the prefix tree.

The tree's nodes are pages of the first group, which keeps all positions. A node may have a page of
the window group in addition. That page may be evicted alone; its node stays in the tree. A request
can continue after a node only if the last nodes up to it, as far back as the window reaches, have
their pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from weft.contract.layout import PageGroup
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Node, PrefixTree

_MAX_PASSED_OVER = 64
"""Most pages of pinned nodes that one eviction skips."""


class WindowIndex:
    """Implements `weft.pages.memory.companion_index.CompanionIndex` for pages of a window group.

    Eviction first takes unused pages that a request released because its window had passed them,
    and with which no other request has begun, the oldest first. Then it takes the least recently
    used pages. Pages of pinned nodes come last.

    Args:
        group: Says which positions a row needs.
    """

    def __init__(self, tree: PrefixTree, group: PageGroup, page_size: int) -> None:
        self._group = group
        self._page_size = page_size
        self._pages: dict[Node, int] = {}
        self._nodes: dict[int, Node] = {}
        self._found: set[int] = set()
        """Pages with which a request has begun."""
        self._left: OrderedDict[int, None] = OrderedDict()
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.on_lost: Callable[[int, Node], None] = lambda page, node: None
        tree.on_removed.append(self._removed)

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        end = index = num_pages
        while index > self._first_needed(end):
            index -= 1
            if path[index] not in self._pages:
                end = index
        return end

    def pages_before(self, path: Sequence[Node]) -> list[int]:
        """The pages of the group that a request needs to continue after a path."""
        return [self._pages[node] for node in path[self._first_needed(len(path)) :]]

    def piece_of(self, node: Node) -> int | None:
        return self._pages.get(node)

    def add(self, node: Node, piece: int) -> bool:
        if node in self._pages:
            return False
        self._pages[node], self._nodes[piece] = piece, node
        return True

    def note_found(self, pages: Iterable[int]) -> None:
        """Notes that a request begins with these pages."""
        self._found.update(pages)

    def leave_behind(self, pages: Iterable[int]) -> None:
        """Notes that a request has released these pages, in order, because its window no longer
        reaches them.
        """
        for page in pages:
            if page in self._unused and page not in self._found:
                del self._unused[page]
                self._left[page] = None

    def has_page(self, page: int) -> bool:
        return page in self._nodes

    def mark_unused(self, pages: Sequence[int]) -> None:
        self._unused.update(dict.fromkeys(pages))

    def mark_used(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._drop_unused(page):
                raise KeyError(page)

    def evict(self) -> Evicted | None:
        if self._left:
            return self._evicted(self._left.popitem(last=False)[0])
        for _ in range(min(len(self._unused), _MAX_PASSED_OVER)):
            page, _ = self._unused.popitem(last=False)
            if not self._nodes[page].num_pins:
                return self._evicted(page)
            self._unused[page] = None
        return self._evicted(self._unused.popitem(last=False)[0]) if self._unused else None

    @property
    def num_unused_pages(self) -> int:
        return len(self._left) + len(self._unused)

    @property
    def num_evictable_pages(self) -> int:
        return self.num_unused_pages

    def check_integrity(self) -> None:
        assert {page: node for node, page in self._pages.items()} == self._nodes
        assert all(node.page >= 0 for node in self._pages), "a node has left the tree"
        assert not self._left.keys() & self._unused.keys()
        assert (self._left.keys() | self._unused.keys() | self._found) <= self._nodes.keys()

    def _first_needed(self, num_pages: int) -> int:
        return self._group.first_needed(num_pages * self._page_size) // self._page_size

    def _evicted(self, page: int) -> Evicted:
        node = self._forget(page)
        assert node.parent is not None
        return Evicted(page, node.key, node.parent.key)

    def _removed(self, node: Node) -> None:
        page = self._pages.get(node)
        if page is None:
            return
        self._forget(page)
        if self._drop_unused(page):
            self.on_lost(page, node)

    def _forget(self, page: int) -> Node:
        node = self._nodes.pop(page)
        del self._pages[node]
        self._found.discard(page)
        return node

    def _drop_unused(self, page: int) -> bool:
        for queue in (self._left, self._unused):
            if page in queue:
                del queue[page]
                return True
        return False
