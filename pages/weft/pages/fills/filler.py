"""The filler's side of fills: leases, jobs, and the rules for posting writes.

A lease is used once. Its life:

    ACTIVE --all written--> DONE
      | stop, lease ran out, owner's stream broke, query
      v
    STOPPING --nothing posted is under way any more--> STOPPED

The filler posts writes only for ACTIVE leases and only within their term. It checks the term right
before each post, since the process may have been suspended since its last turn. It says `stopped`
only when no posted write can still arrive. If a posted write does not end, the filler destroys its
agent and tells the owner to close its own end too (`needs_fence`). If that fails, the lease stays
STOPPING, and the owner waits for proof that this process is gone. The filler remembers lease ids
and declines late or repeated starts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weft.contract.clock import Clock
from weft.contract.fills import FillReply, FillStart, LeaseQuery
from weft.contract.handle import (
    LEASE_ID_BYTES,
    FillEvent,
    FillTimings,
    KvHandle,
    SharedTargetInfo,
)
from weft.pages.fills.data_budget import DataBudget, DataSlots
from weft.pages.fills.lease import FillJob, Jobs, Lease, LeaseState, PieceSource
from weft.pages.marks import WorkMark
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.chunks import (
    RAN_OUT,
    ChunkPosted,
    LeaseTerm,
    PeerOpened,
    ShipChunk,
    Shipper,
    ShipResult,
)
from weft.pages.transfer.lanes import FillerLanes
from weft.pages.transfer.ship import ShipThread

logger = logging.getLogger(__name__)

MAX_REMEMBERED_LEASES = 65536
SIGN_OF_LIFE_S = 1.0
MAX_CHUNK_BYTES = 64 << 20
"""Largest write over NIXL, bytes."""
MAX_DEVICE_CHUNK_BYTES = 256 << 20
"""Largest write between devices, bytes. Over NVLink such a write takes a millisecond, about as long
as the host's work for a chunk.
"""
MAX_DATA_CHUNK_BYTES = 16 << 20
"""Largest chunk copied by this process, bytes. The next chunk of a stream is read once the stream
has taken all of it; the owner copies and checks one in shared memory while the next is copied.
"""


@dataclass(slots=True)
class FillerCounters:
    """Counters since start, part of the worker's counters."""

    leases_accepted: int = 0
    leases_declined: int = 0
    leases_done: int = 0
    leases_stopped: int = 0
    computed_tokens: int = 0
    shipped_pages: int = 0
    shipped_bytes: int = 0


class Filler:
    """All leases that this engine fills.

    Args:
        page_size: Token positions per page; None: each handle states its own.
        epoch: Incarnation of this engine.
        reply: Puts an event into the outbox.
        lanes: The transports over which it can write.
        pieces: Fills the pages that follow those of KV; None: there are none.
        max_chunk_pages: Most pages of one write; None: no limit.
        early: Reads pages of steps under way; None: pages are read once they are computed.
    """

    def __init__(
        self,
        page_size: int | None,
        epoch: int,
        page_bytes: int,
        memory: PageMemory,
        jobs: Jobs,
        shipper: Shipper,
        reply: Callable[[FillReply], None],
        clock: Clock,
        *,
        lanes: FillerLanes,
        pieces: PieceSource | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunk_pages: int | None = None,
        early: ShipThread | None = None,
    ) -> None:
        self._page_size = page_size
        self._epoch = epoch
        self._page_bytes = page_bytes
        self._memory = memory
        self._jobs = jobs
        self._shipper = shipper
        self._reply = reply
        self._clock = clock
        self._lanes = lanes
        self._data = DataBudget()
        self._slots = DataSlots()
        self._pieces = pieces
        self._early = early
        self.reads_early = early is not None
        """Whether `on_launched` does anything."""
        most = max_chunk_pages or MAX_CHUNK_BYTES
        self._max_chunk_pages = min(most, max(1, max_chunk_bytes // page_bytes))
        max_data_bytes = min(max_chunk_bytes, MAX_DATA_CHUNK_BYTES)
        self._max_data_pages = min(most, max(1, max_data_bytes // page_bytes))
        self._leases: dict[bytes, Lease] = {}
        self._by_stream: dict[int, Lease] = {}
        self._used: OrderedDict[bytes, LeaseState] = OrderedDict()
        self.is_draining = self.is_paused = False
        self.counters = FillerCounters()

    # -- from owners -----------------------------------------------------------------------------

    def on_start(self, start: FillStart) -> None:
        handle = start.handle
        reason, message = self._why_not(handle)
        if reason:
            self.counters.leases_declined += 1
            event = FillEvent(kind="declined", reason=reason, message=message)
            self._reply(FillReply(stream=start.stream, event=event))
            return
        target = self._lanes.choose(handle)
        self._remember(handle.lease_id, LeaseState.ACTIVE)
        now = self._clock()
        lease = Lease(
            handle=handle,
            stream=start.stream,
            job=None,
            end_token=handle.end_token,
            timings=FillTimings(accepted_at=now),
            term=LeaseTerm(handle.lease_s, self._clock),
            sign_of_life_at=now,
            target=target,
            is_opening=isinstance(target, SharedTargetInfo),
            next_token=handle.start_token,
        )
        self._leases[handle.lease_id] = lease
        self._by_stream[start.stream] = lease
        self.counters.leases_accepted += 1
        if target is not None:
            self._shipper.prepare((handle.owner_id, handle.owner_epoch), target)
        lease.job = self._jobs.begin(handle, start.request_id, start.traceparent)
        lease.end_token = len(lease.job.tokens)
        if not lease.is_opening:
            self._say_accepted(lease)

    def on_opened(self, opened: PeerOpened) -> None:
        """Accepts the leases that waited to know whether an owner's memory is within reach."""
        for lease in list(self._leases.values()):
            owner = (lease.handle.owner_id, lease.handle.owner_epoch)
            if not lease.is_opening or owner != opened.owner:
                continue
            lease.is_opening = False
            if not opened.is_open:
                lease.target = None
                for _ in range(len(lease.held)):
                    chunk = replace(lease.held.popleft(), target=None)
                    lease.shipping[chunk.index] = chunk
                    lease.held.append(chunk)
            elif not lease.is_copied:
                self._join_held(lease)
            if lease.state is LeaseState.ACTIVE:
                self._say_accepted(lease)
                self._ship_held(lease)

    def _join_held(self, lease: Lease) -> None:
        """Makes chunks as large as may be of those that were small in case they become `data`. The
        owner takes a chunk in each turn, so many small ones would take it many turns.
        """
        joined: list[ShipChunk] = []
        for chunk in lease.held:
            last = joined[-1] if joined else None
            num_pages = len(chunk.local_pages) + len(last.local_pages if last else ())
            if last is None or num_pages > self._max_chunk_pages:
                joined.append(replace(chunk, index=len(joined)))
                continue
            digests = None
            if last.digests is not None and chunk.digests is not None:
                digests = last.digests + chunk.digests
            joined[-1] = replace(
                last,
                end_token=chunk.end_token,
                local_pages=last.local_pages + chunk.local_pages,
                remote_pages=last.remote_pages + chunk.remote_pages,
                digests=digests,
                computed_tokens=chunk.computed_tokens,
            )
        lease.held = deque(joined)
        lease.shipping = {chunk.index: chunk for chunk in joined}
        lease.next_chunk = len(joined)

    def on_renew(self, lease_id: bytes) -> None:
        """Extends an active lease, or ends it if it has expired meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ACTIVE:
            return
        if lease.term.is_over:
            self._fail(lease, RAN_OUT)
        else:
            lease.term.renew()

    def on_stop(self, lease_id: bytes) -> None:
        """Stops a lease. The event `stopped` follows when no write can still arrive."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._stop(lease, "stopped by the owner")

    def on_stream_broken(self, stream: int) -> None:
        """Stops posting for the lease of a stream that broke."""
        self._data.taken(stream)
        self._slots.taken(stream)
        lease = self._by_stream.pop(stream, None)
        if lease is not None:
            lease.stream = -1
            self._stop(lease, "the owner's stream broke")
        self._ship_waiting()

    def on_taken(self, stream: int, num_events: int) -> None:
        """Notes that a stream has passed on events, so that another chunk may be copied into it."""
        lease = self._by_stream.get(stream)
        if lease is not None:
            lease.num_taken = max(lease.num_taken, num_events)
            if lease.num_taken >= lease.said_with_chunk and len(lease.held) == len(lease.shipping):
                self._data.taken(stream)
                self._slots.taken(stream)
            self._ship_held(lease)
        self._ship_waiting()

    def on_query(self, query: LeaseQuery) -> str:
        """State of a lease, which is stopped if active. A lease that is unknown now is declined if
        it starts later.
        """
        lease = self._leases.get(query.lease_id)
        if lease is None:
            known = self._used.get(query.lease_id)
            if known is None:
                self._remember(query.lease_id, LeaseState.STOPPED)
                return "unknown"
            return known.value
        self._stop(lease, "stopped by a query")
        return lease.state.value

    # -- from the engine -------------------------------------------------------------------------

    def on_launched(self, job: FillJob, end_token: int, after: WorkMark) -> None:
        """Reads pages right after the step that computes them, so that they are ready when it ends.

        Args:
            job: Has a part in the step.
            end_token: Position up to which its KV will exist after the step.
            after: Mark that follows the step's work.
        """
        lease = self._leases.get(job.lease_id)
        if lease is None or lease.job is not job or lease.target is None or lease.is_opening:
            return
        assert self._early is not None
        size = lease.handle.page_size
        ready = min(end_token, lease.end_token) // size * size
        begin = lease.early[-1].end_token if lease.early else lease.next_token
        while begin < ready:
            end = min(ready, begin + self._max_chunk_pages * size)
            index = lease.next_chunk + len(lease.early)
            chunk = self._chunk(lease, job, index, begin, end)
            self._memory.retain(chunk.local_pages)
            lease.early.append(chunk)
            self._early.read_early(chunk, after)
            begin = end

    def on_progress(self, job: FillJob) -> None:
        """Queues the new full pages that the handle asks for."""
        lease = self._leases.get(job.lease_id)
        if lease is None or lease.job is not job:
            return
        size = lease.handle.page_size
        ready = job.num_computed // size * size
        is_complete = job.num_computed >= lease.end_token
        if is_complete:
            lease.timings.last_chunk_computed_s = self._clock() - lease.timings.accepted_at
            lease.timings.queued_s, lease.timings.planned_s = self._jobs.waits_s(job)
            lease.timings.computed_tokens = lease.end_token - job.num_cached_tokens
            self.counters.computed_tokens += lease.timings.computed_tokens
            if self._pieces is not None:
                packed = self._pieces.pack(job, lease.end_token)
                if packed is None:
                    self._fail(lease, "no room for what belongs behind the pages of KV")
                    return
                lease.companion_pages = packed
                ready += len(packed) * size
        max_pages = self._max_chunk_pages
        if lease.is_copied or lease.is_opening:
            max_pages = self._max_data_pages
        while lease.next_token < ready:
            if lease.early:
                if lease.early[0].end_token > ready:
                    break
                self._ship(lease, lease.early.popleft())
                continue
            end = min(ready, lease.next_token + max_pages * size)
            chunk = self._chunk(lease, job, lease.next_chunk, lease.next_token, end)
            self._memory.retain(chunk.local_pages)
            self._ship(lease, chunk)
        if is_complete:
            self._memory.release(lease.companion_pages)
            lease.job = None
            self._jobs.end(job)
            self._finish_if_done(lease)

    def on_posted(self, posted: ChunkPosted) -> None:
        """Announces a chunk whose write is under way, so that its digests arrive no later."""
        lease = self._leases.get(posted.lease_id)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            self._announce(lease, lease.shipping[posted.index], posted.digests)

    def on_shipped(self, result: ShipResult) -> None:
        lease = self._leases.get(result.lease_id)
        assert lease is not None, "a lease is kept while a chunk of it ships"
        chunk = lease.shipping.pop(result.index)
        if chunk.slot is not None:
            self._slots.written(chunk.slot)
        lease.needs_fence |= result.needs_fence
        lease.is_stranded |= result.is_stranded
        if not result.is_stranded:
            self._memory.release(chunk.local_pages)
        if result.error:
            self._fail(lease, result.error)
        elif lease.state is LeaseState.ACTIVE:
            self._report_written(lease, chunk, result)
        self._finish_if_done(lease)

    def on_data(self, lease_id: bytes, event: FillEvent) -> None:
        """Passes on bytes of a page, for transfer over gRPC."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            self._say(lease, event)

    def tick(self) -> None:
        """Ends expired leases; sends signs of life for those still being computed."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.state is not LeaseState.ACTIVE:
                continue
            if lease.term.is_over:
                self._fail(lease, RAN_OUT)
                self._finish_if_done(lease)
            elif self._is_computing(lease) and now - lease.sign_of_life_at >= SIGN_OF_LIFE_S:
                self._say_accepted(lease)

    def on_job_failed(self, job: FillJob, why: str) -> None:
        """Fails the lease of a job that ended without all of its pages."""
        lease = self._leases.get(job.lease_id)
        if lease is not None and lease.job is job:
            lease.job = None
            self._fail(lease, why)
            self._finish_if_done(lease)

    @property
    def num_active(self) -> int:
        """Number of leases that are not stopped or done."""
        return sum(1 for lease in self._leases.values() if not lease.is_stranded)

    @property
    def leases(self) -> Iterable[Lease]:
        return self._leases.values()

    def num_leaving_tokens(self) -> int:
        """Tokens whose pages are computed and have not all been written. Pieces of
        companions count no tokens.
        """
        return sum(
            max(0, min(chunk.end_token, lease.end_token) - chunk.start_token)
            for lease in self._leases.values()
            for chunk in lease.shipping.values()
        )

    def sizes(self) -> dict[str, int]:
        """Numbers of open leases, of their streams, and of chunks being shipped."""
        return {
            "leases": len(self._leases),
            "lease_streams": len(self._by_stream),
            "chunks": sum(len(lease.shipping) for lease in self._leases.values()),
        }

    # -- internals -------------------------------------------------------------------------------

    def _why_not(self, handle: KvHandle) -> tuple[str, str]:
        """(reason, message) to decline the handle, or two empty strings."""
        if handle.filler_epoch != self._epoch:
            return "epoch", f"this incarnation is {self._epoch:016x}"
        if self.is_draining:
            return "draining", "this worker is draining"
        if self.is_paused:
            return "draining", "this worker is paused, asleep, or without a version of the weights"
        if self._page_size not in (None, handle.page_size):
            return "layout", f"page size {handle.page_size}, here {self._page_size}"
        problem = self._malformed(handle)
        if problem:
            return "invalid", problem
        version = self._lanes.nixl_version
        if handle.nixl is not None and version not in (None, handle.nixl.version):
            return "transport", f"NIXL {handle.nixl.version} there, {version} here"
        offer = handle.nixl or handle.shared
        if offer is not None and offer.page_bytes != self._page_bytes:
            return "layout", f"{offer.page_bytes} bytes a page, here {self._page_bytes}"
        return self._jobs.why_not(handle)

    def _malformed(self, handle: KvHandle) -> str:
        size = handle.page_size
        if size < 1:
            return f"page size {size}"
        if len(handle.lease_id) != LEASE_ID_BYTES:
            return f"lease id of {len(handle.lease_id)} bytes"
        if handle.lease_id in self._used:
            return "the lease was used before"
        start, end = handle.start_token, handle.end_token
        is_range = 0 <= start < end or (start == end and handle.tail_spans)
        if start % size or end % size or not is_range or len(handle.tokens) != end:
            return f"range [{start}, {end}) of {len(handle.tokens)} tokens, page size {size}"
        num_pages = (end - start) // size
        num_pages += 0 if self._pieces is None else self._pieces.num_pages_of(handle)
        if len(handle.pages) != num_pages or len(set(handle.pages)) != num_pages:
            return f"{len(handle.pages)} pages for {num_pages}"
        offer = handle.nixl or handle.shared
        if offer is not None and max(handle.pages) >= offer.num_pages:
            return f"page {max(handle.pages)} of a pool of {offer.num_pages}"
        if not 0 < handle.lease_s <= 3600:
            return f"lease of {handle.lease_s} s"
        return ""

    def _remember(self, lease_id: bytes, state: LeaseState) -> None:
        self._used[lease_id] = state
        if len(self._used) > MAX_REMEMBERED_LEASES:
            self._used.popitem(last=False)

    def _is_computing(self, lease: Lease) -> bool:
        """False during a write, since only the end of the write is a sign of life then."""
        return lease.job is not None and not lease.shipping and not lease.is_opening

    def _say_accepted(self, lease: Lease) -> None:
        lease.sign_of_life_at = self._clock()
        event = FillEvent(
            kind="accepted",
            filler_epoch=self._epoch,
            transport=lease.transport,
            start_token=lease.handle.start_token,
            end_token=lease.end_token,
        )
        self._say(lease, event)

    def _say(self, lease: Lease, event: FillEvent) -> None:
        if lease.stream >= 0:
            lease.num_said += 1
            self._reply(FillReply(stream=lease.stream, event=event))

    def _chunk(
        self, lease: Lease, job: FillJob, index: int, start_token: int, end_token: int
    ) -> ShipChunk:
        handle, size = lease.handle, lease.handle.page_size
        local = job.pages[start_token // size : min(end_token, lease.end_token) // size]
        of_pieces = range(max(start_token - lease.end_token, 0), end_token - lease.end_token, size)
        local = [*local, *(lease.companion_pages[at // size] for at in of_pieces)]
        known = job.digests
        first = (start_token - handle.start_token) // size
        is_last = end_token >= lease.end_token
        return ShipChunk(
            lease_id=handle.lease_id,
            index=index,
            start_token=start_token,
            end_token=end_token,
            local_pages=local,
            remote_pages=handle.pages[first : first + len(local)],
            digests=list(known[start_token // size : end_token // size]) if known else None,
            target=lease.target,
            owner_id=handle.owner_id,
            owner_epoch=handle.owner_epoch,
            term=lease.term,
            computed_tokens=lease.end_token - job.num_cached_tokens if is_last else None,
        )

    def _ship(self, lease: Lease, chunk: ShipChunk) -> None:
        """The caller has retained the chunk's pages."""
        lease.shipping[chunk.index] = chunk
        lease.next_token, lease.next_chunk = chunk.end_token, chunk.index + 1
        lease.held.append(chunk)
        self._ship_held(lease)

    def _ship_held(self, lease: Lease) -> None:
        """Chunks are written at once, and sent as data one after the other."""
        while lease.held and not lease.is_opening:
            if lease.target is None:
                is_first = len(lease.held) == len(lease.shipping)
                if not is_first or lease.num_taken < lease.said_with_chunk:
                    return
                num_bytes = len(lease.held[0].local_pages) * self._page_bytes
                if not self._data.ask(lease.stream, num_bytes):
                    return
                if self._shipper.holds_data:
                    chunk = lease.held[0]
                    slot = self._slots.take(lease.stream, num_bytes)
                    lease.held[0] = lease.shipping[chunk.index] = replace(chunk, slot=slot)
            self._shipper.ship(lease.held.popleft())

    def _ship_waiting(self) -> None:
        while (stream := self._data.first_waiting) is not None:
            lease = self._by_stream.get(stream)
            if lease is not None:
                self._ship_held(lease)
            if lease is None or not lease.held:
                self._data.leave(stream)
            elif self._data.first_waiting == stream:
                return

    def _drop_early(self, lease: Lease) -> None:
        while lease.early:
            self._memory.release(lease.early.popleft().local_pages)

    def _drop_held(self, lease: Lease) -> None:
        while lease.held:
            chunk = lease.held.popleft()
            del lease.shipping[chunk.index]
            self._memory.release(chunk.local_pages)

    def _report_written(self, lease: Lease, chunk: ShipChunk, result: ShipResult) -> None:
        timings = lease.timings
        if chunk.index == 0:
            timings.first_write_posted_s = result.posted_at - timings.accepted_at
        timings.last_digest_s = result.digest_s
        timings.last_digested_s = result.posted_at - timings.accepted_at
        timings.last_write_posted_s = result.post_ended_at - timings.accepted_at
        timings.last_write_complete_s = result.completed_at - timings.accepted_at
        timings.bytes += len(chunk.local_pages) * self._page_bytes
        self.counters.shipped_pages += len(chunk.local_pages)
        self.counters.shipped_bytes += len(chunk.local_pages) * self._page_bytes
        if lease.num_announced == chunk.index:
            self._announce(lease, chunk, result.digests)
        lease.said_with_chunk = lease.num_said

    def _announce(self, lease: Lease, chunk: ShipChunk, digests: list[int]) -> None:
        lease.num_announced += 1
        self._say(lease, chunk.report(digests))

    def _stop(self, lease: Lease, why: str) -> None:
        if lease.state is LeaseState.ACTIVE:
            lease.state = LeaseState.STOPPING
            self._shipper.stop(lease.handle.lease_id)
            self._drop_held(lease)
            self._drop_early(lease)
            job, lease.job = lease.job, None
            if job is not None:
                self._jobs.end(job)
            logger.info("lease %s: %s", lease.handle.lease_id.hex(), why)
        self._finish_if_done(lease)

    def _fail(self, lease: Lease, why: str) -> None:
        if lease.state is LeaseState.ACTIVE:
            lease.failure = why
            self._stop(lease, why)

    def _finish_if_done(self, lease: Lease) -> None:
        """The lease becomes done, failed or stopped."""
        if lease.shipping or lease.is_stranded or lease.handle.lease_id not in self._leases:
            return
        if lease.state is LeaseState.ACTIVE:
            if lease.next_token < lease.end_token:
                return
            self.counters.leases_done += 1
            lease.timings.reported_s = self._clock() - lease.timings.accepted_at
            self._say(lease, FillEvent(kind="done", timings=lease.timings))
        elif lease.failure or lease.needs_fence:
            event = FillEvent(
                kind="failed",
                message=lease.failure or "a write did not end",
                is_stopped=not lease.needs_fence,
                needs_fence=lease.needs_fence,
            )
            self._say(lease, event)
        else:
            self.counters.leases_stopped += 1
            self._say(lease, FillEvent(kind="stopped"))
        lease.state = LeaseState.FENCE_NEEDED if lease.needs_fence else LeaseState.STOPPED
        self._remember(lease.handle.lease_id, lease.state)
        self._shipper.forget(lease.handle.lease_id)
        del self._leases[lease.handle.lease_id]
        self._by_stream.pop(lease.stream, None)
