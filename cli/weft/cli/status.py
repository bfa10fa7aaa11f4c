"""`weft status`: the workers and KV stores of a mesh, their load and their pages."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import grpc
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from weft.cli.channel import Metadata, add_gateway_flags, call_gateway, open_channel
from weft.cli.hosts import RankStatus, ranks_of, show_hosts
from weft.cli.tables import full_width, print_table
from weft.cli.top.view import describe_plan, wanted_state
from weft.common.rpc.tls import Identity
from weft.contract.codec.pairs import ADAPTER_STATES, EXPERT_BALANCE, TRANSPORTS
from weft.contract.codec.walk import enum_names
from weft.contract.experts import ExpertBalance, describe_experts
from weft.contract.reports import describe_bubbles
from weft.v1 import (
    gateway_pb2,
    gateway_pb2_grpc,
    kv_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

_TIMEOUT_S = 3.0
_BREAKERS = enum_names(gateway_pb2.BreakerState.DESCRIPTOR)

_NUMBERS = ("run", "wait", "fill", "tok/s", "free", "cached", "used", "quar.", "pages")
"""Columns of numbers: requests, then pages."""
_FIRST_LEFT_OUT = ("free", "quar.", "fill", "cached", "transport")
"""Columns to leave out, in this order, if the table is wider than the terminal."""


@dataclass(slots=True, kw_only=True)
class PageUsage:
    free: int = 0
    cached: int = 0
    used: int = 0
    quarantined: int = 0
    total: int = 0


@dataclass(slots=True, kw_only=True)
class StateUsage:
    """State pages of one worker's recurrent layers, and the cached KV pages from which requests can
    continue.
    """

    used: int
    cached: int
    total: int
    checkpoint_tokens: int
    """Most tokens of a prompt between two states that are kept."""
    prefix_pages: int
    """KV pages in the prefix cache, in use or not."""
    continuable_pages: int
    """Those of the prefix cache's pages from which a request can continue: a state belongs to the
    page or to a later one.
    """


@dataclass(slots=True, kw_only=True)
class TierStatus:
    name: str
    """device, host, disk, arena, or store (a KV store as a worker sees it)."""
    held_pages: int = 0
    total_pages: int = 0
    """0: unknown."""
    hit_rate: float | None = None
    """Share of lookups that found the page; None: no lookups yet."""
    load_bytes_per_s: float = 0.0
    """Measured over loads; 0: unknown."""


@dataclass(slots=True, kw_only=True)
class AdapterHeld:
    name: str
    digest: str
    state: str
    """loading, disk, host, device or failed; unloading: the worker drops the adapter with its last
    request.
    """
    rank: int = 0
    num_requests: int = 0
    error: str = ""


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """One worker as the gateway sees it, with its own report if it answers."""

    worker_id: str
    role: str
    address: str
    healthy: bool
    problem: str = ""
    breaker: str = ""
    """closed, open or half_open: whether the gateway sends it requests."""
    epoch: str = ""
    model: str = ""
    dtype: str = ""
    weight_format: str = ""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase of its start."""
    start_work_seconds: dict[str, float] = field(default_factory=dict)
    """Of work that may be in any phase, such as compiling kernels."""
    weight_version: str = ""
    """Empty: they are those of its start."""
    weight_state: str = ""
    """updating, failed, or the mode of a trainer's pause; empty: none of them."""
    task: str = ""
    """generate, embed, classify or score."""
    running_requests: int = 0
    waiting_requests: int = 0
    filling_requests: int = 0
    queued_tokens: int = 0
    pages: PageUsage = field(default_factory=PageUsage)
    states: StateUsage | None = None
    """None: the model has no recurrent layers."""
    sessions: int = 0
    """Chat sessions with pinned pages."""
    pinned_pages: int = 0
    """Pages pinned for these sessions, cached or used."""
    prefill_tokens_per_second: float | None = None
    """Measured; 0: no prompt was computed lately; None: a worker of an older version does not
    report it.
    """
    decode_tokens_per_second: float = 0.0
    transports: list[str] = field(default_factory=list)
    transport_detail: str = ""
    notices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    experts: ExpertBalance | None = None
    """None: they stay where they are."""
    counters: dict[str, int] = field(default_factory=dict)
    kvstores: list[str] = field(default_factory=list)
    """host:port of the KV stores that it uses."""
    tiers: list[TierStatus] = field(default_factory=list)
    """Tiers that hold its pages, nearest first."""
    adapters: list[AdapterHeld] = field(default_factory=list)
    """LoRA adapters that it has, or has tried to load."""
    host: str = ""
    """Name of the machine that it runs on."""
    ranks: list[RankStatus] = field(default_factory=list)
    """Where each of its ranks runs there."""
    expert_group: str = ""
    """The same for workers that share experts, and end together; empty: it shares none."""


@dataclass(slots=True, kw_only=True)
class GatewayStatus:
    running_prompts: int
    queued_prompts: int
    held_requests: int
    first_token_s: float | None
    """Seconds that a prompt of 128 tokens would wait for its first token, by the forecast that
    decides admission; None: unknown.
    """
    requests_with_target: int
    requests_within_target: int
    limit_scale: float
    """Factor on rate limits."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="weft status", description=__doc__)
    add_gateway_flags(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="everything there is, as JSON: `gateway`, its load, and `workers`, stores included",
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="where the ranks of each host's workers run: NUMA nodes, cores, and network ports by "
        "their distance from the GPU",
    )
    arguments = parser.parse_args(argv)

    def tell(address: str, identity: Identity | None, metadata: Metadata) -> int:
        load, workers = asyncio.run(read_status(address, identity, metadata))
        if arguments.json:
            found = {
                "gateway": asdict(gateway_status(load)),
                "workers": [asdict(worker) for worker in workers],
            }
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
        elif arguments.hosts:
            show_hosts(Console(), _by_host(workers))
        else:
            show(Console(), workers)
            lines = [describe_load(load)]
            lines += map(describe_plan, asyncio.run(read_plans(address, identity, metadata)))
            for line in lines:
                Console().print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        return 0

    return call_gateway("weft status", arguments, tell)


async def read_status(
    address: str, identity: Identity | None, metadata: Metadata
) -> tuple[gateway_pb2.GatewayLoad, list[WorkerStatus]]:
    """Returns the gateway's own load, and the status of all workers and stores, those that do not
    answer among them. Raises grpc.aio.AioRpcError if the gateway does not answer.
    """
    async with open_channel(address, "gateway", identity) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        fleet = await stub.GetFleet(
            gateway_pb2.GetFleetRequest(), timeout=_TIMEOUT_S, metadata=metadata
        )
    workers = await asyncio.gather(*(_read_worker(worker, identity) for worker in fleet.workers))
    stores = dict.fromkeys(store for worker in workers for store in worker.kvstores)
    reading = [_read_store(address, identity) for address in stores]
    return fleet.load, [*workers, *await asyncio.gather(*reading)]


async def read_plans(
    address: str, identity: Identity | None, metadata: Metadata
) -> list[mesh_pb2.MeshPlan]:
    """What planners want, as far as the gateway shows it to this caller."""
    async with open_channel(address, "gateway", identity) as channel:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)
        call = stub.WatchMesh(mesh_pb2.WatchMeshRequest(), timeout=_TIMEOUT_S, metadata=metadata)
        try:
            async for message in call:
                return list(message.plans)
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()
    return []


async def _read_worker(seen: gateway_pb2.FleetWorker, identity: Identity | None) -> WorkerStatus:
    status = WorkerStatus(
        worker_id=seen.worker_id or "?",
        role=seen.role,
        address=seen.address,
        healthy=seen.healthy,
        problem=seen.problem,
        breaker=_BREAKERS[seen.breaker],
    )
    # The certificate of a worker of both roles names either.
    service = "decode" if seen.role == "both" else seen.role
    async with open_channel(seen.address, service, identity) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_TIMEOUT_S)
            _add_info(status, info)
            watch = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=_TIMEOUT_S)
            async for load in watch:
                _add_load(status, load)
                watch.cancel()
                break
        except grpc.aio.AioRpcError as error:
            status.problem = status.problem or f"does not answer: {error.code().name}"
    return status


async def _read_store(address: str, identity: Identity | None) -> WorkerStatus:
    status = WorkerStatus(worker_id="kvstore ?", role="kvstore", address=address, healthy=False)
    async with open_channel(address, "kvstore", identity) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            info = await stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=_TIMEOUT_S)
            stats = await stub.Stats(kvstore_pb2.StatsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            status.problem = f"{address} does not answer: {error.code().name}"
            return status
    status.healthy = True
    status.worker_id, status.epoch = info.store_id, f"{info.epoch:016x}"
    status.transports, status.transport_detail = list(info.transports), info.transport_detail
    status.versions = dict(info.versions)
    status.counters = dict(stats.counters)
    status.filling_requests = status.counters.get("open_fills", 0)
    status.pages = PageUsage(
        free=stats.free_pages,
        cached=stats.cached_pages,
        used=stats.pinned_pages,
        quarantined=stats.quarantined_pages,
        total=stats.total_pages,
    )
    asked, found = (status.counters.get(name, 0) for name in ("lookup_pages", "hit_pages"))
    _add_tiers(status, "arena", _rate(found, asked), stats.tiers)
    return status


def _add_info(status: WorkerStatus, info: worker_pb2.GetInfoResponse) -> None:
    status.worker_id = info.worker_id
    status.epoch = f"{info.epoch:016x}"
    status.model, status.dtype = info.model, info.dtype
    status.weight_format = info.weight_format
    status.start_seconds = dict(info.start_seconds)
    status.start_work_seconds = dict(info.start_work_seconds)
    status.task = info.task
    status.transports = [TRANSPORTS[kind] or str(kind) for kind in info.transports]
    status.transport_detail = info.transport_detail
    status.notices = list(info.notices)
    status.versions = dict(info.versions)
    status.kvstores = list(info.kvstores)
    status.host, status.ranks = info.host, ranks_of(info)
    status.expert_group = info.expert_group


def _add_load(status: WorkerStatus, load: worker_pb2.WatchLoadResponse) -> None:
    status.running_requests = load.running_requests
    status.waiting_requests = load.waiting_requests
    status.filling_requests = load.filling_requests
    status.queued_tokens = load.queued_tokens
    status.pages = PageUsage(
        free=load.free_pages,
        cached=load.cached_pages,
        used=load.used_pages,
        quarantined=load.quarantined_pages,
        total=load.total_pages,
    )
    if load.HasField("state_blocks"):
        blocks = load.state_blocks
        status.states = StateUsage(
            used=blocks.used_blocks,
            cached=blocks.cached_blocks,
            total=blocks.total_blocks,
            checkpoint_tokens=blocks.checkpoint_tokens,
            prefix_pages=blocks.prefix_pages,
            continuable_pages=blocks.continuable_pages,
        )
    status.sessions, status.pinned_pages = load.sessions, load.pinned_pages
    if load.HasField("recent_prefill_tokens_per_second"):
        status.prefill_tokens_per_second = load.recent_prefill_tokens_per_second
    status.decode_tokens_per_second = load.decode_tokens_per_second
    status.counters = dict(load.counters)
    if load.HasField("experts"):
        status.experts = EXPERT_BALANCE.decode(load.experts)
    if load.weights.updates:
        status.weight_version = load.weights.version
    is_ready = load.weights.state == "ready"
    status.weight_state = load.weights.pause if is_ready else load.weights.state
    if load.draining and not status.problem:
        status.problem = "draining"
    counters = status.counters
    asked, found = (counters.get(f"prefix_{name}_tokens", 0) for name in ("query", "hit"))
    _add_tiers(status, "device", _rate(found, asked), load.tiers)
    status.adapters = [
        AdapterHeld(
            name=one.adapter.name,
            digest=one.adapter.digest.hex(),
            state="unloading" if one.unloading else ADAPTER_STATES[one.state] or "?",
            rank=one.rank,
            num_requests=one.num_requests,
            error=one.error,
        )
        for one in sorted(load.adapters, key=lambda one: one.adapter.name)
    ]


def _add_tiers(
    status: WorkerStatus, first: str, hit_rate: float | None, tiers: Sequence[kv_pb2.TierState]
) -> None:
    pages = status.pages
    held = pages.cached + pages.used
    status.tiers = [
        TierStatus(name=first, held_pages=held, total_pages=pages.total, hit_rate=hit_rate)
    ]
    for tier in tiers:
        asked, found = (tier.counters[f"{name}_pages"] for name in ("queried", "hit"))
        status.tiers.append(
            TierStatus(
                name=tier.name,
                held_pages=tier.cached_pages + tier.used_pages,
                total_pages=tier.total_pages,
                hit_rate=_rate(found, asked),
                load_bytes_per_s=tier.load_bytes_per_second,
            )
        )


def _rate(found: int, asked: int) -> float | None:
    return found / asked if asked else None


def gateway_status(load: gateway_pb2.GatewayLoad) -> GatewayStatus:
    has_estimate = load.HasField("first_token")
    return GatewayStatus(
        running_prompts=load.running_prompts,
        queued_prompts=load.queued_prompts,
        held_requests=load.held_requests,
        first_token_s=load.first_token.ToNanoseconds() / 1e9 if has_estimate else None,
        requests_with_target=load.requests_with_target,
        requests_within_target=load.requests_within_target,
        limit_scale=load.limit_scale or 1.0,
    )


def describe_load(load: gateway_pb2.GatewayLoad) -> str:
    parts = [
        f"gateway: {load.running_prompts:,} prompts in work, {load.queued_prompts:,} queued, "
        f"{load.held_requests:,} held"
    ]
    if load.HasField("first_token"):
        seconds = load.first_token.ToNanoseconds() / 1e9
        parts.append(f"a prompt of 128 tokens would wait about {seconds:.2f} s for its first token")
    if load.requests_with_target:
        share = load.requests_within_target / load.requests_with_target
        parts.append(f"{share:.1%} of {load.requests_with_target:,} requests met their targets")
    if load.limit_scale not in (0, 1):
        parts.append(f"rate limits are at {load.limit_scale:.0%}")
    return "; ".join(parts)


def show(console: Console, workers: Sequence[WorkerStatus]) -> None:
    print_table(console, _worker_table(console, workers))
    if any(len(worker.tiers) > 1 for worker in workers):
        console.print()
        print_table(console, _tier_table(workers))
    if any(worker.adapters for worker in workers):
        console.print()
        print_table(console, _adapter_table(workers))
    for worker in workers:
        pinned = f"{worker.sessions:,} sessions pin {worker.pinned_pages:,} pages"
        details = [worker.transport_detail, *worker.notices, worker.problem]
        details.append(describe_states(worker.states) if worker.states is not None else "")
        details.append(pinned if worker.sessions else "")
        details.append(describe_weights(worker))
        details.append(describe_bubbles(worker.counters))
        details.append(describe_experts(worker.experts) if worker.experts is not None else "")
        details.append(f"task {worker.task}" if worker.task not in ("", "generate") else "")
        for text in dict.fromkeys(detail for detail in details if detail):
            line = f"{worker.worker_id}: {text}"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def describe_weights(worker: WorkerStatus) -> str:
    """Empty if no trainer has done anything."""
    version = f"weights {worker.weight_version}" if worker.weight_version else ""
    state = worker.weight_state
    if state in ("updating", "failed"):
        is_changing = state == "updating"
        state = "weights are being changed" if is_changing else "no version of the weights"
    elif state:
        state = f"paused by a trainer ({state})"
    return ", ".join(filter(None, (version, state)))


def _by_host(workers: Sequence[WorkerStatus]) -> dict[str, list[tuple[str, RankStatus]]]:
    """The ranks of all workers that have told where they run, with their names, by host."""
    hosts: dict[str, list[tuple[str, RankStatus]]] = {}
    for worker in workers:
        for number, rank in enumerate(worker.ranks):
            name = f"{worker.worker_id}/{number}" if len(worker.ranks) > 1 else worker.worker_id
            hosts.setdefault(worker.host, []).append((name, rank))
    return dict(sorted(hosts.items()))


def describe_states(states: StateUsage) -> str:
    told = (
        f"states: {states.used:,} used and {states.cached:,} cached of {states.total:,} blocks, "
        f"kept at ends of prompts and every {states.checkpoint_tokens:,} tokens; requests can "
        f"continue in {states.continuable_pages:,} of {states.prefix_pages:,} cached pages"
    )
    if not (num_lone := states.prefix_pages - states.continuable_pages):
        return told
    share = states.continuable_pages / states.prefix_pages
    return f"{told} ({share:.0%}); no block is left behind the other {num_lone:,}"


def _worker_table(console: Console, workers: Sequence[WorkerStatus]) -> Table:
    names = ["worker", "health", *_NUMBERS, "transport"]
    if len({worker.model for worker in workers if worker.model}) > 1:
        names.append("model")
    rows = [_row(worker) for worker in workers]
    table = _table_of(names, rows)
    for name in _FIRST_LEFT_OUT if console.is_terminal else ():
        if full_width(console, table) <= console.width:
            break
        names.remove(name)
        table = _table_of(names, rows)
    return table


def _table_of(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        if name == "model":  # Some names are longer than terminals are wide.
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _tier_table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for name in ("held", "pages", "hit rate", "MB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        for tier in worker.tiers:
            is_counted = tier.total_pages > 0
            speed = tier.load_bytes_per_s / 1e6
            table.add_row(
                worker.worker_id,
                tier.name,
                f"{tier.held_pages:,}" if is_counted else "-",
                f"{tier.total_pages:,}" if is_counted else "-",
                "-" if tier.hit_rate is None else f"{tier.hit_rate:.0%}",
                f"{speed:,.0f}" if speed else "-",
            )
    return table


def _adapter_table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "adapter", "content", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("rank", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for worker in workers:
        for one in worker.adapters:
            table.add_row(
                worker.worker_id,
                escape(one.name),
                one.digest[:12],
                one.state,
                str(one.rank or "-"),
                str(one.num_requests),
                escape(one.error),
            )
    return table


def _health(worker: WorkerStatus) -> str:
    if worker.healthy:
        return "[green]ok"
    wanted = wanted_state(worker.problem)
    return f"[yellow]{wanted}" if wanted else "[red]not ok"


def _row(worker: WorkerStatus) -> dict[str, str]:
    rate = worker.prefill_tokens_per_second
    if worker.role in ("decode", "both"):
        rate = worker.decode_tokens_per_second
    pages = worker.pages
    told = worker.worker_id.startswith(worker.role)
    return {
        "worker": worker.worker_id if told else f"{worker.worker_id} ({worker.role})",
        "health": _health(worker),
        "run": str(worker.running_requests),
        "wait": str(worker.waiting_requests),
        "fill": str(worker.filling_requests),
        "tok/s": "-" if rate is None else f"{rate:,.0f}",
        "free": f"{pages.free:,}",
        "cached": f"{pages.cached:,}",
        "used": f"{pages.used:,}",
        "quar.": f"{pages.quarantined:,}",
        "pages": f"{pages.total:,}",
        "transport": "+".join(worker.transports),
        "model": escape(worker.model),
    }
