"""Companions: what lies beside the pages of the first group, and without which a request cannot
continue there, such as states of recurrent layers or pages of a window group.

A companion's pieces are numbered and counted as pages are. A request holds the pieces that its
steps read and write; a cached page may keep a piece for later requests, which can be evicted alone.

Admission reserves the most pieces that a request may hold. So a request never lacks one, and only
the first group's pages decide who is preempted. `lend`, `hold` and `give_back` reserve pieces that
belong to no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from weft.contract.arrays import BoolArray, Int64Array
from weft.contract.reports import LoadReport
from weft.engine.base.config import EngineConfig
from weft.engine.base.state_rows import StateRows
from weft.engine.requests.request import Request
from weft.pages.memory.companion_index import CompanionIndex
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Match, Node, PrefixTree


class Reserved(NamedTuple):
    """Most pieces that requests may have at once."""

    beside_prompts: int = 0
    """Pieces for everything but the prompt tokens of two steps."""
    total: int = 0
    """Pieces if none of them were freed."""

    def plus(self, other: Reserved, sign: int = 1) -> Reserved:
        """The sum, or with sign -1 the difference."""
        return Reserved(
            self.beside_prompts + sign * other.beside_prompts, self.total + sign * other.total
        )


NOTHING = Reserved()


@dataclass(slots=True)
class HeldPieces(ABC):
    """What a request has of a companion."""

    reserved: Reserved = NOTHING

    @property
    @abstractmethod
    def pieces(self) -> list[int]:
        """The pieces to which the request has a reference each."""


class DecodeRows(NamedTuple):
    """Requests of a step that have one row each."""

    requests: Sequence[Request]
    starts: Int64Array
    """[len(requests)]: positions of the rows; the largest possible ones of those that are late."""
    are_late: BoolArray | None = None
    """[len(requests)]: whether only the device knows the position; None: it is known of all."""


class StepRows(NamedTuple):
    """The requests of a step that is about to begin."""

    slots: Int64Array
    """[R], of all requests in the step's order: decodes, verifies, chunks."""
    decodes: DecodeRows
    verifies: Sequence[tuple[Request, int, bool]]
    """Requests whose rows are verified: position after their first row, and whether only the device
    knows it, of which this is then the largest possible one.
    """
    chunks: Sequence[tuple[Request, int, int]]
    """Pieces of prompts: their first positions and numbers of tokens."""


class StepStates(Protocol):
    """The part of a step's input that companions fill in."""

    states: StateRows | None


class Companion(ABC):
    """Gives requests the pieces of one kind, and keeps some for later requests.

    Args:
        memory: The owner of pieces, which counts and evicts them as it does pages.
        index: Its index; None: nothing is cached.
        num_spare: Pieces for everything but the prompt tokens of two steps.
    """

    name: ClassVar[str]
    allows_rerun: ClassVar[bool]
    """Whether a request may take cached pages after the border where it continues, and compute
    their tokens again for this companion alone.
    """
    needs_many: ClassVar[bool]
    """Whether a request may need several pieces to continue."""
    has_last_rows: ClassVar[bool] = False
    """Whether a piece has the data of the last row before its border, so that steps which need it
    do not compute that row again.
    """

    def __init__(
        self, memory: PageMemory, index: CompanionIndex | None, page_size: int, num_spare: int
    ) -> None:
        self.memory = memory
        self._index = index
        self._page_size = page_size
        self._num_spare = num_spare
        self._held: dict[Request, Any] = {}
        """`HeldPieces` of the companion's own class."""
        self._reserved = NOTHING
        self._returning: deque[tuple[int, HeldPieces]] = deque()
        self.on_kept: list[Callable[[Node, int, int, bool], None]] = []
        """Called with each piece that is kept at another time than when its page is published: the
        node beside which it lies, the piece, the priority of its request, and whether a step here
        wrote it.
        """
        self.on_given_up: Callable[[Evicted], None] = lambda evicted: None
        """Called with each kept piece that is evicted, while its bytes are still there."""
        memory.on_reclaimed = lambda evicted: self.on_given_up(evicted)
        if index is not None:
            index.on_lost = self._lost

    @classmethod
    @abstractmethod
    def make(
        cls,
        declared: Any,
        config: EngineConfig,
        num_pieces: int,
        prefixes: PrefixTree | None,
        tables: Iterator[PageTable],
    ) -> Self:
        """Creates the companion that a layout declares.

        Args:
            declared: Its entry in `CacheLayout.companions`.
            num_pieces: The null piece included.
            prefixes: Index of the first group's pages; None: nothing is cached.
            tables: Page tables of the page groups after the first. A companion that is such a group
                takes the next one.
        """

    def __len__(self) -> int:
        """Number of requests that have pieces or a reservation."""
        return len(self._held)

    @abstractmethod
    def report(self, load: LoadReport) -> None:
        """Enters counts of pieces into an engine's load."""

    def watch(
        self, on_reached: Callable[[bytes, bytes], None], on_unreached: Callable[[bytes], None]
    ) -> bool:
        """Whether pages of the first group save a request anything only where this companion has
        pieces. It then calls `on_reached` with the key of each page that does, and the key of the
        page before it, and `on_unreached` with the key of each that no longer does.
        """
        return False

    # -- lookups ---------------------------------------------------------------------------------

    def continuable(self, path: Sequence[Node], num_pages: int) -> int:
        """The most leading pages of a path, up to `num_pages`, after which a request can continue
        as far as this companion is concerned.
        """
        return 0 if self._index is None else self._index.continuable(path, num_pages)

    @abstractmethod
    def first_needed(self, num_pages: int) -> int:
        """The first page whose piece a request needs to continue after `num_pages` pages. It needs
        those of all later pages too.
        """

    def num_needed(self, first_token: int, end_token: int) -> int:
        """Number of pieces from `first_token` on that a request needs to continue at `end_token`.
        Both are page borders.
        """
        end = end_token // self._page_size
        return max(0, end - max(first_token // self._page_size, self.first_needed(end)))

    @abstractmethod
    def take(self, request: Request, found: Match) -> None:
        """Gives a request the pieces with which it continues after a match."""

    @abstractmethod
    def share(self, first: Request, request: Request, num_pages: int) -> bool:
        """Lets a request continue after `num_pages` pages of another one. False: the pieces are
        gone, or there is no room for the request.
        """

    @abstractmethod
    def last_pieces(self, request: Request, num_pages: int, count: int) -> list[int] | None:
        """The last `count` pieces, in their order, that something needs to continue after the first
        `num_pages` pages of a request. None: they are gone.
        """

    def note_hit(self, request: Request) -> None:  # noqa: B027
        """Notes that a request was admitted with what `take` gave it."""

    def note_follower(self, leader: Request, follower: Request) -> None:  # noqa: B027
        """Notes that two prompts part, of which `leader` is computed first."""

    @abstractmethod
    def adopt(
        self, request: Request, num_pages: int, lent: Sequence[int] | None = None
    ) -> list[int]:
        """Gives an admitted request, whose first `num_pages` pages were computed elsewhere and are
        published, the pieces that it lacks to continue after them. `committed` must follow once
        they are written.

        Args:
            lent: These pieces, from `lend`, already written; None: new ones, which the caller
                writes.
        """

    def lend(self, request: Request, num_pages: int) -> list[int] | None:
        """New pieces that something other than a step writes, so that the admitted request can
        continue after `num_pages` pages; for `adopt` or `give_back`. None: running requests need
        all of the room.
        """
        count = self.num_needed(request.num_computed, num_pages * self._page_size)
        return self._allocate(request, count) if self._reserve_more(count) else None

    def hold(self, piece: int) -> bool:
        """Keeps a cached piece from being evicted until `give_back`, so that it can be copied.
        Returns False, and does nothing, if running requests need all of the room.
        """
        if not self._reserve_more(1):
            return False
        self.memory.retain([piece])
        return True

    def give_back(self, pieces: Sequence[int]) -> None:
        """Ends `lend` or `hold`."""
        self._reserve_more(-len(pieces))
        self.memory.release(pieces)

    def kept_of(self, request: Request, first: int, end: int) -> list[tuple[Node, int]]:
        """The kept pieces beside the request's published pages [first, end), and their nodes, the
        last one first.
        """
        if self._index is None:
            return []
        found: list[tuple[Node, int]] = []
        node = self._node_at(request, end)
        for _ in range(first, end):
            if node is None or node.parent is None:
                break
            if (piece := self._index.piece_of(node)) is not None:
                found.append((node, piece))
            node = node.parent
        return found

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

    def _allocate(self, request: Request, count: int) -> list[int]:
        return self.memory.allocate(count, request.namespace)

    def _lost(self, piece: int, node: Node) -> None:
        assert node.parent is not None
        self.on_given_up(Evicted(piece, node.key, node.parent.key))
        self.memory.forget(piece)

    # -- room ------------------------------------------------------------------------------------

    def has_room(self, request: Request, *, soon: bool = False) -> bool:
        """Whether the request is or can be admitted; with `soon`, once steps under way
        have ended.
        """
        held: HeldPieces | None = self._held.get(request)
        if held is not None and held.reserved != NOTHING:
            return True
        wanted = self._reserved.plus(self._most_of(request))
        if soon:
            for _, returning in self._returning:
                wanted = wanted.plus(returning.reserved, -1)
        return self._fits(wanted)

    def reserve(self, request: Request) -> bool:
        """Reserves the most pieces that the request may have; False: there is no room for them."""
        if not self.has_room(request):
            return False
        held = self._hold_for(request)
        if held.reserved == NOTHING:
            held.reserved = self._most_of(request)
            self._reserved = self._reserved.plus(held.reserved)
        return True

    @abstractmethod
    def _hold_for(self, request: Request) -> HeldPieces:
        """The entry of `_held`, which is made if it is missing."""

    @abstractmethod
    def _most_of(self, request: Request) -> Reserved: ...

    def _reserve_more(self, count: int) -> bool:
        """Reserves pieces that belong to no request, or with a negative count gives them back.
        False: there is no room.
        """
        wanted = self._reserved.plus(Reserved(count, count))
        if count > 0 and not self._fits(wanted):
            return False
        self._reserved = wanted
        return True

    def _fits(self, wanted: Reserved) -> bool:
        return (
            wanted.beside_prompts <= self._num_spare or wanted.total <= self.memory.num_usable_pages
        )

    # -- steps -----------------------------------------------------------------------------------

    def grow(self, request: Request) -> None:  # noqa: B027
        """Gives a request the pieces that go with new pages of the first group."""

    def begin_step(self, rows: Callable[[], StepRows], made: StepStates) -> None:  # noqa: B027
        """Enters what a step, which is about to begin, reads and writes.

        Args:
            rows: Returns the step's requests.
            made: The step's input.
        """

    def publish(self, request: Request, num_pages: int) -> None:  # noqa: B027
        """Keeps pieces of a request whose first `num_pages` pages are published. Its cache leaf, if
        it has one, is the last of them.
        """

    def committed(self, request: Request) -> None:  # noqa: B027
        """Keeps and releases pieces after a step of the request was committed."""

    # -- ends ------------------------------------------------------------------------------------

    def drop(self, request: Request, newest_step: int) -> None:
        """Releases a request's pieces and reservation: at once or, if the request takes part in
        steps under way, when the newest of these has ended.
        """
        held: HeldPieces | None = self._held.pop(request, None)
        if held is None:
            return
        if request.num_launched:
            self._returning.append((newest_step, held))
        else:
            self._release(held)

    def end_step(self, number: int) -> None:
        while self._returning and self._returning[0][0] <= number:
            self._release(self._returning.popleft()[1])

    def _release(self, held: HeldPieces) -> None:
        self.memory.release(held.pieces)
        self._reserved = self._reserved.plus(held.reserved, -1)
