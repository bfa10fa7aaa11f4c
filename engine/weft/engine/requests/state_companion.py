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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Self

import numpy as np
from weft.contract.layout import StatePlane
from weft.contract.reports import LoadReport, StateCounts
from weft.engine.base.config import EngineConfig
from weft.engine.base.state_rows import StateRows
from weft.engine.requests.companions import (
    Companion,
    HeldPieces,
    Reserved,
    StepRows,
    StepStates,
)
from weft.engine.requests.request import Request
from weft.pages.memory.page_memory import NULL_PAGE, PageMemory
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.state_index import BLOCKS_OF_REQUEST, StateIndex
from weft.pages.memory.tree import Match, PrefixTree


class _Block(NamedTuple):
    number: int
    end: int
    """Number of the request's tokens whose computation completes the block. Where verified drafts
    crossed the border, this is later than the border itself.
    """


_ZEROS = _Block(NULL_PAGE, 0)
_ONE = Reserved(1, 1)


@dataclass(slots=True)
class _Held(HeldPieces):
    blocks: dict[int, _Block] = field(default_factory=lambda: {0: _ZEROS})
    """Blocks by border, in pages; borders rise."""
    keeps: set[int] = field(default_factory=set)
    """Borders at which a block is kept in addition to the checkpoints."""
    spare: set[int] = field(default_factory=set)
    """Borders of `blocks` that the request does not need itself; reserved in addition."""

    @property
    def newest(self) -> int:
        """The last border with a block, in pages. The block may not be written yet."""
        return next(reversed(self.blocks))

    @property
    def pieces(self) -> list[int]:
        return [block.number for block in self.blocks.values() if block is not _ZEROS]

    def written(self, num_computed: int) -> int:
        """The last border whose block is written once `num_computed` tokens are computed."""
        return [border for border, block in self.blocks.items() if block.end <= num_computed][-1]


class StateCompanion(Companion):
    """The states after the last token of a page: one block lets a request continue there.

    Args:
        memory: The owner of blocks.
        checkpoint_tokens: Tokens from one kept block of a request to the next.
        max_requests: Number of slots.
        max_rows: Most rows of a running request in a step.
    """

    name = "state"
    allows_rerun = True
    needs_many = False
    has_last_rows = True
    _held: dict[Request, _Held]

    def __init__(
        self,
        memory: PageMemory,
        index: StateIndex | None,
        page_size: int,
        checkpoint_tokens: int,
        max_requests: int,
        max_rows: int = 1,
    ) -> None:
        super().__init__(memory, index, page_size, memory.num_usable_pages)
        self._states = index
        self._max_rows = max_rows
        self._checkpoint = max(1, checkpoint_tokens // page_size)
        self._newest = np.zeros((2, max_requests), np.int64)
        """[2, max_requests]: for each slot, the position of the newest block's border, and the
        block.
        """
        self._table = np.zeros((max_requests, 3), np.int64)
        """[max_requests, 3]: the newest blocks of each slot. A border uses the column of its number
        of pages modulo 3.
        """

    @classmethod
    def make(
        cls,
        declared: StatePlane,
        config: EngineConfig,
        num_pieces: int,
        prefixes: PrefixTree | None,
        tables: Iterator[PageTable],
    ) -> Self:
        index = None if prefixes is None else StateIndex(prefixes)
        return cls(
            PageMemory(num_pieces, index, tracks_freed=config.poison_free_pages),
            index,
            config.page_size,
            config.checkpoint_tokens,
            config.max_running_requests,
            1 + config.most_drafts,
        )

    def watch(
        self, on_reached: Callable[[bytes, bytes], None], on_unreached: Callable[[bytes], None]
    ) -> bool:
        if self._states is not None:
            self._states.on_reached, self._states.on_unreached = on_reached, on_unreached
        return True

    def report(self, load: LoadReport) -> None:
        own, index = self.memory.counts(), self._states
        load.state_counts = StateCounts(
            free=own.free,
            cached=own.cached,
            used=own.used,
            checkpoint_tokens=self._checkpoint * self._page_size,
            prefix_pages=0 if index is None else index.num_prefix_pages,
            continuable_pages=0 if index is None else index.num_continuable_pages,
        )

    # -- lookups ---------------------------------------------------------------------------------

    def first_needed(self, num_pages: int) -> int:
        return num_pages - 1

    def num_needed(self, first_token: int, end_token: int) -> int:
        return 1

    def last_pieces(self, request: Request, num_pages: int, count: int) -> list[int] | None:
        block = self.block_at(request, num_pages)
        return None if block is None else [block]

    def take(self, request: Request, found: Match) -> None:
        held = self._hold_for(request)
        begin = len(found.path) - found.num_rerun
        if begin:
            assert self._index is not None
            block = self._index.piece_of(found.path[begin - 1])
            assert block is not None, "a match ends at a block"
            self.memory.retain([block])
            held.blocks = {begin: _Block(block, 0)}
        if found.num_rerun:
            held.keeps.add(len(found.path))

    def note_hit(self, request: Request) -> None:
        held = self._held.get(request)
        if self._states is not None and held is not None:
            for block in held.pieces:
                if self._states.has_page(block):
                    self._states.note_hit(block)

    def note_follower(self, leader: Request, follower: Request) -> None:
        """The leader keeps a block at the border where the prompts part."""
        both = zip(leader.tokens, follower.tokens[: follower.num_reusable_tokens], strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        self.keep_at(leader, num_common // self._page_size)

    def share(self, first: Request, request: Request, num_pages: int) -> bool:
        number = self.block_at(first, num_pages)
        if (num_pages and number is None) or not self.reserve(request):
            return False
        if num_pages and number is not None:
            self.memory.retain([number])
            self._held[request].blocks = {num_pages: _Block(number, 0)}
        return True

    def block_at(self, request: Request, num_pages: int) -> int | None:
        """The block after `num_pages` of a request's pages; None: there is none."""
        held = self._held.get(request)
        own = None if held is None else held.blocks.get(num_pages)
        if own is not None and own.end <= request.num_computed:
            return own.number
        node = self._node_at(request, num_pages)
        return None if node is None or self._index is None else self._index.piece_of(node)

    def adopt(
        self, request: Request, num_pages: int, lent: Sequence[int] | None = None
    ) -> list[int]:
        held = self._held[request]
        if lent is None:
            blocks = self._allocate(request, 1)
        else:
            blocks = list(lent)
            self._reserve_more(-len(blocks))
        self.memory.release(held.pieces)
        held.blocks = {num_pages: _Block(blocks[0], 0)}
        held.keeps.add(num_pages)
        return blocks

    def _allocate(self, request: Request, count: int) -> list[int]:
        # Blocks are written whole, so none is zeroed for a request of another namespace.
        return self.memory.allocate(count)

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

    def _hold_for(self, request: Request) -> _Held:
        return self._held.setdefault(request, _Held())

    def _most_of(self, request: Request) -> Reserved:
        return Reserved(BLOCKS_OF_REQUEST, BLOCKS_OF_REQUEST)

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self, rows: Callable[[], StepRows], made: StepStates) -> None:
        """Gives the step's requests the blocks that it writes."""
        slots, (requests, starts, are_late), verifies, chunks = rows()
        size, writes = self._page_size, list[tuple[int, int, int]]()
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
        written = np.array(writes, np.int64).reshape(-1, 3).T
        made.states = StateRows(known[0], known[1], written, num_few, self._table[slots])

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
                if not self._reserve_more(1):
                    continue
                held.spare.add(border)
                held.reserved = held.reserved.plus(_ONE)
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
        """Keeps blocks, and releases those that no further step begins with."""
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
                    held.reserved = held.reserved.plus(_ONE, -1)
                    self._reserve_more(-1)

    def _keep(self, request: Request, border: int, block: _Block) -> None:
        if self._index is None or block is _ZEROS:
            return
        node = self._node_at(request, border)
        if node is not None and self._index.add(node, block.number):
            for on_kept in self.on_kept:
                on_kept(node, block.number, request.priority, block.end > 0)

    # -- ends ------------------------------------------------------------------------------------

    def drop(self, request: Request, newest_step: int) -> None:
        """Keeps the last certain block of the request."""
        if request in self._held:
            self.committed(request)
            held = self._held[request]
            newest = held.written(request.num_computed)
            self._keep(request, newest, held.blocks[newest])
        super().drop(request, newest_step)
