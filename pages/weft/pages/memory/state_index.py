"""Index of the blocks of recurrent layers, which belong to nodes of the prefix tree.

A node is a page of KV. It may have a block in addition: the states after the page's last token. A
request can continue after a node only if the node has one. Few nodes do, since a block is as large
as the KV of thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Node, PrefixTree

BLOCKS_OF_REQUEST = 3
"""Most blocks that a running request needs itself: the one that is certain, and one for each of the
two steps that may be under way.
"""
_MIN_HEAP = 64
"""Heap size up to which stale entries are not removed."""

_Worth = tuple[bool, int]
"""Whether the node is pinned for a chat session, and the priority of the block."""


@dataclass(slots=True, eq=False)
class _Kept:
    node: Node
    block: int
    num_uses: int = 1
    """Number of requests that began with the block, and the one that wrote it."""
    base: int = 0
    """The index's `_floor` when the block was used last."""
    ticket: int = 0
    """Ticket of the block's entry in the heap; 0: it is in use."""


class StateIndex:
    """Implements `weft.pages.memory.companion_index.CompanionIndex` for blocks.

    All blocks are of one size, so eviction takes the block with the smallest product of its uses
    and the pages that it saves, counted from the nearest block before it. A block that is not used
    any more loses against new ones, because these begin above what was evicted last. The rule is
    GreedyDual-Size with frequency (Cherkasova, 1998); Marconi (Pan et al., 2024) weighs computation
    saved by bytes for such states. Blocks of pinned nodes come last.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._of_node: dict[Node, _Kept] = {}
        self._of_block: dict[int, _Kept] = {}
        self._heap: list[tuple[_Worth, int, _Kept]] = []
        self._floor = self._num_tickets = 0
        self.num_unused_pages = 0
        self.on_lost: Callable[[int, Node], None] = lambda block, node: None
        self.on_reached: Callable[[bytes, bytes], None] = lambda key, parent: None
        """Called with the key of each page that now has a block at its end or at a later page's,
        and the key of the page before it. Only such pages save a request anything.
        """
        self.on_unreached: Callable[[bytes], None] = lambda key: None
        """Called with the key of each page that no longer has such a block."""
        self._num_reaching: dict[Node, int] = {}
        """For each node, the number of its children that are in this dictionary, and 1 more if it
        has a block of its own.
        """
        tree.on_removed.append(self._removed)

    @property
    def num_evictable_pages(self) -> int:
        return self.num_unused_pages

    @property
    def num_prefix_pages(self) -> int:
        return self._tree.num_pages

    @property
    def num_continuable_pages(self) -> int:
        """Number of pages that have a block at their end or at a later page's."""
        return len(self._num_reaching)

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        while num_pages and path[num_pages - 1] not in self._of_node:
            num_pages -= 1
        return num_pages

    def piece_of(self, node: Node) -> int | None:
        kept = self._of_node.get(node)
        return None if kept is None else kept.block

    def add(self, node: Node, piece: int) -> bool:
        if node in self._of_node:
            return False
        self._of_node[node] = self._of_block[piece] = _Kept(node, piece)
        self._reach(node)
        return True

    def note_hit(self, block: int) -> None:
        """Notes that a request begins with a block, which is in use."""
        self._of_block[block].num_uses += 1

    def has_page(self, page: int) -> bool:
        return page in self._of_block

    def mark_unused(self, pages: Sequence[int]) -> None:
        for page in pages:
            kept = self._of_block[page]
            kept.base = self._floor
            self.num_unused_pages += 1
            self._offer(kept)

    def mark_used(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._of_block[page].ticket = 0
        self.num_unused_pages -= len(pages)

    def evict(self) -> Evicted | None:
        while self._heap:
            worth, ticket, kept = heappop(self._heap)
            if kept.ticket != ticket:
                continue
            if self._worth(kept) > worth:
                self._offer(kept)  # A block before it was evicted, or its node was pinned.
                continue
            self._floor = max(self._floor, worth[1])
            self._forget(kept)
            node = kept.node
            assert node.parent is not None
            return Evicted(kept.block, node.key, node.parent.key)
        return None

    def check_integrity(self) -> None:
        assert {kept.node: kept for kept in self._of_block.values()} == self._of_node
        assert all(node.page >= 0 for node in self._of_node), "a node has left the tree"
        waiting = {kept.block for _, ticket, kept in self._heap if kept.ticket == ticket}
        unused = {kept.block for kept in self._of_block.values() if kept.ticket}
        assert waiting == unused
        assert len(unused) == self.num_unused_pages
        reaching: set[Node] = set()
        for node in self._of_node:
            while node.parent is not None and node not in reaching:
                reaching.add(node)
                node = node.parent
        assert reaching == self._num_reaching.keys()

    def _worth(self, kept: _Kept) -> _Worth:
        num_saved, node = 1, kept.node.parent
        while node is not None and node.parent is not None and node not in self._of_node:
            num_saved, node = num_saved + 1, node.parent
        return kept.node.num_pins > 0, kept.base + num_saved * kept.num_uses

    def _offer(self, kept: _Kept) -> None:
        self._num_tickets += 1
        kept.ticket = self._num_tickets
        heappush(self._heap, (self._worth(kept), kept.ticket, kept))
        if len(self._heap) > _MIN_HEAP + 2 * len(self._of_block):
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def _removed(self, node: Node) -> None:
        kept = self._of_node.get(node)
        if kept is not None:
            is_unused = kept.ticket > 0
            self._forget(kept)
            if is_unused:
                self.on_lost(kept.block, node)

    def _forget(self, kept: _Kept) -> None:
        del self._of_node[kept.node], self._of_block[kept.block]
        self._unreach(kept.node)
        self.num_unused_pages -= kept.ticket > 0
        kept.ticket = 0

    def _reach(self, node: Node) -> None:
        path: list[tuple[bytes, bytes]] = []
        while node.parent is not None:
            count = self._num_reaching[node] = self._num_reaching.get(node, 0) + 1
            if count > 1:
                break
            path.append((node.key, node.parent.key))
            node = node.parent
        for key, parent in reversed(path):
            self.on_reached(key, parent)

    def _unreach(self, node: Node) -> None:
        while node.parent is not None:
            count = self._num_reaching[node] = self._num_reaching[node] - 1
            if count:
                return
            del self._num_reaching[node]
            self.on_unreached(node.key)
            node = node.parent
