"""Prefill and decode workers behind gateways that hold to latency targets, on a virtual clock.

The gate, its forecasts, the queue of tenants, the policies, views and load estimates are the
gateway's own classes. The workers, and the delay of their reports, are made up.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from weft.contract.errors import TargetUnattainable
from weft.gateway.admission.slo import (
    NO_TARGETS,
    LatencyForecaster,
    LatencyGate,
    SloTicket,
    Targets,
)
from weft.gateway.admission.slo.forecast import IndexedPool
from weft.gateway.routing import PolicyOptions, RoutingRequest, Throughput

from fleet.simulation import GatewayView, VirtualTime
from fleet.trace import Arrival, PageNames
from fleet.workers import DecodeWorker, Job, PageCache, PrefillWorker

_TICK_S = 0.02
"""Seconds between two checks of a gate's held requests."""


class Offer(NamedTuple):
    """One request of a tenant."""

    arrival: Arrival
    tenant: str
    targets: Targets = NO_TARGETS


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """Workers of a mesh, and settings of its gateways."""

    num_prefill: int = 4
    num_decode: int = 8
    num_gateways: int = 1
    holds_to_targets: bool = True
    """Whether the gate enforces targets; otherwise every request is sent at once."""
    ahead_s: float = 0.25
    pages_per_worker: int = 8192
    report_s: float = 0.2
    event_delay_s: float = 0.02
    prefill_rate: float = 20_000.0
    step_s: float = 0.010
    request_s: float = 0.0004
    seed: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of tenants; 1 if absent."""


@dataclass(kw_only=True)
class TenantResult:
    """Outcome of one tenant's requests."""

    offered: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """met, late_first_token, slow_tokens, refused; served without a target."""
    first_token_s: list[float] = field(default_factory=list)
    """Times to the first token of the served requests, from their arrival."""
    between_s: list[float] = field(default_factory=list)
    refused_after_s: list[float] = field(default_factory=list)
    """Times after which requests were refused."""

    def percentile(self, which: str, rank: float) -> float:
        """Percentile of one of the lists; 0 if it is empty."""
        values = getattr(self, which)
        return float(np.percentile(values, rank)) if values else 0.0


@dataclass(eq=False, slots=True)
class _Run:
    """A request that was sent to workers."""

    offer: Offer
    ticket: SloTicket
    gateway: int
    decode: int
    num_tokens: int
    first_token_at: float = 0.0


class _Gateway:
    """One gateway: views of both pools, and the gate."""

    def __init__(self, setup: ServingSetup, number: int, clock: Callable[[], float]) -> None:
        def side(policy: str, pool: str, num_workers: int) -> GatewayView:
            options = PolicyOptions(
                seed=setup.seed + number,
                clock=clock,
                index_pages=num_workers * setup.pages_per_worker,
            )
            return GatewayView(policy, options, f"{pool[0]}", num_workers, setup.pages_per_worker)

        self.prefill = side("cache_aware", "prefill", setup.num_prefill)
        self.decode = side("total_requests", "decode", setup.num_decode)
        forecaster = LatencyForecaster(
            lambda: IndexedPool(self.prefill.view, self.prefill.policy.index),
            lambda: IndexedPool(self.decode.view, None),
            setup.num_gateways,
        )
        self.gate = LatencyGate(forecaster, setup.ahead_s)


class ServingSimulation(VirtualTime):
    """Simulates one run of offers."""

    def __init__(self, setup: ServingSetup) -> None:
        self._setup = setup
        super().__init__()
        self._gateways = [
            _Gateway(setup, number, lambda: self._now) for number in range(setup.num_gateways)
        ]
        self._prefill = [self._prefill_worker(at) for at in range(setup.num_prefill)]
        self._decode = [self._decode_worker() for _ in range(setup.num_decode)]
        self._filling = [0] * setup.num_decode
        self._runs: dict[int, _Run] = {}
        """Runs by identity of the job that represents the request on a worker."""
        self._waiting: dict[SloTicket, Offer] = {}
        self._is_ticking = False
        self._open = 0
        self.results: dict[str, TenantResult] = defaultdict(TenantResult)
        self.ended_at = 0.0

    def run(self, offers: Iterable[Offer]) -> dict[str, TenantResult]:
        """Runs offers, in the order of their arrival, to the end."""
        for kind, workers in (("p", self._prefill), ("d", self._decode)):
            for at in range(len(workers)):
                self._at(self._setup.report_s * at / len(workers), partial(self._report, kind, at))
        for number, offer in enumerate(offers):
            self._run_until(offer.arrival.time)
            self._offer(number, offer)
        while self._open:
            self._run_until(self._events[0][0])
        self.ended_at = self._now
        return dict(self.results)

    # -- requests --------------------------------------------------------------------------------

    def _offer(self, number: int, offer: Offer) -> None:
        self._open += 1
        self.results[offer.tenant].offered += 1
        which = number % len(self._gateways)
        gateway, arrival = self._gateways[which], offer.arrival
        request = RoutingRequest(
            request_id=f"{which}-{number}",
            prompt_ids=arrival.tokens,
            first_token_s=(offer.targets.first_token_s if self._setup.holds_to_targets else None),
        )
        request._keys[(*gateway.prefill.view.workers[0].naming, b"")] = PageNames(arrival.pages)
        ticket = SloTicket(
            prompts=[request],
            arrival=self._now,
            targets=offer.targets,
            tenant=offer.tenant,
            weight=self._setup.weights.get(offer.tenant, 1.0),
            max_tokens=4096,
        )
        if not self._setup.holds_to_targets:
            self._send(which, ticket, offer)
            return
        try:
            is_sent = gateway.gate.offer(ticket, self._now)
        except TargetUnattainable:
            self._refused(ticket, offer)
            return
        if is_sent:
            self._send(which, ticket, offer)
        else:
            self._waiting[ticket] = offer
            self._tick_later()

    def _refused(self, ticket: SloTicket, offer: Offer) -> None:
        self._open -= 1
        result = self.results[offer.tenant]
        result.outcomes["refused"] += 1
        result.refused_after_s.append(self._now - ticket.arrival)

    def _tick_later(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self._at(self._now + _TICK_S, self._tick)

    def _tick(self, now: float) -> None:
        self._is_ticking = False
        for which, gateway in enumerate(self._gateways):
            for ticket, error in gateway.gate.release(now):
                offer = self._waiting.pop(ticket)
                if error is None:
                    self._send(which, ticket, offer)
                else:
                    self._refused(ticket, offer)
        if self._waiting:
            self._tick_later()

    def _send(self, which: int, ticket: SloTicket, offer: Offer) -> None:
        gateway, (request,) = self._gateways[which], ticket.prompts
        num_tokens = len(offer.arrival.tokens)
        filler, match = gateway.prefill.policy.choose(gateway.prefill.view, request, 1)[0]
        owner = gateway.decode.policy.choose(gateway.decode.view, request, 1)[0].position
        gateway.prefill.loads[filler].begin(num_tokens, num_tokens - match)
        gateway.decode.loads[owner].begin(num_tokens, 0)
        gateway.gate.began(ticket)
        job = Job(offer.arrival, which, filler, self._now, num_tokens - match)
        self._runs[id(job)] = _Run(offer, ticket, which, owner, num_tokens)
        self._filling[owner] += 1
        self._prefill[filler].submit(self._now, job)

    def _prefilled(self, job: Job) -> None:
        run = self._runs.pop(id(job))
        load = self._gateways[run.gateway].prefill.loads[job.worker]
        load.computed(job.expected)
        load.end(run.num_tokens)
        self._filling[run.decode] -= 1
        decoding = Job(job.arrival, run.gateway, run.decode, self._now, 0)
        self._runs[id(decoding)] = run
        self._decode[run.decode].submit(self._now, decoding)
        # Its owner runs the last prompt token with the next step.
        run.first_token_at = self._now + self._decode[run.decode].step_time_s

    def _decoded(self, job: Job) -> None:
        run = self._runs.pop(id(job))
        gateway, offer = self._gateways[run.gateway], run.offer
        gateway.decode.loads[run.decode].end(run.num_tokens)
        first_s = run.first_token_at - run.ticket.arrival
        num_gaps = offer.arrival.num_output - 1
        between_s = (self._now - run.first_token_at) / num_gaps if num_gaps else None
        if self._setup.holds_to_targets:
            gateway.gate.ended(run.ticket, run.first_token_at, offer.arrival.num_output)
        result = self.results[offer.tenant]
        result.first_token_s.append(first_s)
        if between_s is not None:
            result.between_s.append(between_s)
        outcome = offer.targets.outcome(first_s, between_s) if offer.targets else "served"
        result.outcomes[outcome] += 1
        self._open -= 1

    # -- workers ---------------------------------------------------------------------------------

    def _prefill_worker(self, at: int) -> PrefillWorker:
        cache = PageCache(self._setup.pages_per_worker, partial(self._tell, at))
        return PrefillWorker(self._at, self._prefilled, cache, self._setup.prefill_rate)

    def _decode_worker(self) -> DecodeWorker:
        cache = PageCache(self._setup.pages_per_worker, lambda stored, removed: None)
        setup = self._setup
        return DecodeWorker(self._at, self._decoded, cache, setup.step_s, setup.request_s)

    def _tell(self, at: int, stored: list[int], removed: list[int]) -> None:
        def hear(_: float) -> None:
            for gateway in self._gateways:
                index = gateway.prefill.policy.index
                assert index is not None
                index.remove(f"p{at}", 1, removed)
                index.add(f"p{at}", 1, stored)

        self._at(self._now + self._setup.event_delay_s, hear)

    def _report(self, kind: str, at: int, now: float) -> None:
        worker = (self._prefill if kind == "p" else self._decode)[at]
        for gateway in self._gateways:
            side = gateway.prefill if kind == "p" else gateway.decode
            load, num_requests = side.loads[at], worker.num_requests
            if isinstance(worker, DecodeWorker):
                if num_requests:
                    load.take_speed(Throughput(0.0, worker.step_time_s, num_requests))
                num_requests += self._filling[at]
            else:
                load.take_speed(Throughput(self._setup.prefill_rate))
            load.report(num_requests, worker.queued_tokens, worker.num_tokens)
        self._at(now + self._setup.report_s, partial(self._report, kind, at))


def merged(*streams: Iterable[Offer]) -> Iterable[Offer]:
    """Offers of several tenants in the order of their arrival."""
    return heapq.merge(*streams, key=lambda offer: offer.arrival.time)


def shifted(offer: Offer, seconds: float) -> Offer:
    """The same request at a later time."""
    return offer._replace(arrival=offer.arrival._replace(time=offer.arrival.time + seconds))


def without_targets(setup: ServingSetup) -> ServingSetup:
    """The same mesh with gateways that send every request at once."""
    return replace(setup, holds_to_targets=False)
