"""Loads: pages of one request on their way from a tier to the pool, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.contract.pages import Page
from weft.contract.timeline import FillRecord
from weft.engine.requests.request import Request
from weft.pages.tiers.tier import PageLoad, PageSave, Tier
from weft.pages.transfer.page_pool import PagePool


class TierRun(NamedTuple):
    """Consecutive pages of a prompt that one tier holds."""

    tier: Tier
    first_page: int
    end_page: int

    @property
    def num_pages(self) -> int:
        return self.end_page - self.first_page

    @property
    def indices(self) -> range:
        return range(self.first_page, self.end_page)


@dataclass(slots=True, kw_only=True)
class PieceLoad:
    """The pieces of companions that are loaded for a request with its pages."""

    pieces: list[list[int]]
    """For each companion, the pool's pieces, lent for the load."""
    border: int
    """Where the request continues, in pages."""
    num_missing: int
    """Number of the pieces' pages that have still to come."""
    pages: list[int] = field(default_factory=list)
    """Loaded pages of the first group. The request gets them once all pieces are there."""
    num_fenced: int = 0
    """Chunks of the pieces that were under way when the load was abandoned."""


@dataclass(eq=False, slots=True)
class TierLoad:
    """The pages that tiers load for one request. It outlives the request while bytes move."""

    request: Request | None
    pages: list[int]
    """Destinations not yet accepted, in order."""
    last_progress_at: float
    """Time on the engine's clock."""
    chunks: list[LoadChunk] = field(default_factory=list)
    """Chunks not yet finished, in order."""
    is_stopped: bool = False
    """Whether to skip chunks that have not begun. Either thread sets it."""
    pieces: PieceLoad | None = None
    """Pieces that the request also needs; None: it needs none."""


@dataclass(eq=False, slots=True)
class LoadChunk:
    """Implements `BackgroundJob`: some pages of a load, from one tier."""

    load: TierLoad
    tier: Tier
    loads: list[PageLoad]
    pages: list[int]
    record: FillRecord
    """Record of the chunk's run in the request's timeline."""
    pool: PagePool
    ended: Callable[[LoadChunk], None]
    is_of_piece: bool = False
    """Whether these are pages of pieces instead of the first group."""
    is_begun: bool = False
    """Whether the thread may write to the chunk's pages. The thread sets it before it checks
    whether the load is stopped.
    """
    is_fenced: bool = False
    """Whether the load was abandoned while the chunk was under way. The chunk's pages are then in
    quarantine until it ends.
    """
    num_good: int = 0
    """Number of leading pages that are in the pool."""
    duration_s: float = 0.0

    def run(self) -> None:
        started_at = time.monotonic()
        self.is_begun = True
        try:
            self.num_good = self._load()
        except Exception:
            # Later pages are useless without the missing ones, which are not loaded again.
            self.load.is_stopped = True
            for load in self.loads:
                load.outcome = "failed"
            raise
        finally:
            self.duration_s = time.monotonic() - started_at

    def _load(self) -> int:
        rows = [row for load in self.loads if (row := load.direct()) is not None]
        if len(rows) == len(self.loads):
            return self._copy_in(rows)
        num_good = 0
        for index, (load, page) in enumerate(zip(self.loads, self.pages, strict=True)):
            if self.load.is_stopped:
                break
            if not load.run(self.pool.target(index, page)):
                self.load.is_stopped = True
                break
            num_good += 1
        if num_good:
            self.pool.commit(self.pages[:num_good])
        return num_good

    def _copy_in(self, rows: Sequence[Page]) -> int:
        """Returns the number of correct leading pages."""
        if self.load.is_stopped:
            return 0
        digests = self.pool.copy_in(rows, self.pages)
        num_good = 0
        for load, digest in zip(self.loads, digests, strict=True):
            if not load.arrived(digest):
                self.load.is_stopped = True
                break
            num_good += 1
        return num_good

    def end(self) -> None:
        for load in self.loads:
            load.end()
        self.ended(self)


@dataclass(eq=False, slots=True)
class FetchMove:
    """Implements `BackgroundJob`: one page of a request that waits, from disk to host memory."""

    request: Request
    is_wanted: Callable[[Request], bool]
    load: PageLoad
    save: PageSave
    into: Page
    """Destination in host memory."""

    def run(self) -> None:
        if self.is_wanted(self.request) and self.load.run(self.into):
            self.save.arrived(self.load.place.digest)

    def end(self) -> None:
        self.load.end()
        self.save.end()


def chunked(run: TierRun, chunk_pages: int) -> list[TierRun]:
    return [
        TierRun(run.tier, first, min(first + chunk_pages, run.end_page))
        for first in range(run.first_page, run.end_page, chunk_pages)
    ]
