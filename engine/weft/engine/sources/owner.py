"""The owner's side of remote fills: leases, acceptance, quarantine, failover.

One `Fill` is one lease: a contiguous, page-aligned token range of one request, written by one
filler into pages that were reserved before it was asked. Its life:

    STARTING --accepted--> ACTIVE --all chunks accepted, done--> (closed, clean)
        |                    |             `--all chunks accepted--> ACCEPTED --any end--> (closed)
        | declined           | failed / broken / no progress / digest mismatch / request ended
        v                    v
    (closed, clean)      STOPPING --stopped, or proof that the process is gone--> (closed)

A chunk is accepted when its bytes have arrived (NIXL notification, the word of a filler that writes
into shared memory, or all `data`), its digests have arrived, and both agree. Accepted pages belong
to the request and stay valid whatever happens to the filler. If a fill ends uncleanly, its
unaccepted pages are quarantined. They leave quarantine only by proof that no write can arrive,
never after a time. A request continues as soon as all of its pages are accepted; the owner
meanwhile waits for the filler's `done`, which carries its measurements.
"""

from __future__ import annotations

import logging
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace

from weft.contract.clock import Clock
from weft.contract.fills import FillCommand, LeaseAnswer
from weft.contract.handle import LEASE_ID_BYTES, FillEvent, KvHandle
from weft.contract.keys import PieceShape, blocks_keys
from weft.contract.spans import MediaSpan, border_before_span, has_media_rows, spans_before
from weft.contract.timeline import FillCandidate, FillRecord
from weft.contract.token_ids import token_ids
from weft.engine.base.config import EngineConfig
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.events import FillEvents
from weft.engine.sources.audit import PageAudit
from weft.engine.sources.cost import FillCosts
from weft.engine.sources.fill import (
    Fill,
    FillCounters,
    FillState,
    OwnerTransport,
    PiecePacker,
)
from weft.engine.sources.fill_queue import FillQueue
from weft.engine.sources.landing import Landing, StagedLanding
from weft.pages.fills.quarantine import QuarantineWatch
from weft.pages.memory.page_memory import PageMemory
from weft.pages.transfer.nixl_wire import Notification

logger = logging.getLogger(__name__)

QUERY_INTERVAL_S = 1.0
"""Interval in seconds at which the owner asks a filler about a lease in quarantine."""
SILENCE_S = 1.0
"""Seconds after which a filler that owes an answer about a stopped lease is avoided."""


class OwnerFills:
    """All leases of one owner. Implements the scheduler's `Fills`.

    Args:
        epoch: Incarnation of this engine.
        packer: Carries pieces of companions that requests need in addition to KV to continue; None:
            KV is enough.
        on_filled: Called with each fill that ended with all of its pages.
        has_encoder: Whether tokens that need rows of media can be computed here.
        reads_back: Whether a token may need rows of the medium that ends just before it. A clip of
            Whisper is read through pages alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        page_bytes: int,
        memory: PageMemory,
        transport: OwnerTransport,
        costs: FillCosts,
        send: Callable[[FillCommand], None],
        clock: Clock,
        events: FillEvents,
        *,
        packer: PiecePacker | None = None,
        audit: PageAudit | None = None,
        on_filled: Callable[[FillRecord], None] = lambda record: None,
        has_encoder: bool = True,
        reads_back: bool = True,
    ) -> None:
        self._has_encoder, self._reads_back = has_encoder, reads_back
        self._config = config
        self._epoch = epoch
        self._page_bytes = page_bytes
        self._memory = memory
        self._transport = transport
        self._costs = costs
        self._send = send
        self._clock = clock
        self._fills: dict[bytes, Fill] = {}
        self._by_request: dict[int, Fill] = {}
        self._landing: Landing = (
            Landing(memory, config.max_fill_fraction)
            if transport.staging is None
            else StagedLanding(memory, transport.staging, config.max_fill_fraction)
        )
        self._line = FillQueue(config.fill_progress_timeout_s, clock)
        self._quarantine = QuarantineWatch(config.max_quarantine_fraction, clock)
        self._events = events
        self.packer = packer
        self._audit = audit
        self._on_filled = on_filled
        self.counters = FillCounters()

    # -- the scheduler's side --------------------------------------------------------------------

    def next_state(self, request: Request) -> State:
        self._pass_over_silent(request)
        if request.sources.candidates and self._is_blocked(request):
            self.counters.local_decisions += 1
            return State.PREFILLING
        while request.sources.candidates and self._end_token(request) <= self._held_token(request):
            if request.sources.candidates[0].kind == "kvstore":
                request.sources.candidates.pop(0)
            elif self.packer is not None and self.packer.lacks_rows(request):
                break
            else:
                return State.PREFILLING
        if not request.sources.candidates:
            return State.PREFILLING
        if request.sources.candidates[0].kind == "kvstore":
            return State.LOADING
        return State.FILLING if self._is_remote(request) else State.PREFILLING

    def _is_remote(self, request: Request) -> bool:
        """Applies the cost rule (docs/architecture.md) and records both costs."""
        end_token = self._end_token(request)
        num_more = self.num_more(request, end_token)
        begin = self._next_token(request)
        decision = self._costs.decide(request, begin, end_token, self._page_bytes, num_more)
        request.timeline.remote_cost_s = decision.remote_s
        request.timeline.local_cost_s = decision.local_s
        request.sources.is_overflow = decision.is_overflow
        is_remote = decision.is_remote or not (
            self._has_encoder or not has_media_rows(request.spans, begin, len(request.tokens))
        )
        if not is_remote:
            self.counters.local_decisions += 1
        return is_remote

    def has_room(self, request: Request) -> bool:
        return not self._is_blocked(request)

    def start(self, request: Request) -> bool:
        """Waits while too little of the cap is free (`fill_queue.py`)."""
        if id(request) in self._by_request:
            return True
        if not self._has_filler(request) or self._is_blocked(request):
            self._line.leaves(request)
            return False
        if any(fill.is_proven for fill in self._fills.values()):
            return True  # A fence is due. It waits for open fills to end, so none may begin.
        size = self._config.page_size
        begin = self._next_token(request)
        wanted = (self._end_token(request) - begin) // size
        free, most = (self._fitting(request, count) for count in self._room())
        is_load = request.sources.candidates[0].kind == "kvstore" and wanted <= free
        if not (is_load or self._line.may_begin(request)):
            return True
        if request.uncut_spans and request.sources.candidates[0].kind != "kvstore":
            free, most = (self._num_computable(request, begin, count) for count in (free, most))
            if not most:
                request.sources.candidates.clear()  # No fill can have all of the next medium.
                self._line.leaves(request)
                return False
        num_pages, least = min(wanted, free), min(most, self._landing.least_pages)
        has_more = self.packer is not None
        if has_more and request.sources.candidates[0].kind == "kvstore" and num_pages < wanted:
            request.sources.candidates.pop(0)  # This source has no piece before the end.
            return False
        if num_pages < min(wanted, self._line.enough_pages(request, wanted, most, least)):
            self._line.waits(request)
            return True
        self._line.leaves(request)
        num_more = self.num_more(request, begin + num_pages * size)
        pages = request.held.take_promised(self._memory, num_pages, request.namespace)
        pages += self._memory.allocate(num_more, request.namespace)
        now, lease_id = self._clock(), secrets.token_bytes(LEASE_ID_BYTES)
        fill = Fill(
            lease_id=lease_id,
            request=request,
            candidate=request.sources.candidates[0],
            start_token=begin,
            end_token=begin + num_pages * size,
            pages=pages,
            landed=self._landing.reserve(pages),
            record=FillRecord(
                source=request.sources.candidates[0].kind,
                worker_id=request.sources.candidates[0].worker_id,
                transport="",
                start_token=begin,
                end_token=begin + num_pages * size,
                start_s=now - request.timeline.submitted_at,
                lease_id=lease_id.hex(),
            ),
            uses_nixl=self._transport.target is not None,
            accepted_token=begin,
            num_companion_pages=num_more,
            last_progress_at=now,
            renew_at=now + self._config.renew_interval_s,
        )
        request.timeline.fills.append(fill.record)
        self._fills[lease_id] = self._by_request[id(request)] = fill
        self.counters.fills_started += 1
        self._command(fill, "start", handle=self._handle(fill, request))
        return True

    def abandon(self, request: Request) -> None:
        """Stops the fill of a request that ended. Pages that were not accepted go to quarantine."""
        self._line.leaves(request)
        if (fill := self._by_request.get(id(request))) is not None:
            self._fail(fill, "the request ended", notify=False)

    # -- events of fillers -----------------------------------------------------------------------

    def on_event(self, lease_id: bytes, event: FillEvent) -> None:
        """Handles a filler's event. Events of unknown or closed leases are counted and dropped."""
        fill = self._fills.get(lease_id)
        if fill is None:
            self.counters.stale_events += 1
            return
        if event.kind in ("stopped", "done", "declined", "failed", "broken"):
            self._on_end_event(fill, event)
        elif fill.state in (FillState.STOPPING, FillState.ACCEPTED):
            self.counters.stale_events += not fill.note_repeat(event)
        elif event.kind == "accepted":
            self._on_accepted(fill, event)
        elif event.kind == "written":
            if not fill.note_repeat(event):
                self._on_written(fill, event, is_told=True)
        elif event.kind == "data":
            self._on_data(fill, event)

    def on_notification(self, arrived: Notification) -> None:
        """Handles a NIXL notification: a chunk's bytes have arrived, perhaps before its event,
        which the notification may carry.
        """
        fill = self._fills.get(arrived.lease_id)
        is_over = fill is None or fill.state in (FillState.STOPPING, FillState.ACCEPTED)
        if fill is None or is_over or arrived.owner_epoch != self._epoch:
            self.counters.stale_events += 1
            return
        chunk = fill.chunk(arrived.chunk)
        chunk.is_notified = True
        fill.record.arrived_s = self._since_submit(fill)
        # Until the filler has accepted the lease, the chunk's own event is awaited.
        if arrived.report is not None and fill.state is FillState.ACTIVE and chunk.digests is None:
            self._on_written(fill, arrived.report, is_told=False)
        else:
            self._progress(fill, arrived.chunk)

    def on_digested(self, lease_id: bytes, chunk: int, actual: list[int]) -> None:
        """Handles digests of pages in the pool: accepts the chunk or fails the fill."""
        self._landing.verified((lease_id, chunk))
        fill = self._fills.get(lease_id)
        if fill is None or fill.state is not FillState.ACTIVE:
            return
        known = fill.chunks[chunk]
        assert known.digests is not None
        fill.record.checked_s = self._since_submit(fill)
        is_equal = actual == known.digests or not self._config.page_digests
        if not is_equal:
            self.counters.digest_mismatches += 1
            wrong = next(i for i, digest in enumerate(known.digests) if actual[i] != digest)
            logger.error(
                "digest mismatch: lease %s chunk %d page %d: sent %016x, arrived %016x, filler %s",
                lease_id.hex(), chunk, wrong, known.digests[wrong], actual[wrong],
                fill.candidate.worker_id,
            )  # fmt: skip
            if fill.candidate.kind == "kvstore":
                self._report_corrupt(fill, known.start_token, wrong, known.digests[wrong])
            self._fail(fill, f"digest mismatch in chunk {chunk}")
            return
        self._accept(fill, chunk, known.end_token)

    def on_lease_answer(self, answer: LeaseAnswer) -> None:
        fill = self._fills.get(answer.lease_id)
        if fill is None or fill.candidate.worker_id != answer.worker_id:
            return
        if answer.filler_epoch != fill.candidate.epoch:
            # A new incarnation of the worker answers, so the process that could write is gone.
            self._prove(fill)
        elif fill.state is FillState.STOPPING and answer.state == "fence_needed":
            self._prove(fill)
        elif fill.state is FillState.STOPPING and answer.state in ("stopped", "unknown"):
            self._end_quarantine(fill)

    def on_process_exited(self, worker_id: str, epoch: int) -> int:
        """Handles the proof that a process is gone. Other hosts of its worker may still write over
        NIXL until the fence. Returns the number of pages that left quarantine.
        """
        released = 0
        for fill in list(self._fills.values()):
            if (fill.candidate.worker_id, fill.candidate.epoch) == (worker_id, epoch):
                released += len(fill.landed)
                self._prove(fill)
        return released

    def tick(self) -> None:
        """Renews leases, fails over fills without progress, and queries the fillers of stopped
        leases.
        """
        now = self._clock()
        for fill in list(self._fills.values()):
            if fill.state is FillState.STOPPING:
                if now >= fill.query_at and not fill.is_proven:
                    fill.query_at = now + QUERY_INTERVAL_S
                    self._command(fill, "query")
            elif fill.state is FillState.ACCEPTED:
                if now - fill.last_progress_at >= self._config.fill_progress_timeout_s:
                    del self._fills[fill.lease_id]
            elif now - fill.last_progress_at >= self._config.fill_progress_timeout_s:
                timeout = self._config.fill_progress_timeout_s
                self._fail(fill, f"no progress for {timeout:.0f} s")
                fill.silent_since = fill.last_progress_at
            elif now >= fill.renew_at:
                fill.renew_at = now + self._config.renew_interval_s
                self._command(fill, "renew")
        self._fence_if_due()
        self._quarantine.note(self._num_quarantined_pages(), self._landing.num_usable_pages)

    @property
    def quarantine_over_s(self) -> float:
        """Seconds for which quarantine has held more than its share of the pool."""
        return self._quarantine.over_s

    @property
    def awaits_arrival(self) -> bool:
        """Whether some chunk lacks only its notification."""
        return any(fill.awaits_arrival for fill in self._fills.values())

    @property
    def may_be_notified(self) -> bool:
        """Whether some filler writes over NIXL."""
        fills = self._fills.values()
        return any(fill.uses_nixl and fill.state is FillState.ACTIVE for fill in fills)

    @property
    def open_fills(self) -> Iterable[Fill]:
        return self._fills.values()

    def sizes(self) -> dict[str, int]:
        """Numbers of open leases, of requests waiting for one, and of chunks being received."""
        return {
            "fills": len(self._fills),
            "filled_requests": len(self._by_request),
            "landing_chunks": self._landing.num_verifying,
        }

    @property
    def num_open(self) -> int:
        """Number of leases with writes that may still arrive, and of chunks entering the pool."""
        return len(self._fills) + self._landing.num_verifying

    # -- internals -------------------------------------------------------------------------------

    def _end_token(self, request: Request) -> int:
        """End of the range for the first candidate. The owner itself runs a prompt's last token.

        If a prefill worker fills pages of a prompt of whole pages, it ships the last one too, and
        the owner runs one token instead of a page. This does not hold if only the last page is
        missing: it is computed here. Nor does it hold with recurrent layers, whose state after the
        last token cannot be taken back to run that token again, nor with window groups, whose last
        window begins after what that token reaches.

        It also ships a last page that is not full if the owner would need rows of media to compute
        its tokens (`_handle`).
        """
        size = self._config.page_size
        end = request.num_reusable_tokens // size * size
        if request.sources.candidates and request.sources.candidates[0].kind == "kvstore":
            return min(end, request.sources.candidates[0].match_tokens)
        if self.packer is None:
            begin = self._next_token(request)
            needs_rows = has_media_rows(request.spans, max(begin, end), len(request.tokens))
            if needs_rows and self._reads_back:
                return -(-len(request.tokens) // size) * size
            if end > begin:
                end = len(request.tokens) // size * size
        return border_before_span(request.uncut_spans, end, size)

    def _num_computable(self, request: Request, begin: int, num_pages: int) -> int:
        """The most of so many pages from `begin` on that a filler can compute: none ends in a
        medium whose tokens attend to one another both ways.
        """
        size = self._config.page_size
        end = border_before_span(request.uncut_spans, begin + num_pages * size, size)
        return max(0, end - begin) // size

    def _held_token(self, request: Request) -> int:
        """End of the pages that are here. The last one may have been filled although its last token
        is still to be run.
        """
        held = len(request.held.pages) * self._config.page_size
        return max(held, self._next_token(request))

    def _next_token(self, request: Request) -> int:
        if self.packer is None:
            return request.num_computed
        return len(request.held.pages) * self._config.page_size

    @property
    def num_companion_pages(self) -> int:
        """Most pages of a fill that follow its pages of KV."""
        return 0 if self.packer is None else self.packer.num_pages

    def num_more(self, request: Request, end_token: int) -> int:
        """Pages that follow those of KV in a fill that ends at `end_token`."""
        if self.packer is None:
            return 0
        candidates = request.sources.candidates
        is_stored = bool(candidates) and candidates[0].kind == "kvstore"
        return self.packer.num_pages_of(request, end_token, is_stored=is_stored)

    def _room(self) -> tuple[int, int]:
        """Pages that a new fill may hold now, and at most. Quarantined ones do not count."""
        fills, (landing, in_pool) = self._fills.values(), self._most()
        free = min(
            landing - sum(len(fill.landed) for fill in fills),
            in_pool - sum(len(fill.pages) for fill in fills),
        )
        return free, min(landing - self._num_quarantined_pages(), in_pool)

    def _most(self) -> tuple[int, int]:
        """Destinations and pages of the pool that all fills may hold. The pages that follow a
        fill's pages of KV are granted on top of this share: a window may be larger than the share,
        and in pieces shorter than a window nothing of it would be saved.
        """
        beside = self.num_companion_pages
        return self._landing.max_pages(beside), self._landing.max_pool_pages(beside)

    def _num_quarantined_pages(self) -> int:
        return sum(
            len(fill.landed) for fill in self._fills.values() if fill.state is FillState.STOPPING
        )

    def _fitting(self, request: Request, count: int) -> int:
        """The most pages of KV of a request's next fill that fit into `count` pages, together with
        the pages that follow them, for which nothing is reserved.
        """
        size, begin = self._config.page_size, self._next_token(request)
        available = max(0, self._memory.num_available_pages)

        def is_too_much(num_pages: int) -> bool:
            num_more = self.num_more(request, begin + num_pages * size)
            return num_pages + num_more > count or num_more > available

        return bisect_left(range(count + 1), True, key=is_too_much) - 1

    def _is_blocked(self, request: Request) -> bool:
        """Whether quarantine leaves too little room for any fill, or for the pages that follow
        those of KV.
        """
        landing, in_pool = self._most()
        size = self._config.page_size
        num_more = self.num_more(request, self._next_token(request) + size)
        most = min(landing, in_pool) - 1
        if num_more and num_more > min(most, self._memory.num_available_pages):
            return True
        return self._num_quarantined_pages() + num_more > landing - self._landing.least_pages

    def _has_filler(self, request: Request) -> bool:
        """Whether the first candidate answers and supports the request's state, which was chosen
        for it. A load without room has dropped its store.
        """
        if not request.sources.candidates or self._is_silent(request.sources.candidates[0]):
            return False
        return request.state is not State.LOADING or request.sources.candidates[0].kind == "kvstore"

    def _is_silent(self, candidate: FillCandidate) -> bool:
        limit = self._clock() - SILENCE_S
        return any(fill.is_owed_by(candidate, limit) for fill in self._fills.values())

    def _pass_over_silent(self, request: Request) -> None:
        while request.sources.candidates and self._is_silent(request.sources.candidates[0]):
            candidate = request.sources.candidates.pop(0)
            self.counters.fills_avoided += 1
            at = self._clock() - request.timeline.submitted_at
            why = "it has not answered about an earlier fill"
            record = FillRecord.not_asked(candidate, request.num_computed, at, why)
            request.timeline.fills.append(record)

    def _handle(self, fill: Fill, request: Request) -> KvHandle:
        is_stored = fill.candidate.kind == "kvstore"
        shape, tail = self._shape if is_stored else PieceShape(), list[MediaSpan]()
        if self.packer is not None and not is_stored:
            tail = self.packer.tail_spans(request, fill.end_token)
        # After the prompt's last token, a page has places that the owner's own steps write to
        # before they read them. Any token will do there.
        num_beyond = max(0, fill.end_token - len(request.tokens))
        tokens = [*request.tokens[: fill.end_token], *request.tokens[-1:] * num_beyond]
        return KvHandle(
            owner_id=self._config.worker_id,
            owner_epoch=self._epoch,
            lease_id=fill.lease_id,
            lease_s=self._config.lease_s,
            namespace=request.namespace,
            cache_salt=request.cache_salt,
            page_size=self._config.page_size,
            tokens=token_ids(tokens),
            start_token=fill.start_token,
            end_token=fill.end_token,
            pages=list(fill.landed),
            filler_epoch=fill.candidate.epoch,
            nixl=self._transport.target,
            shared=self._transport.shared,
            priority=request.priority,
            tenant=request.tenant,
            adapter=request.adapter,
            block_pages=shape.pages_of_many,
            state_pages=shape.state_pages,
            spans=spans_before(request.spans, fill.end_token),
            tail_spans=tail,
            encoder_digest=request.keys.encoder,
        )

    @property
    def _shape(self) -> PieceShape:
        return PieceShape() if self.packer is None else self.packer.shape

    def _command(
        self,
        fill: Fill,
        action: str,
        handle: KvHandle | None = None,
        corrupt: tuple[bytes, int] | None = None,
    ) -> None:
        request = fill.request
        self._send(
            FillCommand(
                lease_id=fill.lease_id,
                worker_id=fill.candidate.worker_id,
                address=fill.candidate.address,
                kind=fill.candidate.kind,
                action=action,
                handle=handle,
                corrupt=corrupt,
                request_id=request.key.request_id if request else "",
                traceparent=request.traceparent if request else "",
            )
        )

    def _on_accepted(self, fill: Fill, event: FillEvent) -> None:
        if event.filler_epoch != fill.candidate.epoch:
            self._fail(fill, "accepted by another incarnation than asked")
            return
        if event.end_token != fill.end_token and not self._shorten(fill, event.end_token):
            self._fail(fill, f"accepted up to {event.end_token}, asked up to {fill.end_token}")
            return
        if fill.state is FillState.STARTING:
            # The pages were reserved in an earlier turn, so the mark covers their wipe.
            fill.after = self._transport.port.mark()
        # The filler repeats this event every second as a sign of life while it computes.
        fill.state = FillState.ACTIVE
        fill.uses_nixl = event.transport == "nixl"
        fill.is_shared = event.transport == "shared"
        fill.record.transport = event.transport
        fill.last_progress_at = self._clock()

    def _shorten(self, fill: Fill, end_token: int) -> bool:
        """Shortens a fill to what its store accepted. Spare pages return to the reservation.
        Returns False if the filler may not do that.
        """
        size = self._config.page_size
        is_sound = fill.candidate.kind == "kvstore" and fill.state is FillState.STARTING
        if not is_sound or end_token % size or not fill.start_token < end_token < fill.end_token:
            return False
        request = fill.request
        assert request is not None
        num_pages = (end_token - fill.start_token) // size
        spare = fill.pages[num_pages:]
        self._landing.release(spare, fill.landed[num_pages:])
        del fill.pages[num_pages:], fill.landed[num_pages:]
        request.held.promise(self._memory, len(spare))
        fill.end_token = fill.record.end_token = end_token
        # The owner does not ask the store again for pages that the store no longer holds.
        candidates = request.sources.candidates
        candidates[0] = replace(candidates[0], match_tokens=end_token)
        return True

    def _on_written(self, fill: Fill, event: FillEvent, *, is_told: bool) -> None:
        if not fill.can_be_written(event, self._config.page_size):
            self._fail(fill, f"malformed report of chunk {event.chunk}")
            return
        chunk = fill.chunk(event.chunk)
        chunk.start_token, chunk.end_token = event.start_token, event.end_token
        chunk.digests, chunk.is_told = event.digests, is_told
        if event.computed_tokens is not None:
            fill.record.computed_tokens = event.computed_tokens
        fill.record.announced_s = self._since_submit(fill)
        self._progress(fill, event.chunk)

    def _on_data(self, fill: Fill, event: FillEvent) -> None:
        size = self._config.page_size
        if not fill.can_be_data(event, size, self._page_bytes):
            self._fail(fill, "malformed data")
            return
        if event.data:
            page = fill.landed[(event.start_token - fill.accepted_token) // size]
            self._transport.port.write(page, event.offset, event.data)
        fill.chunk(event.chunk).bytes_arrived += len(event.data) or event.num_held
        fill.record.arrived_s = self._since_submit(fill)
        self._progress(fill, event.chunk)

    def _progress(self, fill: Fill, index: int) -> None:
        """Verifies chunks in order, once both their bytes and their digests are there."""
        fill.last_progress_at = self._clock()
        chunk = fill.chunks.get(index)
        if chunk is None or index != fill.next_chunk or chunk.is_verifying:
            return
        if chunk.digests is None:
            return
        if chunk.start_token != fill.accepted_token:
            self._fail(fill, f"chunk {index} does not follow the one before")
            return
        num_pages = len(chunk.digests)
        has_bytes = (
            chunk.is_notified
            if fill.uses_nixl
            else fill.is_shared or chunk.bytes_arrived == num_pages * self._page_bytes
        )
        if has_bytes and (self._config.page_digests or self._landing.needs_verifying):
            chunk.is_verifying = True
            tag, pages = (fill.lease_id, index), fill.pages[:num_pages]
            self._landing.verifying(tag, pages)
            self._transport.port.verify(tag, fill.landed[:num_pages], pages, fill.after)
        elif has_bytes:
            self._accept(fill, index, chunk.end_token)

    def _report_corrupt(self, fill: Fill, start_token: int, page: int, digest: int) -> None:
        request = fill.request
        assert request is not None
        index = start_token // self._config.page_size + page
        num_kv = fill.end_token // self._config.page_size
        keys = request.keys.upto(request.tokens, num_kv)
        sizes = self._shape.pages_of_many, self._shape.state_pages
        keys = [*keys, *blocks_keys(keys, fill.num_companion_pages, *sizes)]
        self._command(fill, "report", corrupt=(keys[index], digest))

    def _accept(self, fill: Fill, index: int, end_token: int) -> None:
        request = fill.request
        assert request is not None
        num_pages = (end_token - fill.accepted_token) // self._config.page_size
        num_kv = max(0, min(end_token, fill.end_token) - fill.accepted_token)
        num_kv //= self._config.page_size
        if self._audit is not None:
            digests = fill.chunks[index].digests or []
            self._audit.accepted(fill.pages[:num_kv], digests[:num_kv])
        request.held.add(fill.pages[:num_kv])
        fill.companion_pages += fill.pages[num_kv:num_pages]
        self._landing.accepted(fill.landed[:num_pages])
        del fill.pages[:num_pages], fill.landed[:num_pages]
        num_bytes = num_pages * self._page_bytes
        fill.record.accepted_tokens += num_kv * self._config.page_size
        fill.record.bytes += num_bytes
        self.counters.accepted_pages += num_pages
        self.counters.accepted_bytes += num_bytes
        fill.accepted_token, fill.next_chunk = end_token, index + 1
        is_whole = end_token == fill.last_token(self._config.page_size)
        if self.packer is None or is_whole:
            # Without the pages that follow the KV, the request cannot continue after a part of it.
            # A page with a token that is still to be run is published after that token.
            num_known = min(end_token, fill.end_token, request.num_reusable_tokens)
            request.continue_at(num_known, was_cached=fill.candidate.kind == "kvstore")
            self._events.arrived(request)
        if self.packer is not None and is_whole:
            is_stored = fill.candidate.kind == "kvstore"
            self.packer.unpack(request, fill.companion_pages, fill.end_token, is_stored=is_stored)
            self._memory.release(fill.companion_pages)
            fill.companion_pages = []
        if not is_whole:
            self._progress(fill, fill.next_chunk)
            return
        self._go_on(fill)
        if fill.is_done:
            self._end_accepted(fill)

    def _go_on(self, fill: Fill) -> None:
        """No more bytes of the completely accepted lease can arrive."""
        request, fill.request = fill.request, None
        assert request is not None
        assert not fill.pages
        fill.state = FillState.ACCEPTED
        fill.record.end_s = self._clock() - request.timeline.submitted_at
        del self._by_request[id(request)]
        self.counters.fills_done += 1
        if fill.end_token >= self._end_token(request):
            self._events.completed(request)
        else:
            self.start(request)

    def _end_accepted(self, fill: Fill) -> None:
        """Closes an accepted lease, and records its measurements if the filler has sent them."""
        del self._fills[fill.lease_id]
        if fill.is_done:
            record = fill.record
            self._costs.observe(record, record.end_s - record.start_s)
            self._on_filled(record)

    def _on_end_event(self, fill: Fill, event: FillEvent) -> None:
        if event.kind == "done" and event.timings is not None:
            timings = event.timings
            fill.record.computed_tokens = timings.computed_tokens
            fill.record.first_write_posted_s = timings.first_write_posted_s
            fill.record.last_chunk_computed_s = timings.last_chunk_computed_s
            fill.record.last_write_complete_s = timings.last_write_complete_s
        if fill.state is FillState.ACCEPTED:
            fill.is_done = event.kind == "done"
            self._end_accepted(fill)
        elif fill.state is FillState.STOPPING:
            if event.kind in ("stopped", "done", "declined") or event.is_stopped:
                self._end_quarantine(fill)
            elif event.needs_fence:
                self._prove(fill)
        elif event.kind == "done":
            fill.is_done = True
            fill.last_progress_at = self._clock()
        elif event.kind == "declined":
            self.counters.fills_declined += 1
            self._fail(fill, f"declined: {event.reason} {event.message}".strip(), is_clean=True)
        else:
            is_clean = event.kind == "stopped" or event.is_stopped
            self._fail(fill, event.message or f"the fill {event.kind}", is_clean=is_clean)
            fill.record.filler_failed = event.kind != "stopped"
            if event.needs_fence:
                self._prove(fill)

    def _fail(self, fill: Fill, why: str, *, is_clean: bool = False, notify: bool = True) -> None:
        """Ends a fill early. Without proof that the filler has stopped, its pages go to
        quarantine.
        """
        request = fill.request
        assert request is not None
        fill.record.failure = why
        fill.record.filler_failed = notify and not is_clean
        fill.record.end_s = self._clock() - request.timeline.submitted_at
        self._by_request.pop(id(request), None)
        fill.state = FillState.STOPPING
        is_clean = is_clean or fill.is_done
        if not is_clean:
            self._command(fill, "stop")
        if is_clean or not fill.landed:  # If all is accepted, no bytes can arrive.
            self._landing.release(fill.pages, fill.landed)
            del self._fills[fill.lease_id]
        else:
            self._landing.quarantine(fill.pages, fill.landed)
            fill.silent_since = self._clock()
            fill.query_at = fill.silent_since + QUERY_INTERVAL_S
        self._memory.release(fill.companion_pages)
        fill.pages, fill.companion_pages = [], []
        fill.request = None
        if not notify:
            return
        self.counters.fills_failed += 1
        logger.warning(
            "fill of %s by %s ended early: %s",
            request.key.request_id,
            fill.candidate.worker_id,
            why,
        )
        request.sources.candidates.pop(0)
        self._events.failed(request)

    def _prove(self, fill: Fill) -> None:
        """Records the proof that a filler has stopped. Over NIXL, bytes may still arrive until a
        fence.
        """
        if fill.state is FillState.ACCEPTED:
            self._end_accepted(fill)
            return
        if fill.state is not FillState.STOPPING:
            self._fail(fill, "the filler's process exited")
        if fill.lease_id not in self._fills:
            return
        fill.is_proven = True
        if not fill.uses_nixl:
            self._end_quarantine(fill)

    def _fence_if_due(self) -> None:
        proven = [fill for fill in self._fills.values() if fill.is_proven]
        if proven and all(fill.state is FillState.STOPPING for fill in self._fills.values()):
            self._transport.fence()
            for fill in proven:
                self._end_quarantine(fill)

    def _since_submit(self, fill: Fill) -> float:
        assert fill.request is not None
        return self._clock() - fill.request.timeline.submitted_at

    def _end_quarantine(self, fill: Fill) -> None:
        self._landing.end_quarantine(fill.landed)
        del self._fills[fill.lease_id]
