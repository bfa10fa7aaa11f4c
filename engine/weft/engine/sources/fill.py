"""The owner's record of one lease, and the interfaces that `OwnerFills` depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from weft.contract.handle import (
    DATA_CHUNK_BYTES,
    FillEvent,
    NixlTargetInfo,
    SharedTargetInfo,
)
from weft.contract.keys import PieceShape
from weft.contract.spans import MediaSpan
from weft.contract.timeline import FillCandidate, FillRecord
from weft.engine.requests.request import Request
from weft.engine.transfer.page_port import PagePort
from weft.engine.transfer.staging import StagingArea
from weft.pages.marks import WorkMark


class FillState(Enum):
    STARTING = "starting"
    ACTIVE = "active"
    STOPPING = "stopping"
    ACCEPTED = "accepted"
    """All pages are accepted, and the request continues. No more bytes can arrive; the owner waits
    only for the filler's measurements.
    """


class OwnerTransport(Protocol):
    @property
    def target(self) -> NixlTargetInfo | None:
        """Where fillers write over NIXL; None: it is not offered. Changes with `fence`."""
        ...

    @property
    def shared(self) -> SharedTargetInfo | None:
        """Where fillers on this host get the memory to write into; None: it is not offered."""
        ...

    @property
    def staging(self) -> StagingArea | None:
        """The area that peers write to instead of the pool; None: they write into the pool."""
        ...

    @property
    def port(self) -> PagePort: ...

    def fence(self) -> None:
        """Cuts every connection into the pool, so that nothing sent before can arrive."""
        ...


class PiecePacker(Protocol):
    """Carries in pages what a request needs of the model's companions. In a lease such pages follow
    its pages of KV.
    """

    @property
    def num_pages(self) -> int:
        """Most such pages of a lease."""
        ...

    def num_pages_of(self, request: Request, end_token: int, *, is_stored: bool) -> int:
        """Such pages of a request's lease up to `end_token`. A KV store has them as they
        were put.
        """
        ...

    def tail_spans(self, request: Request, end_token: int) -> list[MediaSpan]:
        """Media whose rows a lease up to `end_token` asks for, among such pages."""
        ...

    def lacks_rows(self, request: Request) -> bool:
        """Whether the request needs rows of media after its last page which nobody has sent."""
        ...

    @property
    def shape(self) -> PieceShape: ...

    def unpack(
        self, request: Request, pages: list[int], end_token: int, *, is_stored: bool
    ) -> None:
        """Gives a request, which has its tokens up to `end_token`, the content of these pages."""
        ...


@dataclass(slots=True)
class Chunk:
    """State of one chunk. Its notification and its digests come in any order; the owner verifies
    the chunk when it has both.
    """

    start_token: int = 0
    end_token: int = 0
    digests: list[int] | None = None
    bytes_arrived: int = 0
    is_notified: bool = False
    is_told: bool = False
    """Whether the filler's event has come. The notification may have carried the same facts
    before.
    """
    is_verifying: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Fill:
    """One lease. It outlives its request while writes or a last event can still arrive."""

    lease_id: bytes
    request: Request | None
    candidate: FillCandidate
    start_token: int
    end_token: int
    pages: list[int]
    """The pool's pages of [accepted_token, end_token); empty once it is STOPPING."""
    landed: list[int]
    """Pages that the filler writes to: the pool's pages, or staging pages."""
    record: FillRecord
    uses_nixl: bool
    """Whether the filler writes over NIXL, or may do so as long as it has not accepted."""
    accepted_token: int
    """End of the accepted range [start_token, accepted_token)."""
    is_shared: bool = False
    """Whether the filler writes into memory that it has mapped. Its word follows the bytes."""
    num_companion_pages: int = 0
    """Pages after `end_token` for `PiecePacker`; protocol and chunks count them as positions."""
    companion_pages: list[int] = field(default_factory=list)
    """The accepted pages among those after `end_token`."""
    state: FillState = FillState.STARTING
    chunks: dict[int, Chunk] = field(default_factory=dict)
    next_chunk: int = 0
    """Number of the first chunk not yet accepted."""
    last_progress_at: float = 0.0
    renew_at: float = 0.0
    query_at: float = 0.0
    silent_since: float = 0.0
    """While STOPPING: time by which the filler should have answered."""
    is_proven: bool = False
    """Whether the filler has stopped. Bytes that its network has taken may still arrive."""
    is_done: bool = False
    after: WorkMark | None = None
    """Mark after which earlier uses of the pages are over; taken when the fill is accepted."""

    def chunk(self, index: int) -> Chunk:
        return self.chunks.setdefault(index, Chunk())

    def last_token(self, page_size: int) -> int:
        """End of all pages of the lease, as positions."""
        return self.end_token + self.num_companion_pages * page_size

    @property
    def awaits_arrival(self) -> bool:
        """Whether the next chunk has its digests and lacks only a notification."""
        if self.state is not FillState.ACTIVE or not self.uses_nixl:
            return False
        chunk = self.chunks.get(self.next_chunk)
        return chunk is not None and chunk.digests is not None and not chunk.is_notified

    def note_repeat(self, event: FillEvent) -> bool:
        """Accepts an event that repeats the facts of a notification; False: it is another event."""
        chunk = self.chunks.get(event.chunk)
        if event.kind != "written" or chunk is None or chunk.is_told or chunk.digests is None:
            return False
        known = (chunk.start_token, chunk.end_token, chunk.digests)
        chunk.is_told = known == (event.start_token, event.end_token, event.digests)
        return chunk.is_told

    def is_owed_by(self, candidate: FillCandidate, since: float) -> bool:
        """Whether this filler incarnation's answer about the stopped lease was due
        before `since`.
        """
        who = (self.candidate.worker_id, self.candidate.epoch)
        return (
            self.state is FillState.STOPPING
            and not self.is_proven
            and self.silent_since <= since
            and who == (candidate.worker_id, candidate.epoch)
        )

    def can_be_written(self, event: FillEvent, page_size: int) -> bool:
        """Whether a report of a chunk's digests fits this lease and was not made before."""
        return (
            self.state is FillState.ACTIVE
            and self.chunk(event.chunk).digests is None
            and self.accepted_token <= event.start_token
            and event.start_token < event.end_token <= self.last_token(page_size)
            and event.start_token % page_size == event.end_token % page_size == 0
            and len(event.digests) == (event.end_token - event.start_token) // page_size
        )

    def can_be_data(self, event: FillEvent, page_size: int, page_bytes: int) -> bool:
        """Whether bytes received in a message belong to a page of this lease."""
        return (
            self.state is FillState.ACTIVE
            and not (self.uses_nixl or self.is_shared)
            and self.accepted_token <= event.start_token < self.last_token(page_size)
            and event.start_token % page_size == 0
            # Data that the server has put in their place may be of several pages.
            and (bool(event.data) or event.num_held > 0)
            and len(event.data) <= DATA_CHUNK_BYTES
            and 0 <= event.offset <= page_bytes - len(event.data)
        )


@dataclass(slots=True)
class FillCounters:
    fills_started: int = 0
    fills_done: int = 0
    fills_declined: int = 0
    fills_failed: int = 0
    fills_avoided: int = 0
    """Candidates that were skipped because they did not answer about earlier fills."""
    accepted_pages: int = 0
    accepted_bytes: int = 0
    digest_mismatches: int = 0
    stale_events: int = 0
    local_decisions: int = 0
    """Remainders that were computed here although candidates existed."""
