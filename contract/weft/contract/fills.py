"""Remote fills: commands to a prefill worker, its events and answers, and what owners send."""

from __future__ import annotations

from dataclasses import dataclass

from weft.contract.handle import FillEvent, KvHandle


@dataclass(slots=True, kw_only=True)
class FillStart:
    """An owner asks this engine to fill; events go back on `stream`."""

    stream: int
    handle: KvHandle
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class LeaseQuery:
    """Asks a filler for the state of a lease, and stops the lease."""

    query: int
    lease_id: bytes


@dataclass(slots=True, kw_only=True)
class FillerEvent:
    """An event from a filler about one of our leases, or the loss of its stream."""

    lease_id: bytes
    event: FillEvent


@dataclass(slots=True, kw_only=True)
class LeaseAnswer:
    """Answer of a filler to our query about a lease; `filler_epoch` identifies the process that
    answered."""

    lease_id: bytes
    worker_id: str
    filler_epoch: int
    state: str
    """unknown, active, stopping, stopped or fence_needed."""


@dataclass(slots=True, kw_only=True)
class ProcessExited:
    """Proof that an incarnation of a worker is gone."""

    worker_id: str
    epoch: int
    query: int


@dataclass(slots=True, kw_only=True)
class FillCommand:
    """A message that the server sends to a filler: start (with handle), renew, stop or query."""

    lease_id: bytes
    worker_id: str
    address: str
    kind: str
    """Kind of filler: prefill or kvstore."""
    action: str
    """start, renew, stop, query or report."""
    handle: KvHandle | None = None
    corrupt: tuple[bytes, int] | None = None
    """Key of a page to report, and the digest that the store announced for it."""
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class FillReply:
    """A filler's event for the owner on `stream`."""

    stream: int
    event: FillEvent


@dataclass(slots=True, kw_only=True)
class LeaseReply:
    """Answer to a LeaseQuery; `state` as in LeaseAnswer."""

    query: int
    state: str


@dataclass(frozen=True, slots=True)
class StagingCounts:
    """Staging pages by state; free + used + quarantined = total."""

    free: int
    used: int
    quarantined: int
    total: int
