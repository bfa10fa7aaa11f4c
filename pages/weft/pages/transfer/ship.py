"""Ships chunks outside the steps: a thread prepares pages, posts writes and polls them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.contract import faults
from weft.contract.handle import DATA_CHUNK_BYTES, FillEvent, NixlTargetInfo, SharedTargetInfo
from weft.pages.marks import MAX_WAITING, WorkMark
from weft.pages.transfer.chunks import (
    SLOT_BYTES,
    ChunkPosted,
    LeaseTerm,
    PeerOpened,
    ShipChunk,
    ShipResult,
)
from weft.pages.transfer.lanes import Target
from weft.pages.transfer.nixl import (
    PeerKey,
    TransferError,
    encode_notification,
)
from weft.pages.transfer.nixl_wire import MAX_NOTIFIED_DIGESTS
from weft.pages.transfer.shared import OutgoingData, SharedSenders, WriteHandle
from weft.pages.transfer.source import PageSource, Reading

logger = logging.getLogger(__name__)

STOP_BUDGET_S = 5.0
"""Seconds that a stopped lease's posted writes may take to end. Then their agent is destroyed."""
MIN_POLL_S, MAX_POLL_S = 5e-5, 1e-3
POLLED_SHARE = 1 / 8
"""Time between two polls, as a share of the time waited so far."""
STOPPED = "the lease was stopped"
TIDY_S = 1.0
"""Seconds after which a resting thread looks whether an owner whose memory is mapped is gone."""
MAX_EARLY = MAX_WAITING
"""Most chunks that are read early at once. Each keeps a pinned buffer of page numbers until the
step before it has ended; with more chunks this thread would have to wait for a free buffer.
"""


def poll_pause_s(waited_s: float) -> float:
    """Seconds until the next poll of a transfer that has been under way for `waited_s`."""
    return min(max(MIN_POLL_S, POLLED_SHARE * waited_s), MAX_POLL_S)


Shipped = ShipResult | ChunkPosted | PeerOpened | tuple[bytes, FillEvent]
"""An item that a shipper returns: an outcome, a post, an answer about an owner, or a `data` event
of a lease.
"""


class Senders(Protocol):
    """Writes pages over NIXL, from this process's pool, or also from those of other hosts."""

    def connect(self, peer_key: PeerKey, target: NixlTargetInfo) -> None: ...

    def write(
        self,
        peer_key: PeerKey,
        target: NixlTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        notification: bytes,
        term: LeaseTerm | None = None,
    ) -> WriteHandle: ...

    def close_peer(self, peer_key: PeerKey) -> bool: ...

    def close_unused(self) -> None: ...

    def describe(self) -> str: ...

    def close(self) -> object: ...


@dataclass(slots=True)
class _Read:
    chunk: ShipChunk
    result: ShipResult
    reading: Reading


@dataclass(slots=True)
class _Posted:
    chunk: ShipChunk
    result: ShipResult
    reading: Reading
    handle: WriteHandle
    stop_by: float | None = None


class ShipThread:
    """Implements `Shipper` over writes or `data` events. Without `agents`, NIXL is not available;
    without `shared`, no memory is mapped. Any thread may call `wake`, after a result or event was
    queued. `nixl_source` is the source of what `agents` write; None: `source`.
    """

    def __init__(
        self,
        source: PageSource,
        agents: Senders | None,
        wake: Callable[[], None],
        shared: SharedSenders | None = None,
        outgoing: OutgoingData | None = None,
        nixl_source: PageSource | None = None,
    ) -> None:
        self._outgoing = outgoing
        self._source = source
        self._nixl_source = nixl_source or source
        self._agents = agents
        self._shared = shared
        self._wake = wake
        self.before_digest: Callable[[ShipChunk], None] | None = None
        """Test hook, called with a chunk before its pages are read from the pool."""
        self._queue: deque[ShipChunk] = deque()
        self._early_orders: deque[tuple[ShipChunk, WorkMark] | bytes] = deque()
        """Chunks to read early, and leases whose early readings are to be dropped, in order."""
        self._early: dict[tuple[bytes, int], Reading] = {}
        """Readings whose step is not known to be committed, by lease and chunk."""
        self._dropped: list[Reading] = []
        """Early readings that are not needed any more. The device may still be copying."""
        self._reading: deque[_Read] = deque()
        self._connects: deque[tuple[PeerKey, Target]] = deque()
        self._stopped: set[bytes] = set()
        self._posted: list[_Posted] = []
        self._out: deque[Shipped] = deque()
        self._signal = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="weft-ship", daemon=True)
        self._thread.start()

    @property
    def holds_data(self) -> bool:
        """Whether data may be put into memory that the server process has mapped."""
        return self._outgoing is not None and self._outgoing.is_mapped

    @property
    def max_chunk_pages(self) -> int | None:
        """Most pages of one chunk; None: as many as one write can carry."""
        return self._source.max_chunk_pages

    @property
    def reads_early(self) -> bool:
        """Whether `read_early` does anything."""
        return self._source.reads_early and self._nixl_source is self._source

    def read_early(self, chunk: ShipChunk, after: WorkMark) -> None:
        """Starts reading the pages of a chunk that will be shipped once the step before the mark is
        committed, unless its lease is stopped before.
        """
        self._early_orders.append((chunk, after))
        self._signal.set()

    def ship(self, chunk: ShipChunk) -> None:
        self._queue.append(chunk)
        self._signal.set()

    def prepare(self, owner: PeerKey, target: Target) -> None:
        self._connects.append((owner, target))
        self._signal.set()

    def stop(self, lease_id: bytes) -> None:
        self._stopped.add(lease_id)
        self._early_orders.append(lease_id)
        self._signal.set()

    def forget(self, lease_id: bytes) -> None:
        self._stopped.discard(lease_id)

    def take(self) -> list[Shipped]:
        """Posts, results and `data` events since the last call, in order."""
        taken = []
        while self._out:
            taken.append(self._out.popleft())
        return taken

    def sizes(self) -> dict[str, int]:
        """Approximate numbers of stopped leases that are not closed, and of chunks in progress."""
        return {
            "stopped_leases": len(self._stopped),
            "shipments": (
                len(self._queue) + len(self._reading) + len(self._posted) + len(self._out)
            ),
            "early_readings": len(self._early_orders) + len(self._early) + len(self._dropped),
        }

    def close(self) -> None:
        """Stops the thread. Posted writes are abandoned with the process."""
        self._is_closing = True
        self._signal.set()
        self._thread.join(timeout=STOP_BUDGET_S)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        moved_at = time.monotonic()
        while not self._is_closing:
            waits = self._queue or self._reading or self._posted or self._dropped
            if not (waits or self._connects or self._early_orders):
                has_peers = self._shared is not None and self._shared.has_peers
                self._signal.wait(TIDY_S if has_peers else None)
                self._signal.clear()
                if self._shared is not None:
                    self._shared.tidy()
                moved_at = time.monotonic()
            if self._connects:
                self._connect(*self._connects.popleft())
            self._take_early_orders()
            self._dropped = [reading for reading in self._dropped if not self._is_dropped(reading)]
            # The thread reads the next chunk from the pool while the previous one is written.
            is_moving = bool(self._queue) and self._begin(self._queue[0])
            is_moving |= bool(self._reading) and self._post_read(self._reading[0])
            is_moving |= bool(self._posted) and self._poll()
            if is_moving:
                moved_at = time.monotonic()
            elif self._queue or self._reading or self._posted or self._dropped:
                waited_s = time.monotonic() - moved_at
                time.sleep(poll_pause_s(waited_s))

    def _source_of(self, chunk: ShipChunk) -> PageSource:
        return self._nixl_source if isinstance(chunk.target, NixlTargetInfo) else self._source

    def _connect(self, owner: PeerKey, target: Target) -> None:
        if isinstance(target, SharedTargetInfo):
            self._open(owner, target)
            return
        try:
            if self._agents is not None:
                self._agents.connect(owner, target)
        except TransferError as error:
            logger.warning("cannot connect to %s yet: %s", owner[0], error)

    def _open(self, owner: PeerKey, target: SharedTargetInfo) -> None:
        is_open = self._shared is not None
        try:
            if self._shared is not None:
                self._shared.connect(owner, target)
        except TransferError as error:
            logger.info("pages for %s go as data: %s", owner[0], error)
            is_open = False
        except Exception:  # The thread must survive any error of an owner's.
            logger.exception("pages for %s go as data", owner[0])
            is_open = False
        self._emit(PeerOpened(owner, is_open))

    def _emit(self, item: Shipped) -> None:
        self._out.append(item)
        self._wake()

    def _take_early_orders(self) -> None:
        while self._early_orders:
            order = self._early_orders.popleft()
            if isinstance(order, bytes):
                unwanted = [key for key in self._early if key[0] == order]
                self._dropped += [self._early.pop(key) for key in unwanted]
                continue
            chunk, after = order
            if len(self._early) + len(self._dropped) >= MAX_EARLY:
                continue
            try:
                if self.before_digest is not None:
                    self.before_digest(chunk)
                reading = self._source.begin(chunk.local_pages, chunk.digests, after)
            except Exception:  # The chunk is read again, after its step.
                logger.exception("reading pages early failed")
                continue
            if reading is not None:
                self._early[chunk.lease_id, chunk.index] = reading

    def _is_dropped(self, reading: Reading) -> bool:
        """Frees a dropped reading once the device has ended it."""
        try:
            if not reading.is_done():
                return False
        except Exception:  # The device is lost. The engine's next step notices.
            logger.exception("reading pages early failed")
        self._source.end(reading)
        return True

    def _begin(self, chunk: ShipChunk) -> bool:
        """The reading may have begun early. False: there is no room for it now."""
        self._take_early_orders()  # The order to read a chunk precedes that to ship it.
        result = ShipResult(chunk.lease_id, chunk.index)
        reading = self._early.pop((chunk.lease_id, chunk.index), None)
        if chunk.lease_id in self._stopped:
            result.error = STOPPED
            if reading is not None:
                self._dropped.append(reading)
                reading = None
        elif reading is None:
            try:
                if self.before_digest is not None:
                    self.before_digest(chunk)
                reading = self._source_of(chunk).begin(chunk.local_pages, chunk.digests)
                if reading is None:
                    return False
            except Exception as error:  # The thread must survive any error of a chunk.
                logger.exception("reading pages failed")
                result.error = f"{type(error).__name__}: {error}"
        self._queue.popleft()
        if reading is not None:
            self._reading.append(_Read(chunk, result, reading))
        else:
            self._emit(result)
        return True

    def _post_read(self, read: _Read) -> bool:
        result = read.result
        handle: WriteHandle | None = None
        try:
            if not read.reading.is_done():
                return False
            if read.chunk.lease_id in self._stopped:
                result.error = STOPPED
            else:
                handle = self._send(read)
        except TransferError as error:
            result.error = str(error)
        except Exception as error:  # The thread must survive any error of a chunk.
            logger.exception("shipping failed")
            result.error = f"{type(error).__name__}: {error}"
        self._reading.popleft()
        if handle is not None:
            self._posted.append(_Posted(read.chunk, result, read.reading, handle))
            if isinstance(read.chunk.target, NixlTargetInfo):
                # A notification follows the bytes; without one the word of them must do so.
                self._emit(ChunkPosted(result.lease_id, result.index, result.digests))
        else:
            self._source_of(read.chunk).end(read.reading)
            self._emit(result)
        return True

    def _send(self, read: _Read) -> WriteHandle | None:
        """None: all of it has been sent."""
        chunk, result = read.chunk, read.result
        result.digests = read.reading.digests()
        result.digest_s = read.reading.digest_s()
        result.posted_at = time.monotonic()
        if faults.SHIP_POST.is_armed and self._is_faulty(read):
            return None
        if chunk.target is not None:
            handle = self._post(read)
            result.post_ended_at = time.monotonic()
            return handle
        self._send_data(read)
        result.post_ended_at = result.completed_at = time.monotonic()
        return None

    def _is_faulty(self, read: _Read) -> bool:
        """Passes the fault point. Returns whether the chunk is dropped."""
        kind = faults.SHIP_POST.fire()
        if kind == "drop":
            read.result.completed_at = time.monotonic()
        elif kind == "duplicate" and read.chunk.target is not None:
            # Wait for the duplicate, so that none of its bytes arrive after the chunk's own.
            again = self._post(read)
            while again.poll() != "done" and not self._is_closing:
                time.sleep(MAX_POLL_S)
        elif kind == "duplicate":
            self._send_data(read)
        return kind == "drop"

    def _post(self, read: _Read) -> WriteHandle:
        chunk = read.chunk
        if isinstance(chunk.target, SharedTargetInfo):
            assert self._shared is not None, "a fill was accepted that cannot be written"
            return self._shared.write(
                (chunk.owner_id, chunk.owner_epoch),
                chunk.target,
                read.reading.pages,
                chunk.remote_pages,
                lambda: self._check_wanted(chunk),
            )
        assert self._agents is not None, "a NIXL fill was accepted without NIXL"
        assert chunk.target is not None
        digests = read.result.digests
        is_notified = len(digests) <= min(chunk.target.max_notified_digests, MAX_NOTIFIED_DIGESTS)
        report = chunk.report(digests) if is_notified else None
        return self._agents.write(
            (chunk.owner_id, chunk.owner_epoch),
            chunk.target,
            read.reading.pages,
            chunk.remote_pages,
            encode_notification(chunk.owner_epoch, chunk.lease_id, chunk.index, report),
            chunk.term,
        )

    def _check_wanted(self, chunk: ShipChunk) -> None:
        chunk.term.check(chunk.owner_id)
        if chunk.lease_id in self._stopped:
            raise TransferError(STOPPED, worker_id=chunk.owner_id)

    def _send_data(self, read: _Read) -> None:
        chunk = read.chunk
        page_size = (chunk.end_token - chunk.start_token) // len(chunk.local_pages)
        for index, page in enumerate(read.reading.pages):
            chunk.term.check(chunk.owner_id)
            content = self._source.exchanged[page]
            for offset in range(0, len(content), DATA_CHUNK_BYTES):
                part = content[offset : offset + DATA_CHUNK_BYTES]
                event = FillEvent(
                    kind="data",
                    chunk=chunk.index,
                    start_token=chunk.start_token + index * page_size,
                    offset=offset,
                )
                if chunk.slot is None or self._outgoing is None:
                    event.data = part.tobytes()
                else:
                    event.held_at = chunk.slot * SLOT_BYTES + index * len(content) + offset
                    event.num_held = len(part)
                    self._outgoing.bytes[event.held_at : event.held_at + len(part)] = part
                self._emit((chunk.lease_id, event))

    def _poll(self) -> bool:
        before = len(self._posted)
        self._posted = [posted for posted in self._posted if not self._ended(posted)]
        return len(self._posted) < before

    def _ended(self, posted: _Posted) -> bool:
        result = posted.result
        try:
            if posted.handle.poll() == "done":
                result.completed_at = time.monotonic()
                self._source_of(posted.chunk).end(posted.reading)
                self._emit(result)
                return True
        except TransferError as error:
            result.error = str(error)
            result.needs_fence = error.may_still_arrive
            # A refused write leaves the agent to the owner's other leases. A device may have made
            # a part of the copies into mapped memory.
            if error.may_still_arrive or isinstance(posted.chunk.target, SharedTargetInfo):
                self._close_peer(posted)
            else:
                self._source_of(posted.chunk).end(posted.reading)
                self._emit(result)
            return True
        except Exception as error:  # The thread must survive any error of a chunk.
            logger.exception("shipping failed")
            result.error = f"{type(error).__name__}: {error}"
            self._close_peer(posted)
            return True
        if posted.chunk.lease_id not in self._stopped:
            return False
        now = time.monotonic()
        posted.stop_by = posted.stop_by or now + STOP_BUDGET_S
        if now < posted.stop_by:
            return False
        result.error = "the write did not end after the lease was stopped"
        self._close_peer(posted)
        return True

    def _close_peer(self, posted: _Posted) -> None:
        """Ends a write of unknown outcome by destroying its agent, or when its copy has ended."""
        agents: Senders | SharedSenders | None = self._agents
        if isinstance(posted.chunk.target, SharedTargetInfo):
            agents = self._shared
        assert agents is not None
        owner = (posted.chunk.owner_id, posted.chunk.owner_epoch)
        try:
            # Also False if an earlier failure has closed the peer, whose result counts then.
            posted.result.needs_fence |= agents.close_peer(owner)
        except TransferError as error:
            logger.error("the agent towards %s lives on: %s", owner[0], error)
            posted.result.is_stranded = True
        else:
            self._source_of(posted.chunk).end(posted.reading)
        self._emit(posted.result)
