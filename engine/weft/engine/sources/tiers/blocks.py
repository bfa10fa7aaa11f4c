"""Blocks of recurrent layers in tiers.

A block lies in a tier next to the page that it follows: in as many pages as it needs, each under a
key of its own (`weft.engine.memory.keys.block_keys`) and with its own digest. Pages count for a
request only up to a border whose whole block tiers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.engine.memory.keys import block_keys
from weft.engine.memory.prefix_cache import Evicted
from weft.engine.memory.tree import Node
from weft.engine.scheduler.state import Request
from weft.engine.sources.tiers.keyed import PageName
from weft.engine.sources.tiers.loads import TierRun
from weft.engine.sources.tiers.tier import Tier
from weft.engine.transfer.page_pool import PagePool


class KeptBlocks(Protocol):
    """The owner of the pool's blocks (`weft.engine.scheduler.state_blocks.StateBlocks`)."""

    on_kept: list[Callable[[Node, int, int, bool], None]]
    on_given_up: Callable[[Evicted], None]

    def kept_of(self, request: Request, first: int, end: int) -> Sequence[tuple[Node, int]]:
        """See `StateBlocks.kept_of`."""
        ...

    def lend(self) -> int | None:
        """See `StateBlocks.lend`."""
        ...

    def hold(self, block: int) -> bool:
        """See `StateBlocks.hold`."""
        ...

    def give_back(self, block: int) -> None:
        """See `StateBlocks.give_back`."""
        ...

    def adopt(self, request: Request, num_pages: int, block: int | None = None) -> int:
        """See `StateBlocks.adopt`."""
        ...

    def committed(self, request: Request) -> None:
        """See `StateBlocks.committed`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAccess:
    """What tiers need of a model with recurrent layers."""

    states: KeptBlocks
    """Owner of the blocks."""
    num_pages: int
    """Pages that a block takes."""
    make_pool: Callable[[], PagePool]
    """Access to blocks for one thread; page i of block b is number b * num_pages + i."""
    num_continuable_pages: Callable[[Request, int], int]
    """How many of a request's first n pages are in the pool, up to the last block."""

    def pages_of(self, block: int) -> range:
        """Numbers of a block's pages."""
        return range(block * self.num_pages, (block + 1) * self.num_pages)

    def names(self, key: bytes) -> list[PageName]:
        """Names of the pages that hold the block behind page `key`, in order. The parent of the
        first one is that page, of each other one the page before it.
        """
        keys = block_keys(key, self.num_pages)
        return [PageName(*pair) for pair in zip(keys, [key, *keys[:-1]], strict=True)]

    def find(
        self, runs: list[TierRun], keys: Sequence[bytes], first: int, tiers: Sequence[Tier]
    ) -> tuple[list[TierRun], FoundBlock | None]:
        """Cuts pages that tiers hold to those behind which a request can go on.

        Args:
            runs: The pages, behind the pool's.
            keys: Page keys of the prompt, as far as pool and tiers hold it.
            first: The border that the request has reached, in pages; nothing before it helps.
            tiers: The nearest one first.
        """
        for border in range(len(keys), first, -1):
            (start,) = block_keys(keys[border - 1], 1)
            if not any(tier.pages.has(start) for tier in tiers):
                continue
            names = block_keys(keys[border - 1], self.num_pages)
            holders = [next((t for t in tiers if t.pages.has(key)), None) for key in names]
            found = [tier for tier in holders if tier is not None]
            if len(found) == len(names):
                cut = [
                    run._replace(end_page=min(run.end_page, border))
                    for run in runs
                    if run.first_page < border
                ]
                return cut, FoundBlock(border, names, found)
        return [], None


class FoundBlock(NamedTuple):
    """A block that tiers hold."""

    border: int
    """In pages."""
    keys: list[bytes]
    """Of its pages."""
    tiers: list[Tier]
    """The tier of each."""

    def runs(self) -> list[TierRun]:
        """Its pages, counted from 0, by tier."""
        runs: list[TierRun] = []
        for index, tier in enumerate(self.tiers):
            if runs and runs[-1].tier is tier:
                runs[-1] = runs[-1]._replace(end_page=index + 1)
            else:
                runs.append(TierRun(tier, index, index + 1))
        return runs
