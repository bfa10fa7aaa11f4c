"""Blocks of recurrent layers and window pages in tiers, which accompany pages of the first group.

A block lies in a tier next to the page that it follows: in as many pages as it needs, each under a
separate key (`weft.contract.keys.block_keys`) and with a separate digest. Pages count for a request
only up to a border whose whole block tiers hold.

A page of a window group lies next to the page of the first group with the same tokens, in the same
way. Pages count up to a border before which tiers hold all window pages that the request lacks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.contract.keys import block_keys
from weft.engine.requests.request import Request
from weft.engine.requests.state_blocks import StateBlocks
from weft.engine.requests.window_pages import WindowPages
from weft.engine.sources.tiers.loads import TierRun
from weft.pages.memory.prefix_cache import Evicted
from weft.pages.memory.tree import Node
from weft.pages.tiers.keyed import PageName
from weft.pages.tiers.tier import Tier
from weft.pages.transfer.page_pool import PagePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion(ABC):
    """A model's blocks or window pages, as tiers use them in addition to pages of the first group.
    Each is a piece, and pieces have numbers.
    """

    owner: StateBlocks | WindowPages
    """The owner of the pool's pieces."""
    num_pages: int
    """Pages of a tier that a piece takes."""
    make_pool: Callable[[], PagePool]
    """Creates access to pieces for one thread. Page i of piece p is number p * num_pages + i."""
    num_continuable_pages: Callable[[Request, int], int]
    """Returns how many of a request's first n pages are in the pool and can be continued."""

    @abstractmethod
    def watch(
        self,
        on_given_up: Callable[[Evicted], None],
        on_kept: Callable[[Node, int, int, bool], None] | None,
    ) -> None:
        """`on_given_up` is called with each piece that the pool evicts, and `on_kept`, if given,
        with pieces that are kept at other times than pages are published.
        """

    @abstractmethod
    def find(
        self, runs: list[TierRun], keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
    ) -> tuple[list[TierRun], FoundBlock | None]:
        """Cuts pages that tiers hold to those after which a request can continue.

        Args:
            runs: The pages, which follow the pool's.
            keys: Page keys of the prompt, as far as pool and tiers hold it.
            first: The border that the request has reached, in pages; nothing before it helps.
            tiers: The nearest one first.
        """

    def kept_of(self, request: Request, first: int, end: int) -> Sequence[tuple[Node, int]]:
        """The cached pieces of a request's published pages [first, end), and their nodes."""
        return self.owner.kept_of(request, first, end)

    def hold(self, piece: int) -> bool:
        """Keeps a piece from being evicted until `give_back`; False: there is no room for that."""
        return self.owner.hold(piece)

    @abstractmethod
    def lend(self, request: Request, border: int) -> list[int] | None:
        """New pieces, with which a request can continue at a border; None: there is no room."""

    @abstractmethod
    def give_back(self, pieces: Sequence[int]) -> None:
        """Ends `hold` or `lend`."""

    @abstractmethod
    def adopt(self, request: Request, border: int, pieces: Sequence[int]) -> None:
        """Gives a request, which has published its pages up to a border, the pieces that `lend`
        returned.
        """


def pages_of(beside: Companion, piece: int) -> range:
    return range(piece * beside.num_pages, (piece + 1) * beside.num_pages)


def names_of(beside: Companion, key: bytes) -> list[PageName]:
    """Names of the pages that hold the piece at page `key`, in order. The parent of the first one
    is that page; the parent of each further one is the page before it.
    """
    keys = block_keys(key, beside.num_pages)
    return [PageName(*pair) for pair in zip(keys, [key, *keys[:-1]], strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAccess(Companion):
    owner: StateBlocks

    def watch(
        self,
        on_given_up: Callable[[Evicted], None],
        on_kept: Callable[[Node, int, int, bool], None] | None,
    ) -> None:
        self.owner.on_given_up = on_given_up
        if on_kept is not None:
            self.owner.on_kept.append(on_kept)

    def find(
        self, runs: list[TierRun], keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
    ) -> tuple[list[TierRun], FoundBlock | None]:
        for border in range(len(keys), first, -1):
            found = _held_at(keys[border - 1], self.num_pages, tiers)
            if found is not None:
                return _cut(runs, border), FoundBlock(border, *found)
        return [], None

    def lend(self, request: Request, border: int) -> list[int] | None:
        block = self.owner.lend()
        return None if block is None else [block]

    def give_back(self, pieces: Sequence[int]) -> None:
        for block in pieces:
            self.owner.give_back(block)

    def adopt(self, request: Request, border: int, pieces: Sequence[int]) -> None:
        self.owner.adopt(request, border, pieces[0])
        self.owner.committed(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAccess(Companion):
    """`Companion` for a model with a window group."""

    owner: WindowPages

    def watch(
        self,
        on_given_up: Callable[[Evicted], None],
        on_kept: Callable[[Node, int, int, bool], None] | None,
    ) -> None:
        self.owner.on_given_up = on_given_up

    def find(
        self, runs: list[TierRun], keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
    ) -> tuple[list[TierRun], FoundBlock | None]:
        found: list[tuple[list[bytes], list[Tier]]] = []
        border = index = len(keys)
        while index > max(first, self.owner.first_needed(border)):
            index -= 1
            own = _held_at(keys[index], self.num_pages, tiers)
            if own is None:
                border, found = index, []
            else:
                found.append(own)
        if border <= first:
            return [], None
        names = [key for own, _ in reversed(found) for key in own]
        holders = [tier for _, own in reversed(found) for tier in own]
        return _cut(runs, border), FoundBlock(border, names, holders)

    def lend(self, request: Request, border: int) -> list[int] | None:
        return self.owner.lend(request, border)

    def give_back(self, pieces: Sequence[int]) -> None:
        self.owner.give_back(pieces)

    def adopt(self, request: Request, border: int, pieces: Sequence[int]) -> None:
        self.owner.adopt(request, border, pieces)


def _held_at(
    key: bytes, num_pages: int, tiers: Sequence[Tier]
) -> tuple[list[bytes], list[Tier]] | None:
    """Keys of the pages of the piece at page `key`, and the tier of each; None: one is missing."""
    (start,) = block_keys(key, 1)
    if not any(tier.pages.has(start) for tier in tiers):
        return None
    names = block_keys(key, num_pages)
    holders = [next((t for t in tiers if t.pages.has(name)), None) for name in names]
    found = [tier for tier in holders if tier is not None]
    return (names, found) if len(found) == len(names) else None


def _cut(runs: list[TierRun], border: int) -> list[TierRun]:
    return [
        run._replace(end_page=min(run.end_page, border)) for run in runs if run.first_page < border
    ]


class FoundBlock(NamedTuple):
    """The pieces that tiers hold and with which a request can continue at a border."""

    border: int
    """Number of pages of the prompt before the border."""
    keys: list[bytes]
    tiers: list[Tier]

    def runs(self) -> list[TierRun]:
        """The pieces' pages, counted from 0, by tier."""
        runs: list[TierRun] = []
        for index, tier in enumerate(self.tiers):
            if runs and runs[-1].tier is tier:
                runs[-1] = runs[-1]._replace(end_page=index + 1)
            else:
                runs.append(TierRun(tier, index, index + 1))
        return runs
