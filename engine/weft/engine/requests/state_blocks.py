"""Blocks of requests in recurrent layers: which block a step begins with, and where it writes new
states.

A running request has the block of the last page border that is certain and, for moments, the blocks
that steps under way write. The inputs of its rows since that border are in the ring of its slot:

    0            border                     start        end
    |-- block ------|-- computed again --------|-- rows ----|
                 the newest block      inputs in the ring

The blocks that a step writes are chosen when the step begins. It writes the block of a border if
the rows before the border are a prompt's, or reach at most one row past the request's last token.
Drafts being verified cross a border only in the next step, which knows which of them were accepted.
So no state ever includes a token that was not accepted.

Blocks are kept for later requests at the end of a prompt, every `checkpoint_tokens`, where a prompt
left a path of cached pages or another prompt leaves this one, and where a request was when it ended
or was preempted. A request keeps no block beyond its own needs if there is no room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import BoolArray, Int64Array
from weft.contract.reports import StateCounts
from weft.engine.base.state_rows import StateRows
from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import NULL_PAGE, PageMemory
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.state_index import BLOCKS_OF_REQUEST, StateIndex
from weft.pages.memory.tree import Match, Node


class DecodeRows(NamedTuple):
    """Requests of a step that have one row each."""

    requests: Sequence[Request]
    starts: Int64Array
    """[len(requests)]: positions of the rows; the largest possible ones of those that are late."""
    are_late: BoolArray | None = None
    """[len(requests)]: whether only the device knows the position; None: it is known of all."""


class _Block(NamedTuple):
    number: int
    end: int
    """Number of the request's tokens whose computation completes the block. Where verified drafts
    crossed the border, this is later than the border itself.
    """


_ZEROS = _Block(NULL_PAGE, 0)


@dataclass(slots=True)
class _Held:
    blocks: dict[int, _Block] = field(default_factory=lambda: {0: _ZEROS})
    """Blocks by border, in pages; borders rise."""
    keeps: set[int] = field(default_factory=set)
    """Borders at which a block is kept in addition to the checkpoints."""
    num_reserved: int = 0
    spare: set[int] = field(default_factory=set)
    """Borders of `blocks` that the request does not need itself; reserved in addition."""

    @property
    def newest(self) -> int:
        """The last border with a block, in pages. The block may not be written yet."""
        return next(reversed(self.blocks))

    @property
    def pages(self) -> list[int]:
        return [block.number for block in self.blocks.values() if block is not _ZEROS]

    def written(self, num_computed: int) -> int:
        """The last border whose block is written once `num_computed` tokens are computed."""
        return [border for border, block in self.blocks.items() if block.end <= num_computed][-1]


class StateBlocks:
    """Gives requests blocks, and keeps some for later requests.

    Args:
        memory: The owner of blocks, which counts and evicts them as it does pages.
        index: Its index; None: nothing is cached.
        checkpoint_tokens: Tokens from one kept block of a request to the next.
        max_requests: Number of slots.
        max_rows: Most rows of a running request in a step.
    """

    def __init__(
        self,
        memory: PageMemory,
        index: StateIndex | None,
        page_size: int,
        checkpoint_tokens: int,
        max_requests: int,
        max_rows: int = 1,
    ) -> None:
        self.memory = memory
        self._max_rows = max_rows
        self._index = index
        self._page_size = page_size
        self._checkpoint = max(1, checkpoint_tokens // page_size)
        self._held: dict[Request, _Held] = {}
        self._num_reserved = 0
        self._returning: deque[tuple[int, _Held]] = deque()
        self._newest = np.zeros((2, max_requests), np.int64)
        """[2, max_requests]: for each slot, the position of the newest block's border, and the
        block.
        """
        self.on_kept: list[Callable[[Node, int, int, bool], None]] = []
        """Called with each block that is kept, the node at whose end the block is, the priority of
        its request, and whether a step here wrote it.
        """
        self.on_given_up: Callable[[Evicted], None] = lambda evicted: None
        """Called with each kept block that is evicted, while its bytes are still there."""
        memory.on_reclaimed = lambda evicted: self.on_given_up(evicted)
        self._table = np.zeros((max_requests, 3), np.int64)
        """[max_requests, 3]: the newest blocks of each slot. A border uses the column of its number
        of pages modulo 3.
        """
        if index is not None:
            index.on_lost = self._lost

    def watch(
        self, on_reached: Callable[[bytes, bytes], None], on_unreached: Callable[[bytes], None]
    ) -> None:
        """Sets the callbacks `on_reached` and `on_unreached` of the index, if there is one."""
        if self._index is not None:
            self._index.on_reached, self._index.on_unreached = on_reached, on_unreached

    def __len__(self) -> int:
        """Number of requests that have blocks or a reservation."""
        return len(self._held)

    def counts(self) -> StateCounts:
        """Blocks by state, and the cached pages whose prefix a block can continue."""
        own, index = self.memory.counts(), self._index
        return StateCounts(
            free=own.free,
            cached=own.cached,
            used=own.used,
            checkpoint_tokens=self._checkpoint * self._page_size,
            prefix_pages=0 if index is None else index.num_prefix_pages,
            continuable_pages=0 if index is None else index.num_continuable_pages,
        )

    # -- lookups ---------------------------------------------------------------------------------

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        return 0 if self._index is None else self._index.continuable(path, num_pages)

    def take(self, request: Request, found: Match) -> None:
        """Gives a request the block from which it continues after a match."""
        held = self._held.setdefault(request, _Held())
        begin = len(found.path) - found.num_rerun
        if begin:
            assert self._index is not None
            block = self._index.block_of(found.path[begin - 1])
            assert block is not None, "a match ends at a block"
            self.memory.retain([block])
            held.blocks = {begin: _Block(block, 0)}
        if found.num_rerun:
            held.keeps.add(len(found.path))

    def note_hit(self, request: Request) -> None:
        """Call it when a request was admitted with the block that `take` gave it."""
        held = self._held.get(request)
        if self._index is not None and held is not None:
            for block in held.pages:
                if self._index.has_page(block):
                    self._index.note_hit(block)

    def share(self, first: Request, request: Request, num_pages: int) -> bool:
        """Lets a request continue from another request's block at a page border.

        Args:
            num_pages: Number of pages before the border; 0: the request begins with zeros.

        Returns:
            False if the block is gone, or the request finds no room for its own.
        """
        number = self.block_at(first, num_pages)
        if (num_pages and number is None) or not self.reserve(request):
            return False
        if num_pages and number is not None:
            self.memory.retain([number])
            self._held[request].blocks = {num_pages: _Block(number, 0)}
        return True

    def block_at(self, request: Request, num_pages: int) -> int | None:
        held = self._held.get(request)
        own = None if held is None else held.blocks.get(num_pages)
        if own is not None and own.end <= request.num_computed:
            return own.number
        node = self._node_at(request, num_pages)
        return None if node is None or self._index is None else self._index.block_of(node)

    def adopt(self, request: Request, num_pages: int, block: int | None = None) -> int:
        """Gives an admitted request the block after `num_pages` of its pages, from where it
        continues.

        Args:
            request: It has computed its tokens up to there, and published its pages.
            num_pages: Its pages before the block.
            block: A block from `lend`; None: a new one, which the caller writes.
        """
        held = self._held[request]
        if block is None:
            (block,) = self.memory.allocate(1)
        else:
            self._num_reserved -= 1
        self.memory.release(held.pages)
        held.blocks = {num_pages: _Block(block, 0)}
        held.keeps.add(num_pages)
        return block

    def lend(self) -> int | None:
        """A new block that something other than a step writes, for `adopt` or `give_back`. None:
        running requests need all of the room.
        """
        if self._num_reserved >= self.memory.num_usable_pages:
            return None
        self._num_reserved += 1
        return self.memory.allocate(1)[0]

    def hold(self, block: int) -> bool:
        """Keeps a block from being evicted until `give_back`, so that it can be copied. Returns
        False, and does nothing, if running requests need all of the room.
        """
        if self._num_reserved >= self.memory.num_usable_pages:
            return False
        self._num_reserved += 1
        self.memory.retain([block])
        return True

    def give_back(self, block: int) -> None:
        """Ends `lend` or `hold`."""
        self._num_reserved -= 1
        self.memory.release([block])

    def kept_of(self, request: Request, first: int, end: int) -> list[tuple[Node, int]]:
        """The kept blocks at the ends of the request's published pages [first, end), and their
        nodes.
        """
        if self._index is None:
            return []
        found: list[tuple[Node, int]] = []
        node = self._node_at(request, end)
        for _ in range(first, end):
            if node is None or node.parent is None:
                break
            if (block := self._index.block_of(node)) is not None:
                found.append((node, block))
            node = node.parent
        return found

    def keep_at(self, request: Request, num_pages: int) -> None:
        """Marks the block after `num_pages` of a request's pages to be kept, if no step has passed
        them yet.
        """
        held = self._held.get(request)
        if held is None or not num_pages:
            return
        held.keeps.add(num_pages)
        block = held.blocks.get(num_pages)
        if block is not None and block.end <= request.num_computed:
            self._keep(request, num_pages, block)

    # -- room ------------------------------------------------------------------------------------

    def has_room(self, request: Request, *, soon: bool = False) -> bool:
        """Whether the request is or can be admitted; with `soon`, once steps under way
        have ended.
        """
        held = self._held.get(request)
        if held is not None and held.num_reserved:
            return True
        num_soon = sum(held.num_reserved for _, held in self._returning) if soon else 0
        num_wanted = self._num_reserved + BLOCKS_OF_REQUEST - num_soon
        return num_wanted <= self.memory.num_usable_pages

    def reserve(self, request: Request) -> bool:
        """Reserves the most blocks that the request needs; False: there is no room for them."""
        if not self.has_room(request):
            return False
        held = self._held.setdefault(request, _Held())
        if not held.num_reserved:
            held.num_reserved = BLOCKS_OF_REQUEST
            self._num_reserved += BLOCKS_OF_REQUEST
        return True

    # -- steps -----------------------------------------------------------------------------------

    def begin(
        self,
        slots: Int64Array,
        decodes: DecodeRows,
        verifies: Sequence[tuple[Request, int, bool]],
        chunks: Sequence[tuple[Request, int, int]],
    ) -> StateRows:
        """Gives the requests of a step, which is about to begin, the blocks that it writes.

        Args:
            slots: [R], of all requests in the step's order: decodes, verifies, chunks.
            verifies: Requests with drafts: position after their first row, and whether only the
                device knows it, of which this is then the largest possible one.
            chunks: Pieces of prompts: their first positions and numbers of tokens.
        """
        size, writes = self._page_size, list[tuple[int, int, int]]()
        requests, starts, are_late = decodes
        known = self._newest[:, slots]
        crossed = (starts + 1) // size * size > known[0, : len(requests)]
        for number in np.flatnonzero(crossed).tolist():
            is_late = are_late is not None and bool(are_late[number])
            self._write(requests[number], number, int(starts[number]) + 1, writes, is_late=is_late)
        num_few = len(requests) + len(verifies)
        for number, (request, end, is_late) in enumerate(verifies, len(requests)):
            self._write(request, number, end, writes, is_late=is_late)
        for number, (request, start, num_tokens) in enumerate(chunks, num_few):
            # The slot may have been another request's.
            held = self._held[request]
            known[:, number] = held.newest * size, held.blocks[held.newest].number
            self._table[request.slot, held.newest % 3] = known[1, number]
            self._newest[:, request.slot] = known[:, number]
            self._write(request, number, start + num_tokens, writes)
        made = np.array(writes, np.int64).reshape(-1, 3).T
        return StateRows(known[0], known[1], made, num_few, self._table[slots])

    def _write(
        self,
        request: Request,
        number: int,
        end: int,
        writes: list[tuple[int, int, int]],
        *,
        is_late: bool = False,
    ) -> None:
        """The request's tokens up to `end` are certain. If only the device knows where its rows
        begin, `end` is the largest possible one.
        """
        held, newest = self._held[request], end // self._page_size
        if newest <= held.newest:
            return
        # Where no row was accepted, a block may have become certain though no page was filled.
        self.committed(request)
        for border in [*self._kept_between(request, held.newest, newest), newest]:
            if border < newest:
                if self._num_reserved >= self.memory.num_usable_pages:
                    continue
                held.spare.add(border)
                held.num_reserved += 1
                self._num_reserved += 1
            (block,) = self.memory.allocate(1)
            # A late step, or one that follows it, writes the block where its first row passes the
            # border: at the latest when all rows of one more step were accepted after it.
            sure = border * self._page_size + self._max_rows - 1 if is_late else end
            held.blocks[border] = _Block(block, sure)
            self._table[request.slot, border % 3] = block
            writes.append((number, border * self._page_size, block))
        self._newest[:, request.slot] = newest * self._page_size, block

    def _kept_between(self, request: Request, first: int, end: int) -> list[int]:
        if self._index is None:
            return []
        step = self._checkpoint
        checkpoints = range((first // step + 1) * step, end, step)
        return sorted({*checkpoints, *(b for b in self._keeps(request) if first < b < end)})

    def _keeps(self, request: Request) -> set[int]:
        return self._held[request].keeps | {(request.num_prompt_tokens - 1) // self._page_size}

    def committed(self, request: Request) -> None:
        """Keeps blocks, and releases those that no further step begins with, after a step of the
        request was committed.
        """
        held = self._held[request]
        newest, keeps = held.written(request.num_computed), self._keeps(request)
        for border in [border for border in held.blocks if border <= newest]:
            block = held.blocks[border]
            if border in keeps or border % self._checkpoint == 0:
                self._keep(request, border, block)
            if border < newest:
                del held.blocks[border]
                if block is not _ZEROS:
                    self.memory.release([block.number])
                if border in held.spare:
                    held.spare.remove(border)
                    held.num_reserved -= 1
                    self._num_reserved -= 1

    def _keep(self, request: Request, border: int, block: _Block) -> None:
        if self._index is None or block is _ZEROS:
            return
        node = self._node_at(request, border)
        if node is not None and self._index.add(node, block.number):
            for on_kept in self.on_kept:
                on_kept(node, block.number, request.priority, block.end > 0)

    def _lost(self, block: int, node: Node) -> None:
        assert node.parent is not None
        self.on_given_up(Evicted(block, node.key, node.parent.key))
        self.memory.forget(block)

    @staticmethod
    def _node_at(request: Request, num_pages: int) -> Node | None:
        """The node of page `num_pages` - 1 of the request; None: it is not in the tree."""
        node = request.held.leaf
        if node is None or node.page < 0 or not 0 < num_pages <= request.held.num_published:
            return None
        for _ in range(request.held.num_published - num_pages):
            assert node is not None
            node = node.parent
        return node

    # -- ends ------------------------------------------------------------------------------------

    def drop(self, request: Request, newest_step: int) -> None:
        """Keeps the last certain block of a request and releases all its blocks: at once or, if the
        request takes part in steps under way, when the newest of these has ended.
        """
        if request not in self._held:
            return
        self.committed(request)
        held = self._held.pop(request)
        newest = held.written(request.num_computed)
        self._keep(request, newest, held.blocks[newest])
        if request.num_launched:
            self._returning.append((newest_step, held))
        else:
            self._release(held)

    def end_step(self, number: int) -> None:
        while self._returning and self._returning[0][0] <= number:
            self._release(self._returning.popleft()[1])

    def _release(self, held: _Held) -> None:
        self.memory.release(held.pages)
        self._num_reserved -= held.num_reserved
