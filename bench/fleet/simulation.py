"""Runs a trace through gateways with a routing policy, over simulated workers.

The policies, the view, the load estimates and the page index are the gateway's own classes. The
workers, and the delay of reports and events to the gateways, are made up.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from weft.gateway.routing import (
    FleetPageIndex,
    LoadEstimate,
    Policy,
    PolicyOptions,
    PoolView,
    RoutingRequest,
    WorkerView,
    make_policy,
)

from fleet.trace import PAGE_SIZE, Arrival, PageNames
from fleet.workers import DecodeWorker, Job, PageCache, PrefillWorker, SimulatedWorker


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A simulated fleet."""

    policy: str
    """A policy's name; followed by ` approximate` if it gets no events."""
    pool: str = "prefill"
    """Pool: prefill or decode."""
    num_workers: int = 64
    num_gateways: int = 1
    """Number of gateways; each knows only what it sent itself and what workers report."""
    pages_per_worker: int = 8192
    report_s: float = 0.2
    """Interval between two load reports of a worker."""
    event_delay_s: float = 0.02
    """Delay from a change of a cache to a gateway's index."""
    prefill_rate: float = 20_000.0
    """Prompt tokens a second of a prefill worker."""
    step_s: float = 0.010
    """Time of a decode worker's step without requests."""
    request_s: float = 0.0004
    """Time that each request adds to a decode step."""
    seed: int = 0
    options: PolicyOptions = field(default_factory=lambda: PolicyOptions(request_tokens=512))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a trace."""

    num_requests: int
    hit_rate: float
    """Share of the prompt tokens that the chosen worker held."""
    oracle_hit_rate: float
    """Hit rate of a single unlimited cache without delay, in the same pages."""
    extra_tokens: float
    """Computed prompt tokens, beyond the oracle's, as a share of the oracle's."""
    balance: float
    """Largest work of a worker (computed tokens, or generated ones) divided by the mean."""
    p50_s: float
    """Prefill: to the end of the prompt. Decode: between tokens of a request."""
    p99_s: float
    choose_p50_us: float
    """CPU time of one decision, page keys apart."""
    choose_p99_us: float
    index_pages: int
    """Pages in one gateway's index at the end."""
    index_bytes: int
    """Bytes of one gateway's index at the end."""
    choices: str
    """Digest of all choices in their order."""


class GatewayView:
    """One gateway's knowledge of a pool: its policy, the view, and an estimate for each worker."""

    def __init__(
        self, policy: str, options: PolicyOptions, prefix: str, num_workers: int, num_pages: int
    ) -> None:
        self.policy: Policy = make_policy(policy, options)
        members = [
            WorkerView(
                worker_id=f"{prefix}{index}",
                address=f"{prefix}{index}",
                epoch=1,
                host=f"h{index // 8}",
                total_pages=num_pages,
                page_size=PAGE_SIZE,
            )
            for index in range(num_workers)
        ]
        self.view = PoolView(members)
        self.loads = [LoadEstimate() for _ in members]
        for position, load in enumerate(self.loads):
            load.show_in(self.view, position)


def _gateway(setup: Setup, number: int, clock: Callable[[], float]) -> GatewayView:
    kind, _, approximate = setup.policy.partition(" ")
    options = replace(
        setup.options,
        seed=setup.seed + number,
        clock=clock,
        kv_events=not approximate,
        request_tokens=0 if setup.pool == "prefill" else setup.options.request_tokens,
        index_pages=setup.num_workers * setup.pages_per_worker,
    )
    return GatewayView(kind, options, "w", setup.num_workers, setup.pages_per_worker)


def _bytes(index: FleetPageIndex) -> int:
    """Memory of an index: its tables, a number for each page told, and distinct sets of workers."""
    numbers = {id(mask): sys.getsizeof(mask) for mask in index._holders.values()}
    tables = sys.getsizeof(index._holders) + sum(
        sys.getsizeof(keys) for _, _, keys in index._held.values()
    )
    return tables + sum(numbers.values()) + sys.getsizeof(1 << 62) * index.num_pages


class VirtualTime:
    """Calls in the order of their virtual times."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), call))

    def _run_until(self, when: float) -> None:
        events = self._events
        while events and events[0][0] <= when:
            self._now, _, call = heapq.heappop(events)
            call(self._now)
        self._now = max(self._now, when)


class Simulation(VirtualTime):
    """One run.

    Args:
        setup: The fleet.
        watch: Called with every choice: the request's number and the worker's.
    """

    def __init__(
        self, setup: Setup, watch: Callable[[int, int], None] = lambda number, worker: None
    ) -> None:
        self._setup = setup
        self._watch = watch
        super().__init__()
        self._gateways = [
            _gateway(setup, number, lambda: self._now) for number in range(setup.num_gateways)
        ]
        self._needs_events = self._gateways[0].policy.index is not None
        self._workers = [self._worker(index) for index in range(setup.num_workers)]
        self._open = 0
        self._times: list[float] = []
        self._matched = self._computed = 0
        self._work = np.zeros(setup.num_workers, np.int64)
        self._choose_s: list[float] = []
        self._digest = hashlib.blake2b(digest_size=16)

    def run(self, trace: Iterable[Arrival]) -> Result:
        """Simulates a trace to its end."""
        setup = self._setup
        for index in range(setup.num_workers):
            first = setup.report_s * index / setup.num_workers
            self._at(first, partial(self._report, index))
        seen: set[int] = set()
        known_tokens = prompt_tokens = number = 0
        for number, arrival in enumerate(trace, 1):
            self._run_until(arrival.time)
            num_tokens = len(arrival.tokens)
            prompt_tokens += num_tokens
            num_pages = (num_tokens - 1) // PAGE_SIZE
            pages = arrival.pages
            known = next((i for i in range(num_pages) if pages[i] not in seen), num_pages)
            known_tokens += PAGE_SIZE * known
            seen.update(pages[known:num_pages])
            self._place(number, arrival)
        while self._open:
            self._run_until(self._events[0][0])
        index = self._gateways[0].policy.index
        choose_us = np.percentile(np.array(self._choose_s) * 1e6, [50, 99])
        least = prompt_tokens - known_tokens
        p50, p99 = np.percentile(self._times, [50, 99])
        return Result(
            num_requests=number,
            hit_rate=self._matched / prompt_tokens,
            oracle_hit_rate=known_tokens / prompt_tokens,
            extra_tokens=self._computed / least - 1,
            balance=float(self._work.max() / self._work.mean()),
            p50_s=float(p50),
            p99_s=float(p99),
            choose_p50_us=float(choose_us[0]),
            choose_p99_us=float(choose_us[1]),
            index_pages=0 if index is None else index.num_pages,
            index_bytes=0 if index is None else _bytes(index),
            choices=self._digest.hexdigest(),
        )

    # -- requests --------------------------------------------------------------------------------

    def _place(self, number: int, arrival: Arrival) -> None:
        which = number % len(self._gateways)
        gateway = self._gateways[which]
        request = RoutingRequest(
            request_id=str(number), prompt_ids=arrival.tokens, routing_key=arrival.key
        )
        request._keys[(*gateway.view.workers[0].naming, b"")] = PageNames(arrival.pages)
        began = time.thread_time()
        choice = gateway.policy.choose(gateway.view, request, 1)[0]
        self._choose_s.append(time.thread_time() - began)
        at = choice.position
        self._digest.update(at.to_bytes(4, "little"))
        self._watch(number, at)
        num_tokens, load = len(arrival.tokens), gateway.loads[at]
        to_compute = num_tokens - choice.match_tokens
        if self._setup.pool == "decode":
            to_compute = 0  # Prefill workers compute the prompt.
        load.begin(num_tokens, to_compute)
        self._open += 1
        self._workers[at].submit(self._now, Job(arrival, which, at, self._now, to_compute))

    def _end(self, job: Job) -> None:
        self._open -= 1
        self._matched += job.matched
        self._computed += job.computed
        load = self._gateways[job.gateway].loads[job.worker]
        load.computed(job.expected)
        load.end(len(job.arrival.tokens))
        if self._setup.pool == "prefill":
            self._work[job.worker] += job.computed
            self._times.append(job.ended_at - job.submitted_at)
        else:
            self._work[job.worker] += job.arrival.num_output
            self._times.append((job.ended_at - job.started_at) / job.arrival.num_output)

    # -- what workers tell -----------------------------------------------------------------------

    def _worker(self, index: int) -> SimulatedWorker:
        setup = self._setup
        cache = PageCache(setup.pages_per_worker, partial(self._tell, index))
        if setup.pool == "prefill":
            return PrefillWorker(self._at, self._end, cache, setup.prefill_rate)
        return DecodeWorker(self._at, self._end, cache, setup.step_s, setup.request_s)

    def _tell(self, index: int, stored: list[int], removed: list[int]) -> None:
        if self._needs_events:
            self._at(
                self._now + self._setup.event_delay_s,
                lambda now: self._hear(index, stored, removed),
            )

    def _hear(self, index: int, stored: list[int], removed: list[int]) -> None:
        worker_id = f"w{index}"
        for gateway in self._gateways:
            pages = gateway.policy.index
            if pages is not None:
                pages.remove(worker_id, 1, removed)
                pages.add(worker_id, 1, stored)

    def _report(self, index: int, now: float) -> None:
        worker = self._workers[index]
        for gateway in self._gateways:
            gateway.loads[index].report(
                worker.num_requests, worker.queued_tokens, worker.num_tokens
            )
        self._at(now + self._setup.report_s, partial(self._report, index))
