"""Adapters of a worker: orders to load them, reading, the host cache, and copies to the device.

    load order --> read (thread) --> host memory <--> device        (`Residency` assigns places)
                                        |  ^
                   memory is needed     v  | a request wants it again
                                       disk

No method waits: threads read and write adapters. Requests whose adapter is not on the device wait
before the scheduler's queue, while other requests continue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.checkpoint.adapters.limits import LoraLimits
from weft.checkpoint.adapters.rows import DevicePlace, Needs
from weft.contract.adapters import AdapterOrder, AdapterPlace, AdapterState
from weft.contract.clock import monotonic
from weft.contract.errors import (
    AdapterError,
    AdapterNotFound,
    Internal,
    PeerUnavailable,
    WeftError,
)
from weft.contract.give_way import HostPriority
from weft.contract.submits import Submit
from weft.engine.base.background import BackgroundThread
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.features.lora.host_cache import HostCache
from weft.engine.features.lora.residency import Residency
from weft.engine.features.lora.rows import RowPool
from weft.engine.model.adapters.weights import HostWeights
from weft.engine.scheduler.adapters import Adapters, not_loaded

logger = logging.getLogger(__name__)

READ_STALL_S = 30.0
"""Seconds after which the manager abandons a read, since a disk may never answer."""
MAX_TOLD = 100
"""Most ignored tensors that a report names."""
MAX_STALLED = 4
"""Most threads that are still blocked by abandoned reads. With that many, further reads fail while
the current one stalls.
"""


@dataclass(eq=False, slots=True, kw_only=True)
class _Entry:
    digest: bytes
    name: str
    directory: str
    is_lenient: bool
    is_pinned: bool
    needs: Needs = field(default_factory=dict)
    """Device rows that the adapter needs; valid if `is_held`."""
    rank: int = 0
    num_bytes: int = 0
    left_out: tuple[str, ...] = ()
    is_held: bool = False
    """Whether the adapter has been read and fits."""
    is_unloading: bool = False
    loads: list[int] = field(default_factory=list)
    """Load orders to answer once the adapter is read."""
    unloads: list[int] = field(default_factory=list)
    """Unload orders to answer once the adapter is unused."""
    error: WeftError | None = None

    @property
    def label(self) -> str:
        return f"adapter {self.name or self.digest.hex()[:16]} ({self.directory})"


class AdapterManager(Adapters):
    """Loads and unloads adapters, and brings them to the device for requests.

    Args:
        wake: Called from other threads when `turn` has something to take.
        host: Priority of the engine thread, to which the manager's threads yield.
        on_order: Called with each order, for parts of the engine that must follow it too.
    """

    residency: Residency

    def __init__(
        self,
        limits: LoraLimits,
        pool: LoraPool,
        wake: Callable[[], None],
        host: HostPriority | None = None,
        on_order: Sequence[Callable[[AdapterOrder], None]] = (),
    ) -> None:
        self._limits = limits
        self._on_order = on_order
        self._pool = pool
        self.residency = Residency(RowPool(limits.num_rows, limits.max_loras))
        self._host = HostCache(limits.host_bytes)
        self._entries: dict[bytes, _Entry] = {}
        self._new: deque[_Entry] = deque()
        """Adapters still to be read for the first time."""
        self._reading: _Entry | None = None
        self._was_new = False
        self._wake, self._host_turn = wake, host
        self._reader = BackgroundThread("weft-lora-read", wake, host)
        self._stalled: list[BackgroundThread] = []
        """Reader threads that are still blocked by an abandoned read."""
        self._writer = BackgroundThread("weft-lora-write", wake, host)
        self._is_changed = False
        self._is_held, self._num_writing = False, 0
        self._touched: set[bytes] = set()
        """Adapters whose reported state has changed."""
        self.num_reads = 0
        self.num_writes = 0
        """`num_reads` and `num_writes`: adapters read, and written to the device, since start."""

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    # -- sleep -----------------------------------------------------------------------------------

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        self._is_changed |= self._is_held
        self._is_held = False

    @property
    def is_still(self) -> bool:
        return not self._num_writing

    # -- orders and queries ----------------------------------------------------------------------

    def serves(self, digest: bytes) -> bool:
        """Whether new requests may name the adapter."""
        return self.holds(digest) and not self._entries[digest].is_unloading

    def check(self, submit: Submit) -> None:
        digest = submit.adapter
        # A request that another worker began may end here while the adapter is being unloaded.
        if digest and not (self.serves(digest) or (submit.attempt > 1 and self.holds(digest))):
            raise not_loaded(digest)

    def holds(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.is_held

    def order(self, order: AdapterOrder) -> None:
        self._is_changed = True
        self._touched.add(order.digest)
        if order.action == "load":
            self._load(order)
        else:
            self._unload(order)
        for follow in self._on_order:
            follow(order)

    def states(self) -> list[AdapterState]:
        return [self._state_of(entry) for entry in self._entries.values()]

    def take_changes(self) -> tuple[list[AdapterState], list[bytes]]:
        touched: set[bytes] = set()
        for source in (self._touched, self.residency.touched, self._host.touched):
            touched |= source
            source.clear()
        changed = [self._state_of(self._entries[one]) for one in touched if one in self._entries]
        return changed, [one for one in touched if one not in self._entries]

    def _state_of(self, entry: _Entry) -> AdapterState:
        return AdapterState(
            digest=entry.digest,
            name=entry.name,
            state=self._place_of(entry),
            rank=entry.rank,
            num_bytes=entry.num_bytes,
            num_requests=self.residency.num_requests(entry.digest),
            is_pinned=entry.is_pinned,
            is_unloading=entry.is_unloading,
            error=entry.error.message if entry.error is not None else "",
            left_out=entry.left_out,
        )

    def counters(self) -> dict[str, int]:
        return {
            "adapter_reads": self.num_reads,
            "adapter_writes": self.num_writes,
            "adapter_evictions": self.residency.num_evictions,
        }

    def sizes(self) -> dict[str, int]:
        return {
            "adapter_moves": self._reader.num_open + self._writer.num_open,
            "adapter_stalls": sum(reader.current is not None for reader in self._stalled),
            **self.residency.sizes(),
        }

    def _place_of(self, entry: _Entry) -> AdapterPlace:
        if entry.error is not None:
            return "failed"
        if not entry.is_held:
            return "loading"
        if self.residency.is_loaded(entry.digest):
            return "device"
        return "host" if entry.digest in self._host else "disk"

    def _load(self, order: AdapterOrder) -> None:
        entry = self._entries.get(order.digest)
        if entry is None or entry.error is not None:
            self._begin(order, entry)
            return
        if entry.is_held:
            try:
                self._check_pins(entry, is_pinned=order.is_pinned)
            except AdapterError as error:
                self._reply(order.query, error)
                return
        entry.name, entry.directory = order.name, order.directory
        entry.is_lenient, entry.is_pinned = order.is_lenient, order.is_pinned
        self.residency.pin(entry.digest, is_pinned=order.is_pinned)
        entry.is_unloading = False
        self._answer(entry.unloads, None)
        if entry.is_held:
            self._reply(order.query, None)
        else:
            entry.loads.append(order.query)

    def _begin(self, order: AdapterOrder, failed: _Entry | None) -> None:
        entry = _Entry(
            digest=order.digest,
            name=order.name,
            directory=order.directory,
            is_lenient=order.is_lenient,
            is_pinned=order.is_pinned,
            loads=[order.query],
        )
        if failed is not None:
            self._answer(failed.unloads, None)
        self._entries[order.digest] = entry
        self._new.append(entry)

    def _unload(self, order: AdapterOrder) -> None:
        entry = self._entries.get(order.digest)
        if entry is None:
            self._reply(order.query, None)
            return
        entry.is_unloading = True
        entry.unloads.append(order.query)
        error = AdapterNotFound(f"{entry.label} was unloaded before it was read", stage="load")
        self._answer(entry.loads, error)

    def _answer(self, queries: list[int], error: WeftError | None) -> None:
        for query in queries:
            self._reply(query, error)
        queries.clear()

    def _check_pins(self, entry: _Entry, *, is_pinned: bool) -> None:
        """Raises AdapterError if pinned adapters would leave too little room for an adapter that is
        not pinned.
        """
        held = [e for e in self._entries.values() if e.is_held and e is not entry]
        pinned = [e.needs for e in held if e.is_pinned]
        others = [(f"adapter {e.name}", e.needs) for e in held if not e.is_pinned]
        self._limits.check_beside(entry.label, entry.needs, pinned, others, is_pinned=is_pinned)

    # -- a turn ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Takes the finished work of the threads, and starts the next work."""
        if self._stalled:
            self._let_stalled_go()
        has_news = self._reader.take() | self._writer.take() | self._leave_stalled_read()
        has_news |= self._is_changed
        if not (has_news or self._waitlist.is_changed or self.residency.is_changed):
            return
        self._is_changed = self._waitlist.is_changed = self.residency.is_changed = False
        self._end_unloads()
        wanted = self._wanted()
        for digest in self.residency.stay(wanted):
            self._waitlist.came(digest)
        for index, digest in enumerate([] if self._is_held else wanted):
            self._bring(self._entries[digest], wanted[index + 1 :])
        if self._reading is None:
            self._read_next(wanted)

    def _wanted(self) -> list[bytes]:
        has = self.residency.has
        entries = self._entries.values()
        pinned = [e.digest for e in entries if e.is_pinned and e.is_held and not e.is_unloading]
        wanted = [digest for digest in pinned if not has(digest)]
        for digest in self._waitlist.wanted():
            entry = self._entries.get(digest)
            if entry is None or not entry.is_held:
                reason = entry.error.message if entry is not None and entry.error else "it is gone"
                self._fail_requests(digest, f"adapter {digest.hex()[:16]}: {reason}")
            elif digest not in wanted and not has(digest):
                wanted.append(digest)
        return wanted

    def _fail_requests(self, digest: bytes, message: str) -> None:
        """Fails the requests that wait for an adapter, as retryable: another worker may still have
        it.
        """
        for request in self._waitlist.waiting_for(digest):
            self._fail(request, PeerUnavailable(message, stage="adapter"))

    def _end_unloads(self) -> None:
        for entry in [entry for entry in self._entries.values() if entry.is_unloading]:
            digest = entry.digest
            is_used = self.residency.num_requests(digest) > 0 or self._reading is entry
            if is_used or not self.residency.drop(digest):
                continue
            if entry in self._new:
                self._new.remove(entry)
            self._host.drop(digest)
            del self._entries[digest]
            self._touched.add(digest)
            self._answer(entry.unloads, None)

    def _bring(self, entry: _Entry, later: list[bytes]) -> None:
        digest = entry.digest
        if digest not in self._host:
            return  # The adapter must be read first.
        residency, needs = self.residency, entry.needs
        place = residency.place(digest, needs, later, is_pinned=entry.is_pinned)
        if place is None:
            for leaving in residency.make_leave(digest, needs, later):
                self._waitlist.goes(leaving)
            place = residency.place(digest, needs, later, is_pinned=entry.is_pinned)
        weights = self._host.get(digest)
        if place is not None and weights is not None:
            self._write(entry, place, weights)

    def _write(self, entry: _Entry, place: DevicePlace, weights: HostWeights) -> None:
        self.num_writes += 1
        self._num_writing += 1
        self._writer.give(_Write(self._pool, place, weights, lambda e: self._written(entry, e)))

    def _written(self, entry: _Entry, error: Exception | None) -> None:
        self._num_writing -= 1
        self.residency.arrived(entry.digest)
        if error is None:
            self._waitlist.came(entry.digest)
            return
        logger.error("%s was not written to the device", entry.label, exc_info=error)
        self.residency.drop(entry.digest)
        self._set_failed(entry, Internal(f"{entry.label} was not written to the device: {error}"))

    # -- reading ---------------------------------------------------------------------------------

    def _read_next(self, wanted: list[bytes]) -> None:
        again = self._first_to_read(wanted)
        if self._new and (again is None or not self._was_new):
            entry, self._was_new = self._new.popleft(), True
        elif again is not None:
            entry, self._was_new = again, False
        else:
            return
        if self._reader.current is not None and not self._replace_reader():
            # The last allowed thread is still busy with an abandoned read.
            self._fail_read(entry)
            self._is_changed = True
            self._wake()
            return
        self._reading = entry
        self.num_reads += 1
        self._reader.give(_Read(self._pool, entry, self._was_read))

    def _leave_stalled_read(self) -> bool:
        """Fails a read whose disk does not answer; returns whether it did. The read keeps its
        thread. A new thread serves further reads, if another one is allowed.
        """
        entry = self._reading
        if entry is None or self._reader.stuck_s(monotonic()) < READ_STALL_S:
            return False
        self._reading = None
        self._replace_reader()
        self._fail_read(entry)
        return True

    def _replace_reader(self) -> bool:
        """Starts another reader in place of a stalled one; returns whether that is allowed."""
        self._let_stalled_go()
        if len(self._stalled) == MAX_STALLED:
            return False
        self._reader.take_back()
        self._stalled.append(self._reader)
        self._reader = BackgroundThread(self._reader.name, self._wake, self._host_turn)
        return True

    def _let_stalled_go(self) -> None:
        """Drops reader threads that have returned from stalled reads, and the weights that they
        read.
        """
        self._stalled = [reader for reader in self._stalled if reader.current is not None]

    def _fail_read(self, entry: _Entry) -> None:
        message = f"{entry.label} was not read within {READ_STALL_S:g} s: its disk does not answer"
        logger.error(message)
        self._set_failed(entry, PeerUnavailable(message, stage="adapter"))

    def _first_to_read(self, wanted: list[bytes]) -> _Entry | None:
        """The first wanted adapter that is not in host memory and fits there together with those
        wanted before it.
        """
        num_bytes = 0
        for digest in wanted:
            entry = self._entries[digest]
            if self.residency.has(digest):
                continue  # The adapter got its place in this turn.
            num_bytes += entry.num_bytes
            if num_bytes > self._limits.host_bytes:
                return None
            if digest not in self._host:
                return entry
        return None

    def _was_read(
        self, entry: _Entry, weights: HostWeights | None, error: Exception | None
    ) -> None:
        if entry is not self._reading:
            return  # The read was abandoned.
        self._reading = None
        if weights is not None:
            try:
                self._take(entry, weights)
            except AdapterError as refused:
                error = refused
        if error is None:
            self._answer(entry.loads, None)
            return
        if not isinstance(error, WeftError):
            logger.error("%s was not read", entry.label, exc_info=error)
            error = Internal(f"{entry.label} was not read: {type(error).__name__}: {error}")
        self._set_failed(entry, error)

    def _take(self, entry: _Entry, weights: HostWeights) -> None:
        """Accepts a read adapter. Raises AdapterError if its digest is wrong or it does not fit."""
        if weights.digest != entry.digest:
            raise AdapterError(
                f"{entry.label} has the digest {weights.digest.hex()[:16]}, not "
                f"{entry.digest.hex()[:16]}: it was changed since it was registered"
            )
        # The digest does not cover the draft adapter, which may have changed since the last read.
        entry.needs, entry.rank, entry.num_bytes = weights.needs, weights.rank, weights.num_bytes
        entry.left_out = weights.left_out[:MAX_TOLD]
        if not entry.is_held:
            self._limits.check(entry.label, entry.needs, entry.num_bytes)
            if not entry.is_unloading:
                self._check_pins(entry, is_pinned=entry.is_pinned)
            entry.is_held = True
            self._touched.add(entry.digest)
        wanted = self._wanted()
        self._host.put(weights, wanted)
        if wanted or entry.is_unloading:
            return  # Adapters that requests wait for have precedence for free rows.
        place = self.residency.place_if_free(entry.digest, entry.needs, is_pinned=entry.is_pinned)
        if place is not None:
            self._write(entry, place, weights)

    def _set_failed(self, entry: _Entry, error: WeftError) -> None:
        entry.error, entry.is_held = error, False
        self._touched.add(entry.digest)
        self._host.drop(entry.digest)
        self._answer(entry.loads, error)
        self._fail_requests(entry.digest, error.message)


@dataclass(slots=True)
class _Read:
    pool: LoraPool
    entry: _Entry
    done: Callable[[_Entry, HostWeights | None, Exception | None], None]
    weights: HostWeights | None = None
    error: Exception | None = None

    def run(self) -> None:
        try:
            entry = self.entry
            self.weights = self.pool.read(entry.directory, is_lenient=entry.is_lenient)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.done(self.entry, self.weights, self.error)


@dataclass(slots=True)
class _Write:
    pool: LoraPool
    place: DevicePlace
    weights: HostWeights
    done: Callable[[Exception | None], None]
    error: Exception | None = None

    def run(self) -> None:
        try:
            self.pool.write(self.place, self.weights)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.done(self.error)
