"""Radix tree over (namespace, tokens) whose nodes are full pages.

The idea is RadixAttention's (Zheng et al., 2023): KV stays in its pages when its request ends, and
a tree of tokens finds it for the next prompt. Here an edge is always one page of tokens. Nodes are
therefore never split, each page has its own use and age, and eviction takes single pages. A match
may end inside a page: bisection finds the child with the longest common beginning, since in sorted
order it is a neighbour of the wanted tokens.

    held        used, or some node below is used
    evictable   not held; evicted before its ancestors
    leaf        without children; only evictable leaves are evicted, so no path has a gap
    pinned      for a chat session: evicted after all pages that are not pinned
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heappushpop
from typing import NamedTuple

from weft.contract.keys import ROOT_KEY, TOKEN_BYTES, PageKeys
from weft.pages.memory.eviction import EvictionPolicy, Key, lru
from weft.pages.memory.prefix_cache import Evicted

_MIN_HEAP = 64
"""Heap size up to which stale entries are not removed."""


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A cached page; the root of a namespace has none (page = 0)."""

    tokens: bytes
    """The page's tokens as bytes; of a root, the namespace."""
    key: bytes
    page: int
    """The page's number; -1: it was evicted."""
    parent: Node | None
    created: int = 0
    last_used: int = 0
    priority: int = 0
    children: dict[bytes, Node] | None = None
    order: list[bytes] | None = None
    """Tokens of the children, sorted; None until they are needed."""
    num_held: int = 0
    """Number of children that are held."""
    is_used: bool = True
    ticket: int = 0
    """Ticket of the node's entry in the heap; 0: it has none."""
    num_hits: int = 0
    num_pins: int = 0
    pinned_at: int = 0


class Match(NamedTuple):
    """The longest cached prefix of a prompt."""

    path: list[Node]
    """Matching full pages, in order."""
    partial: Node | None
    """A page whose beginning matches the rest of the prompt; None: there is none."""
    num_partial_tokens: int
    """Number of matching tokens in `partial`, fewer than a page."""
    num_rerun: int = 0
    """Last pages of the path whose tokens are computed again, because their KV is cached but the
    states of recurrent layers are not.
    """

    def num_tokens(self, page_size: int) -> int:
        """Number of matching tokens that are not computed again."""
        return (len(self.path) - self.num_rerun) * page_size + self.num_partial_tokens


NO_MATCH = Match([], None, 0)


class PrefixTree:
    """Index of full, immutable pages by content. `PageMemory` reports which pages are in use.

    `token_bytes` is how many bytes `PageKeys.packed` has for a token.
    """

    def __init__(
        self, page_size: int, policy: EvictionPolicy = lru, token_bytes: int = TOKEN_BYTES
    ) -> None:
        self._token_bytes = token_bytes
        self._width = page_size * token_bytes
        self._page_size = page_size
        self._policy = policy
        self._roots: dict[bytes, Node] = {}
        self._node_by_page: dict[int, Node] = {}
        self._heap: list[tuple[Key, int, Node]] = []
        self._bared: tuple[Key, int, Node] | None = None
        """Parent of the page evicted last; the eviction made it a leaf."""
        self._num_tickets = 0
        self._time = 0
        self._found: tuple[bytes, bytes, Match] | None = None
        """The last lookup (namespace, prompt, result); None after a page was added or removed. The
        scheduler looks a request up when it decides where to compute it, and again on admission.
        """
        self.num_unused_pages = 0
        self.num_evictable_pages = 0
        self.num_pinned_pages = 0
        """Number of pinned pages, in use or not."""
        self.num_pinned_evictions = 0
        """Number of pages that were evicted although they were pinned, since start."""
        self.on_removed: list[Callable[[Node], None]] = []
        """Called with every node that leaves the tree; the node's fields are unchanged."""

    @property
    def num_pages(self) -> int:
        """Number of pages in the tree, in use or not."""
        return len(self._node_by_page)

    # -- finding and adding ----------------------------------------------------------------------

    def find(self, namespace: bytes, data: bytes) -> Match:
        """Finds the longest cached prefix of a prompt, exact to the token. Changes nothing. A later
        lookup may return the same object, so callers must not change its path. `namespace` has 32
        bytes; `data` is the prompt as `token_bytes` packs it.
        """
        if self._found is not None and self._found[:2] == (namespace, data):
            return self._found[2]
        path: list[Node] = []
        node = self._roots.get(namespace)
        if node is None:
            return Match(path, None, 0)
        start, width = 0, self._width
        while children := node.children:
            child = children.get(data[start : start + width])
            if child is None:
                break
            path.append(child)
            node = child
            start += width
        rest = data[start : start + width]
        match = Match(path, *_closest_child(node, rest, self._token_bytes))
        self._found = (namespace, data, match)
        return match

    def touch(self, leaf: Node, priority: int) -> None:
        """Notes that a request with this priority uses the match that ends at `leaf`."""
        self._time += 1
        node: Node | None = leaf
        while node is not None:
            node.last_used = self._time
            node.num_hits += 1
            if priority < node.priority:
                node.priority = priority
            node = node.parent

    def insert(
        self,
        keys: PageKeys,
        tokens: Sequence[int],
        pages: Sequence[int],
        first: int,
        end: int,
        leaf: Node | None,
        *,
        priority: int = 0,
        num_spare_pages: Callable[[], int] | None = None,
    ) -> tuple[Node | None, list[Node]]:
        """Indexes a request's full pages, which are in use, unless another page has their place.

        Args:
            keys: Keys of the request's pages, and its namespace.
            pages: Pages of the request; those before `end` are full.
            first: Index of the first page that no earlier call was given.
            end: Index after the last page to index now.
            leaf: Node that the last call returned; None: there was none, or it is unknown.
            num_spare_pages: Most unused ancestors of the new pages that the call may make
                unevictable; None: any number.

        Returns:
            The node at which the path ends, for the next call (None: the path could not be entered
                now, and the next call tries again), and the new nodes.
        """
        if leaf is None or leaf.page < 0:
            first = 0
            leaf = self._roots.get(keys.namespace)
            if leaf is None:
                leaf = Node(keys.namespace, ROOT_KEY, 0, None)
                self._roots[keys.namespace] = leaf
        data = keys.packed(tokens, first * self._page_size, end * self._page_size)
        symbols = [data[at : at + self._width] for at in range(0, len(data), self._width)]
        index = 0
        while index < len(symbols):
            child = leaf.children.get(symbols[index]) if leaf.children else None
            if child is None:
                break
            leaf = child
            index += 1
        if index == len(symbols):
            return leaf, []
        num_newly_held = _num_evictable_above(leaf)
        if num_newly_held and num_spare_pages is not None and num_newly_held > num_spare_pages():
            return None, []
        index += first
        new_keys = keys.upto(tokens, end)[index:]
        added = self._add(leaf, symbols[index - first :], new_keys, pages[index:end], priority)
        return added[-1], added

    def append(self, leaf: Node, tokens: bytes, key: bytes, page: int, priority: int) -> Node:
        """Indexes one page after an indexed page in use, as generated tokens fill it. Returns the
        node for these tokens: a new one, or an existing one with another page.
        """
        children = leaf.children
        if children is not None:
            found = children.get(tokens)
            return found or self._add(leaf, (tokens,), (key,), (page,), priority)[0]
        self._time += 1
        self._found = None
        node = Node(tokens, key, page, leaf, self._time, self._time, priority)
        self._node_by_page[page] = node
        leaf.children = {tokens: node}
        leaf.num_held = 1
        return node

    def _add(
        self,
        parent: Node,
        symbols: Sequence[bytes],
        keys: Sequence[bytes],
        pages: Sequence[int],
        priority: int,
    ) -> list[Node]:
        self._time += 1
        self._found = None
        if parent.children is None:
            parent.children = {}
        elif parent.order is not None:
            insort(parent.order, symbols[0])
        node, children = parent, parent.children
        added: list[Node] = []
        for symbol, key, page in zip(symbols, keys, pages, strict=True):
            assert page not in self._node_by_page, f"page {page} is indexed"
            child = Node(symbol, key, page, node, self._time, self._time, priority)
            self._node_by_page[page] = children[symbol] = child
            added.append(child)
            child.num_held = 1
            node, children = child, {}
            child.children = children
        node.num_held, node.children = 0, None
        parent.num_held += 1
        if parent.num_held == 1 and not parent.is_used:
            self._hold(parent)
        return added

    # -- what is in use --------------------------------------------------------------------------

    def has_page(self, page: int) -> bool:
        return page in self._node_by_page

    def mark_used(self, pages: Sequence[int]) -> None:
        """A prompt's pages come in order. So no call of `_hold` climbs more than one node, because
        the page before is used already.
        """
        nodes = self._node_by_page
        self.num_unused_pages -= len(pages)
        for page in pages:
            node = nodes[page]
            node.is_used = True
            if not node.num_held:
                self._hold(node)

    def mark_unused(self, pages: Sequence[int]) -> None:
        nodes, now = self._node_by_page, self._time
        self.num_unused_pages += len(pages)
        self._time += len(pages)
        for page in pages:
            now += 1
            node = nodes[page]
            node.is_used = False
            node.last_used = now
            if not node.num_held:
                self._let_go(node)

    def _hold(self, node: Node) -> None:
        """Its ancestors become held too, as far as they are not."""
        while True:
            self.num_evictable_pages -= 1
            node.ticket = 0
            assert node.parent is not None
            node = node.parent
            node.num_held += 1
            if node.num_held > 1 or node.is_used:
                return

    def _let_go(self, node: Node) -> None:
        """Its ancestors that were held only through it are not held any more either."""
        while True:
            self.num_evictable_pages += 1
            if not node.children:
                self._offer(node)
            assert node.parent is not None
            node = node.parent
            node.num_held -= 1
            if node.num_held or node.is_used:
                return

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, leaf: Node, stamp: int) -> None:
        """Pins a cached page and its ancestors: they are evicted after pages that are not pinned. A
        pin never keeps a request from getting pages. `stamp` rises with each pin; of the pinned
        pages, those with the smallest are evicted first.
        """
        node = leaf
        while node.parent is not None:
            self.num_pinned_pages += not node.num_pins
            node.num_pins += 1
            node.pinned_at = stamp
            if node.ticket:
                self._offer(node)
            node = node.parent

    def unpin(self, leaf: Node) -> None:
        """Releases a pin, even if some of its pages were evicted meanwhile."""
        node = leaf
        while node.parent is not None:
            node.num_pins -= 1
            if not node.num_pins and node.page >= 0:
                self.num_pinned_pages -= 1
                if node.ticket:
                    self._offer(node)
            node = node.parent

    # -- giving up -------------------------------------------------------------------------------

    def evict(self) -> Evicted | None:
        while True:
            entry, self._bared = self._bared, None
            if entry is not None:
                # The parent is usually evicted next, without entering the heap.
                entry = heappushpop(self._heap, entry)
            elif self._heap:
                entry = heappop(self._heap)
            else:
                return None
            _, ticket, node = entry
            if node.ticket == ticket:
                assert node.parent is not None
                evicted = Evicted(node.page, node.key, node.parent.key)
                self._remove(node)
                return evicted

    def _offer(self, node: Node) -> None:
        heappush(self._heap, self._entry(node))
        if len(self._heap) > _MIN_HEAP + 2 * len(self._node_by_page):
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def _entry(self, node: Node) -> tuple[Key, int, Node]:
        self._num_tickets += 1
        node.ticket = self._num_tickets
        key = (1, node.pinned_at) if node.num_pins else (0, *self._policy(node))
        return key, node.ticket, node

    def _remove(self, node: Node) -> None:
        self._found = None
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        for listener in self.on_removed:
            listener(node)
        del parent.children[node.tokens]
        if parent.order is not None:
            del parent.order[bisect_left(parent.order, node.tokens)]
        del self._node_by_page[node.page]
        node.page, node.ticket = -1, 0
        self.num_evictable_pages -= 1
        self.num_unused_pages -= 1
        if node.num_pins:
            self.num_pinned_pages -= 1
            self.num_pinned_evictions += 1
        if parent.children:
            return
        parent.children = parent.order = None
        if parent.parent is None:
            # A request may still refer to the root as the end of its path.
            parent.page = -1
            del self._roots[parent.tokens]
        elif not parent.is_used:
            self._bared = self._entry(parent)

    # -- for tests -------------------------------------------------------------------------------

    def keys(self) -> Iterator[bytes]:
        """Keys of all pages, each before those that follow it."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node.key
            if node.children:
                stack += node.children.values()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the counts are those of a walk over the tree."""
        num_unused = num_evictable = num_pages = num_pinned = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            children = list((node.children or {}).values())
            held = [child for child in children if child.is_used or child.num_held]
            assert node.num_held == len(held)
            assert node.order is None or node.order == sorted(node.children or ())
            if node.parent is not None:
                is_evictable = not node.is_used and not held
                assert self._node_by_page[node.page] is node
                assert bool(node.ticket) == (is_evictable and not children)
                num_pages += 1
                num_unused += not node.is_used
                num_pinned += node.num_pins > 0
                assert node.num_pins >= sum(child.num_pins for child in children)
                num_evictable += is_evictable
            stack += children
        assert num_pages == len(self._node_by_page), "a page is indexed and not in the tree"
        assert (num_unused, num_evictable) == (self.num_unused_pages, self.num_evictable_pages)
        assert num_pinned == self.num_pinned_pages


def _num_evictable_above(node: Node | None) -> int:
    """How many nodes, this one and its ancestors, become held when this one does."""
    count = 0
    while node is not None and not (node.is_used or node.num_held):
        count += 1
        node = node.parent
    return count


def _closest_child(node: Node, wanted: bytes, token_bytes: int) -> tuple[Node | None, int]:
    """Returns also the number of common tokens; None: no child shares a token."""
    children = node.children
    if not children or not wanted:
        return None, 0
    if len(children) == 1:
        around = list(children)
    else:
        if node.order is None:
            node.order = sorted(children)
        at = bisect_left(node.order, wanted)
        around = node.order[max(0, at - 1) : at + 1]
    num_bytes, tokens = max((_num_common_bytes(wanted, other), other) for other in around)
    num_tokens = num_bytes // token_bytes
    return (children[tokens], num_tokens) if num_tokens else (None, 0)


def _num_common_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not differing:
        return length
    return ((differing & -differing).bit_length() - 1) // 8
