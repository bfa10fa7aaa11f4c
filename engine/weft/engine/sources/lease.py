"""A lease at its filler, where its pages come from, and what moves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from weft.engine.base.clock import Clock
from weft.engine.protocol.handle import FillTimings, KvHandle, NixlTargetInfo

RAN_OUT = "the lease ran out"


class LeaseState(Enum):
    """State of a lease at the filler; the values are what a query answers."""

    ACTIVE = "active"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FENCE_NEEDED = "fence_needed"


class LeaseTerm:
    """Validity of a lease for writes. The engine renews it, the shipping thread checks it.

    Args:
        lease_s: From now and from each renewal, in seconds.
        clock: Monotonic seconds of the filler, which go on while its process is stopped.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self.expires_at = 0.0
        """Expiry on the filler's clock."""
        self.renew()

    def renew(self) -> None:
        """Starts the term anew."""
        self.expires_at = self._clock() + self._lease_s

    @property
    def is_over(self) -> bool:
        """Whether the term is over: nothing may be posted any more."""
        return self._clock() >= self.expires_at


@dataclass(frozen=True, slots=True)
class ShipChunk:
    """A chunk to ship: local pages to the owner's pages."""

    lease_id: bytes
    index: int
    start_token: int
    end_token: int
    local_pages: list[int]
    remote_pages: list[int]
    digests: list[int] | None
    """Digests of the pages, where known."""
    target: NixlTargetInfo | None
    owner_id: str
    owner_epoch: int
    term: LeaseTerm
    """Term of the lease: nothing of the chunk is posted once it is over."""


@dataclass(slots=True)
class ShipResult:
    """Outcome of shipping a chunk."""

    lease_id: bytes
    index: int
    digests: list[int] = field(default_factory=list)
    posted_at: float = 0.0
    completed_at: float = 0.0
    error: str = ""
    needs_fence: bool = False
    """Failed; the agent is destroyed, but writes that the network took can still arrive."""
    is_stranded: bool = False
    """Failed, and the agent lives on: NIXL may go on reading the pages."""


class FillJob(Protocol):
    """The source of a lease's pages: a prompt being computed, or pages that a store holds."""

    lease_id: bytes
    tokens: list[int]
    """Tokens at positions [0, end of what will be written)."""
    pages: list[int]
    """Page i holds positions from i * page_size on; pages before the lease's start are unused."""
    num_computed: int
    """Position before which the KV exists in `pages`."""
    num_cached_tokens: int
    digests: Sequence[int] | None
    """Digests of `pages` if they are kept; None: computed when the pages are shipped."""


class Jobs(Protocol):
    """Source of a filler's jobs (the engine, or a store)."""

    def why_not(self, handle: KvHandle) -> tuple[str, str]:
        """(reason, message) to decline a well-formed handle, or two empty strings."""
        ...

    def begin(self, handle: KvHandle, request_id: str, traceparent: str) -> FillJob:
        """Creates a job; `Filler.on_progress` is to be called as its pages become ready."""
        ...

    def queued_s(self, job: FillJob) -> float:
        """Seconds that a job waited before it was worked on."""
        ...

    def end(self, job: FillJob) -> None:
        """Ends a job, whose pages are not wanted any more; chunks under way keep references."""
        ...


class Shipper(Protocol):
    """Moves chunks off the step (`weft.engine.transfer.ship`)."""

    def prepare(self, owner: tuple[str, int], target: NixlTargetInfo) -> None:
        """Connects to this owner (id, epoch), to which writes will follow."""
        ...

    def ship(self, chunk: ShipChunk) -> None:
        """Queues a chunk; its pages stay referenced until the result."""
        ...

    def stop(self, lease_id: bytes) -> None:
        """Stops posting for a lease; queued chunks are returned with an error."""
        ...

    def forget(self, lease_id: bytes) -> None:
        """Forgets a closed lease, none of whose chunks is queued or posted."""
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
    transport: str
    state: LeaseState = LeaseState.ACTIVE
    next_token: int
    """End of what is queued for shipping or shipped."""
    next_chunk: int = 0
    shipping: dict[int, ShipChunk] = field(default_factory=dict)
    held: deque[ShipChunk] = field(default_factory=deque)
    """Chunks of `shipping` that wait until the stream has taken the ones before."""
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
