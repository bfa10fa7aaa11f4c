"""The filler's record of a lease, and the interface to the source of its pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from weft.contract.handle import FillTimings, KvHandle, NixlTargetInfo, SharedTargetInfo
from weft.pages.transfer.chunks import LeaseTerm, ShipChunk
from weft.pages.transfer.lanes import Target


class LeaseState(Enum):
    """State of a lease at the filler. Answers to queries use the values."""

    ACTIVE = "active"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FENCE_NEEDED = "fence_needed"


class FillJob(Protocol):
    """The source of a lease's pages: a prompt being computed, or pages that a store holds."""

    num_computed: int
    """Position before which the KV exists in `pages`."""
    num_cached_tokens: int
    digests: Sequence[int] | None
    """Digests of `pages` if the source keeps them; None: shipping computes them."""

    @property
    def lease_id(self) -> bytes: ...

    @property
    def pages(self) -> list[int]:
        """Page i holds positions from i * page_size on. Pages before the lease's start are
        unused.
        """
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens from position 0 to the end of the range that will be written."""
        ...


class Jobs(Protocol):
    """Source of a filler's jobs (the engine, or a store)."""

    def why_not(self, handle: KvHandle) -> tuple[str, str]:
        """(reason, message) to decline a well-formed handle, or two empty strings."""
        ...

    def begin(self, handle: KvHandle, request_id: str, traceparent: str) -> FillJob:
        """Creates a job. `Filler.on_progress` is to be called as its pages become ready."""
        ...

    def waits_s(self, job: FillJob) -> tuple[float, float]:
        """Seconds from its begin until a job was admitted, and until its first step was planned;
        (0, 0): it did not wait.
        """
        ...

    def end(self, job: FillJob) -> None:
        """Ends a job whose pages are no longer wanted. Chunks under way keep references."""
        ...


class PieceSource(Protocol):
    """Source of the pages that follow a lease's pages of KV: they carry pieces of companions, such
    as states of recurrent layers or pages of a window group.
    """

    def num_pages_of(self, handle: KvHandle) -> int:
        """Number of such pages in a handle's request; 0: it requests none."""
        ...

    def pack(self, job: FillJob, end_token: int) -> list[int] | None:
        """The pages that follow a job's tokens, which the caller releases; None: there is no room
        for them.
        """
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Lease:
    """One fill that this engine has accepted."""

    handle: KvHandle
    stream: int
    job: FillJob | None
    end_token: int
    """End of the accepted range."""
    timings: FillTimings
    term: LeaseTerm
    sign_of_life_at: float
    target: Target | None
    """Where the pages are written; None: they are sent as `data`."""
    is_opening: bool = False
    """Whether it is not known yet if `target` can be reached. Nothing is shipped before."""
    state: LeaseState = LeaseState.ACTIVE
    next_token: int
    """End of the pages that are queued for shipping or shipped."""
    next_chunk: int = 0
    companion_pages: list[int] = field(default_factory=list)
    """Pages from `PieceSource.pack`, shipped after the others."""
    shipping: dict[int, ShipChunk] = field(default_factory=dict)
    early: deque[ShipChunk] = field(default_factory=deque)
    """Chunks after `next_token` that are read early: steps under way compute their pages."""
    held: deque[ShipChunk] = field(default_factory=deque)
    """Chunks of `shipping` that wait until the stream has taken the earlier ones."""
    num_announced: int = 0
    """Number of chunks whose digests were sent."""
    num_said: int = 0
    """Number of events given to the stream."""
    num_taken: int = 0
    """Number of these events that the stream has passed on."""
    said_with_chunk: int = 0
    """`num_said` at the end of the last chunk."""
    needs_fence: bool = False
    is_stranded: bool = False
    """Whether its source pages stay referenced for the life of this process."""
    failure: str = ""

    @property
    def is_copied(self) -> bool:
        """Whether this process's threads copy the pages, into messages or into shared memory."""
        target = self.target
        is_shared = isinstance(target, SharedTargetInfo) and target.memory_type == "DRAM"
        return target is None or is_shared

    @property
    def transport(self) -> str:
        """Name of the transport, as in events."""
        if self.target is None:
            return "data"
        return "nixl" if isinstance(self.target, NixlTargetInfo) else "shared"
