"""A chunk on its way from a filler to the owner of its lease."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from weft.contract.clock import Clock
from weft.contract.handle import FillEvent
from weft.pages.transfer.lanes import Target
from weft.pages.transfer.nixl_wire import TransferError

RAN_OUT = "the lease ran out"
SLOT_BYTES = 16 << 20
"""Bytes of a chunk's place in the memory for outgoing data."""


class LeaseTerm:
    """Validity of a lease for writes, `lease_s` from now and from each renewal. The engine renews
    it, the shipping thread checks it. `clock` is the filler's, in monotonic seconds, and must run
    while its process is stopped.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self.expires_at = 0.0
        """Expiry on the filler's clock."""
        self.renew()

    @classmethod
    def until(cls, expires_at: float, clock: Clock) -> LeaseTerm:
        """The term that ends at `expires_at` of the clock, and is not renewed."""
        term = cls(0.0, clock)
        term.expires_at = expires_at
        return term

    def renew(self) -> None:
        self.expires_at = self._clock() + self._lease_s

    @property
    def left_s(self) -> float:
        return self.expires_at - self._clock()

    @property
    def is_over(self) -> bool:
        """Whether the term is over, so that nothing may be posted any more."""
        return self.left_s <= 0

    def check(self, owner_id: str) -> None:
        """Raises TransferError if nothing may be posted any more."""
        if self.is_over:
            raise TransferError(RAN_OUT, worker_id=owner_id)


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
    target: Target | None
    """Where it is written; None: it is sent as `data`."""
    owner_id: str
    owner_epoch: int
    term: LeaseTerm
    """Term of the lease. Nothing of the chunk is posted once it is over."""
    computed_tokens: int | None = None
    """Prompt tokens that the filler computed, in all; None: this is not the last chunk."""
    slot: int | None = None
    """Place of the chunk's data in the memory for outgoing data; None: they go in messages."""

    def report(self, digests: list[int]) -> FillEvent:
        """The event that announces the chunk to the owner."""
        return FillEvent(
            kind="written",
            chunk=self.index,
            start_token=self.start_token,
            end_token=self.end_token,
            digests=digests,
            computed_tokens=self.computed_tokens,
        )


@dataclass(frozen=True, slots=True)
class ChunkPosted:
    """A chunk's write was posted, so its digests may be sent now."""

    lease_id: bytes
    index: int
    digests: list[int]


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """The answer to `Shipper.prepare` with an owner whose memory is to be mapped."""

    owner: tuple[str, int]
    is_open: bool
    """Whether pages can be written there; False: they are sent as `data`."""


@dataclass(slots=True)
class ShipResult:
    lease_id: bytes
    index: int
    digests: list[int] = field(default_factory=list)
    digest_s: float = 0.0
    posted_at: float = 0.0
    """When the post of the write began, right after the digesting."""
    post_ended_at: float = 0.0
    completed_at: float = 0.0
    error: str = ""
    needs_fence: bool = False
    """Whether the write failed and its agent was destroyed, but bytes that the network took can
    still arrive.
    """
    is_stranded: bool = False
    """Whether the write failed and its agent could not be destroyed, so that NIXL may still read
    the pages.
    """


class Shipper(Protocol):
    """Ships chunks outside the steps (`weft.pages.transfer.ship`)."""

    @property
    def holds_data(self) -> bool:
        """Whether data may be put into memory that the server process has mapped."""
        ...

    def prepare(self, owner: tuple[str, int], target: Target) -> None:
        """Connects to an owner (id, epoch) ahead of the first write."""
        ...

    def ship(self, chunk: ShipChunk) -> None:
        """Queues a chunk. Its pages stay referenced until the result."""
        ...

    def stop(self, lease_id: bytes) -> None:
        """Stops posting for a lease. Queued chunks are returned with an error, and pages that were
        read early are dropped.
        """
        ...

    def forget(self, lease_id: bytes) -> None:
        """Forgets a closed lease, none of whose chunks is queued or posted."""
        ...
