"""The whole memory system of an engine around a model that writes what each position should hold.

Pool, prefix cache, scheduler, tiers and the link to a KV store are the real ones; the model, the
store and remote fillers are made up. What a position holds is a function of the tokens up to it, so
that every read of a step can be checked against it.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.handle import NixlTargetInfo
from weft.contract.keys import token_bytes
from weft.contract.pages import PageCopy
from weft.contract.store import (
    StoreAnswer,
    StoreLookup,
    StorePut,
    StorePutResult,
    StoreSegment,
)
from weft.contract.timeline import FillCandidate, Timeline
from weft.engine.base.config import EvictionName
from weft.engine.loop.chats import Sessions
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import ChatSession, PageSources, Request, RequestKey, State
from weft.engine.scheduler.events import SchedulerEvents
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.plan import Plan, PlanItem
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.build import TierComponents
from weft.engine.sources.tiers.fills import TieredFills
from weft.engine.sources.tiers.tiers import Tiers
from weft.engine.sources.tiers.write_through import write_through
from weft.pages.memory.chat_pins import SessionPins
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree
from weft.pages.tiers.disk import PageFiles, disk_tier
from weft.pages.tiers.host import host_tier
from weft.pages.tiers.policy import TierPolicy
from weft.pages.transfer.page_pool import HostPool
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.scheduling.fill_events import fill_events_to

PAGE = 4
POSITION_BYTES = 16
PAGE_BYTES = PAGE * POSITION_BYTES
NAMESPACES = [bytes([number]) * 32 for number in (1, 2)]
PREFILL = FillCandidate(worker_id="p", address="p", epoch=1)
CATCH_UP = 0.03
"""Share of steps before which the tiers' threads catch up: how much they move is then no matter of
the machine's speed alone."""
LIMITS = SchedulerLimits(PAGE, 64, 16, 6)


def content_of(namespace: bytes, tokens: Sequence[int], position: int) -> bytes:
    """The KV of a position in this simulation."""
    data = namespace + token_bytes(tokens[: position + 1])
    return hashlib.blake2b(data, digest_size=POSITION_BYTES).digest()


@dataclass
class Step:
    """A step that has begun: what the device was told then."""

    number: int
    plan: Plan
    items: list[PlanItem]
    copies: list[PageCopy]
    pages: list[list[int]]
    is_done: bool = False


class Others:
    """Remote fillers and the store as the scheduler's `Fills`; they fail at random.

    What was reserved for a fill that fails is quarantined for a while, and written to meanwhile.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self.on_filled = None
        self.open: dict[int, tuple[Request, list[int]]] = {}
        self.quarantined: list[list[int]] = []
        self.num_filled: Counter[str] = Counter()

    def num_more(self, request: Request, end_token: int) -> int:
        return 0

    def next_state(self, request: Request) -> State:
        while request.sources.candidates and self._end(request) <= request.num_computed:
            request.sources.candidates.pop(0)
        if not request.sources.candidates:
            return State.PREFILLING
        return State.LOADING if request.sources.candidates[0].kind == "kvstore" else State.FILLING

    def has_room(self, request: Request) -> bool:
        return True

    def start(self, request: Request) -> bool:
        if id(request) not in self.open:
            count = (self._end(request) - request.num_computed) // PAGE
            pages = self._system.memory.allocate(count, request.namespace, promised=True)
            request.held.num_promised -= count
            self.open[id(request)] = (request, pages)
        return True

    def abandon(self, request: Request) -> None:
        _, pages = self.open.pop(id(request), (request, []))
        self._system.memory.release(pages)

    def turn(self) -> None:
        system, rng = self._system, self._system.rng
        for pages in list(self.quarantined):
            for page in pages:  # Something late arrives.
                system.rows[page] = rng.randrange(256)
            if rng.random() < 0.2:
                self.quarantined.remove(pages)
                system.memory.end_quarantine(pages)
        for request, pages in list(self.open.values()):
            kind = request.sources.candidates[0].kind
            if rng.random() < 0.1:
                del self.open[id(request)]
                system.memory.quarantine(pages)
                self.quarantined.append(pages)
                request.sources.candidates.pop(0)
                system.scheduler.fill_failed(request)
                continue
            for page in pages[: rng.randint(0, len(pages))]:
                first = request.num_computed
                for offset in range(PAGE):
                    system.write(request, page, offset, first + offset)
                request.held.pages.append(page)
                request.num_computed += PAGE
                pages.remove(page)
                self.num_filled[kind] += 1
            system.scheduler.publish(request)
            if not pages:
                del self.open[id(request)]
                system.scheduler.fill_completed(request)

    def _end(self, request: Request) -> int:
        end = (request.num_tokens - 1) // PAGE * PAGE
        first = request.sources.candidates[0]
        return min(end, first.match_tokens) if first.kind == "kvstore" else end


class _Plane:
    """The store's way to the pool: digests at once."""

    def __init__(self, system: System) -> None:
        self.target: NixlTargetInfo | None = None
        self.port = self
        self._system = system
        self.asked: list[tuple[int, list[int]]] = []
        self.max_queued_pages, self.max_put_pages = 512, 64

    def read(self, page: int) -> bytes:
        return self._system.rows[page].tobytes()

    def write(self, page: int, offset: int, data: bytes) -> None:
        raise AssertionError("the store link writes nothing")

    def expose(self, number: int, pages: Sequence[int]) -> bool:
        self.asked.append((number, list(pages)))
        return True

    def conceal(self, pages: Sequence[int]) -> None:
        assert all(page > 0 for page in pages)

    def fence(self) -> None:
        raise AssertionError("the store link fences nothing")


class System:
    """One worker's memory, and random events.

    Args:
        rng: Decides everything but the threads' speed.
        folder: For the disk tier.
        num_pages: Of the pool.
        num_slots: Of host memory, and of the disk.
        policy: Of eviction, everywhere.
        threshold: `write_through_threshold`.
        is_overlapped: A step is planned while the one before it is under way.
    """

    def __init__(
        self,
        rng: random.Random,
        folder: Path,
        *,
        num_pages: int,
        num_slots: tuple[int, int],
        policy: EvictionName,
        threshold: int,
        is_overlapped: bool,
    ) -> None:
        self.rng = rng
        self._is_overlapped = is_overlapped
        self._flying: Step | None = None
        self.rows = np.zeros((num_pages, PAGE_BYTES), np.uint8)
        order = EVICTION_POLICIES[policy]
        cache = PrefixTree(PAGE, order)
        self.memory = PageMemory(num_pages, cache, tracks_freed=True)
        self.pages = RequestPages(self.memory, cache, PAGE)
        self._files = PageFiles(folder)
        parts = TierComponents(
            host=host_tier(num_slots[0], PAGE_BYTES, order)[0],
            disk=disk_tier(self._files, num_slots[1] * PAGE_BYTES, PAGE_BYTES, order),
            files=self._files,
            make_pool=lambda: HostPool(self.rows),
            notices=[],
        )
        policies = TierPolicy(threshold, load_back_threshold=0)
        self.tiers = Tiers(
            parts,
            PAGE,
            self.memory,
            policies,
            lambda: 0.0,
            self.pages.num_cached_pages,
            self.clock,
            progress_timeout_s=2.0,
            num_continuable_pages=self.pages.num_continuable_pages,
            events=fill_events_to(self),
            wake=lambda: None,
        )
        self.others = Others(self)
        others = cast("OwnerFills", self.others)
        fills = TieredFills(self.tiers, None, others, policies, PAGE_BYTES, PAGE, lambda: 0.0)
        waiting = make_queue("fcfs", 30.0, self.pages.num_cached_tokens, 64)
        events = SchedulerEvents()
        self.scheduler = Scheduler(
            LIMITS,
            self.pages,
            waiting,
            fills,
            lambda request: None,
            lambda slot: None,
            events=events,
        )
        self.sessions = Sessions(SessionPins(cache, num_pages // 3, num_pages, 5.0), self.clock)
        events.leaving.append(self.sessions.on_leaving)
        self.cache = cache
        self._sent: list[StoreLookup | StorePut] = []
        self._plane = _Plane(self)
        self.store = StoreLink(
            PAGE, self.memory, self.tiers.num_held_pages, self._plane, self._sent.append, self.clock
        )
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        """The store's pages and their content."""
        write_through(events, policies, self.tiers, self.store)
        self.now = 0.0
        self.num_added = 0
        self.num_read_positions = 0

    def clock(self) -> float:
        return self.now

    # -- what may happen -------------------------------------------------------------------------

    def submit(
        self, tokens: list[int], namespace: bytes, max_tokens: int, num_fillers: int
    ) -> None:
        self.num_added += 1
        request = bare_request(
            tokens,
            PAGE,
            namespace,
            key=RequestKey(0, str(self.num_added), 1),
            max_tokens=max_tokens,
            arrival=self.num_added,
            timeline=Timeline(submitted_at=self.now),
            sources=PageSources([PREFILL] * num_fillers),
            chat=ChatSession(self.rng.choice(["", "a", "b", "c"]), self.rng.random() < 0.1),
        )
        self.tiers.look_up(request)
        self.store.look_up(request)
        self.scheduler.add(request)

    def cancel_any(self) -> None:
        requests = self.requests()
        if requests:
            self.scheduler.finish(self.rng.choice(requests))

    def flush(self) -> None:
        self.sessions.pins.clear()
        self.memory.flush_cache()
        self.tiers.flush()

    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        scheduler = self.scheduler
        queues = (scheduler.waiting, scheduler.filling, scheduler.prefilling, scheduler.running)
        return [request for queue in queues for request in queue]

    def step(self) -> None:
        """Does what an engine does in a turn, in the same order."""
        self.now += 0.05
        self.sessions.tick()
        self.tiers.take()
        if self.rng.random() < CATCH_UP:
            self._await_movers()
        self._take_store()
        plan = self.scheduler.plan(self.now)
        self.scheduler.progressed.clear()
        self.scheduler.preempted.clear()
        self.tiers.write_back()
        self.rows[self.memory.take_wipes()] = 0
        self.tiers.begin_loads()
        step = self._launch(plan) if len(plan) else None
        if self._flying is not None:
            self._end(self._flying)
        self._flying = step
        if step is not None and self.rng.random() < 0.5:
            self._run(step)
        if step is not None and not self._is_overlapped:
            self._flying = None
            self._end(step)
        self.others.turn()
        self.store.tick(is_computing=step is not None)
        self.tiers.tick()
        for page in self.memory.take_freed():
            self.rows[page] = 255

    def _await_movers(self) -> None:
        """Lets the tiers' threads do what they were given, if nothing of it hangs."""
        deadline = time.monotonic() + 1.0
        while self.tiers.num_open and time.monotonic() < deadline:
            time.sleep(0.0002)
            self.tiers.take()

    def _launch(self, plan: Plan) -> Step:
        number = self.scheduler.launch(plan)
        copies: list[PageCopy] = []
        self.pages.make_copies(copies.extend)
        items = list(plan)
        return Step(number, plan, items, copies, [list(item.request.held.pages) for item in items])

    def _run(self, step: Step) -> None:
        """The device gets to it, perhaps long after it was told."""
        if step.is_done:
            return
        step.is_done = True
        for copy in step.copies:
            self.rows[copy.destination] = self.rows[copy.source]
        for item, pages in zip(step.items, step.pages, strict=True):
            self._check_reads(item.request, pages, item.start)
            for position in range(item.start, item.start + item.num_tokens):
                self.write(item.request, pages[position // PAGE], position % PAGE, position)

    def _end(self, step: Step) -> None:
        """Commits a step, and draws tokens."""
        self._run(step)
        self.scheduler.commit(step.number, step.plan)
        for request in [item.request for item in step.items if item.draws]:
            if request.state is State.RUNNING:
                request.tokens.append(self.rng.randrange(3))
                if request.num_generated >= request.max_tokens or self.rng.random() < 0.03:
                    self.scheduler.finish(request)

    def write(self, request: Request, page: int, offset: int, position: int) -> None:
        """Writes the KV of one position."""
        start = offset * POSITION_BYTES
        right = content_of(request.namespace, request.tokens, position)
        self.rows[page, start : start + POSITION_BYTES] = np.frombuffer(right, np.uint8)

    def _check_reads(self, request: Request, pages: Sequence[int], end: int) -> None:
        """Attention of a step reads all that comes before it."""
        for position in range(end):
            start = position % PAGE * POSITION_BYTES
            page = pages[position // PAGE]
            found = self.rows[page, start : start + POSITION_BYTES].tobytes()
            assert found == content_of(request.namespace, request.tokens, position), (
                request.key.request_id,
                position,
                request.timeline.fills,
            )
        self.num_read_positions += end

    # -- the store -------------------------------------------------------------------------------

    def _take_store(self) -> None:
        asked, self._plane.asked = self._plane.asked, []
        for tag, pages in asked:
            self.store.on_digested(tag, [0] * len(pages), pages)
        sent = self._sent.copy()
        self._sent.clear()
        for message in sent:
            if self.rng.random() < 0.3:
                self._sent.append(message)  # It comes later.
            elif isinstance(message, StoreLookup):
                self.store.on_answer(self._answer(message))
            else:
                self.store.on_result(self._take(message))

    def _answer(self, lookup: StoreLookup) -> StoreAnswer:
        if self.rng.random() < 0.1:
            return StoreAnswer(lookup=lookup.lookup)
        held = next((i for i, key in enumerate(lookup.keys) if key not in self._held), None)
        count = len(lookup.keys) if held is None else held
        cut = self.rng.randint(0, count)
        segments = [
            StoreSegment(num_pages=pages, store_id=name, address=name, epoch=1)
            for name, pages in (("s0", cut), ("s1", count - cut))
            if pages
        ]
        return StoreAnswer(lookup=lookup.lookup, segments=segments, epochs={"s0": 1, "s1": 1})

    def _take(self, put: StorePut) -> StorePutResult:
        if self.rng.random() < 0.2:
            return StorePutResult(put=put.put, is_answered=False)
        for key, data in zip(put.keys, put.data, strict=True):
            self._held[key] = data
        while len(self._held) > 60:
            self._held.popitem(last=False)
        return StorePutResult(put=put.put, is_answered=True, stored_pages=len(put.keys))

    # -- ends ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that every page of every tier is in exactly one state."""
        self.memory.check_integrity()
        self.cache.check_integrity()
        for tier in (self.tiers.host, self.tiers.disk):
            assert tier is not None
            tier.pages.check_integrity()

    def settle(self, timeout_s: float = 60.0) -> None:
        """Steps until nothing is under way; then nothing is held."""
        deadline = time.monotonic() + timeout_s
        while self.requests() or self.tiers.num_open or self.store.num_open_pages or self._quiet():
            assert time.monotonic() < deadline, (self.requests(), self.tiers.sizes())
            self.step()
            time.sleep(0.0002)
        self.check()
        counts = self.memory.counts()
        assert counts.free + counts.cached + counts.quarantined == counts.total, counts
        assert (counts.quarantined, self.memory.num_promised_pages) == (0, 0)
        self.sessions.pins.clear()
        assert self.sessions.pins.num_pages == 0
        for tier in (self.tiers.host, self.tiers.disk):
            assert tier is not None
            counts = tier.counts()
            assert counts.free + counts.cached + counts.quarantined == counts.total, counts
            assert counts.quarantined == 0
        assert not any(self.tiers.sizes().values()), self.tiers.sizes()

    def _quiet(self) -> bool:
        stalls = self.tiers.sizes()["tier_stalls"]
        return bool(self.others.quarantined or self._sent or self._flying or stalls)

    def close(self) -> None:
        self.tiers.close()


def arm_any(rng: random.Random) -> str:
    """Arms a random fault for a few times; returns its name."""
    point, kind = rng.choice(
        [
            (faults.TIER_HOST, "corrupt"),
            (faults.TIER_HOST, "error"),
            (faults.TIER_DISK_READ, "corrupt"),
            (faults.TIER_DISK_READ, "error"),
            (faults.TIER_DISK_WRITE, "error"),
            (faults.TIER_DISK_READ, "delay"),
            (faults.TIER_HOST, "delay"),
        ]
    )
    point.clear()
    spec = FaultSpec(
        point=point.name, kind=kind, count=3, probability=0.5, seed=rng.randrange(99), delay_s=0.01
    )
    point.arm(spec)
    return f"{point.name} {kind}"


def disarm() -> None:
    """Disarms all faults."""
    for point in (faults.TIER_HOST, faults.TIER_DISK_READ, faults.TIER_DISK_WRITE):
        point.clear()
