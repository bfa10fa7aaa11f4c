"""Describes the members of a mesh for the wire."""

from __future__ import annotations

from weft.contract.codec.pairs import EXPERT_BALANCE, MEMBER_ROLES, TRANSPORTS
from weft.contract.codec.walk import duration
from weft.contract.experts import describe_experts
from weft.contract.reports import describe_bubbles
from weft.gateway.console.stores import StoreState
from weft.gateway.fleet.worker import FleetWorker
from weft.v1 import kv_pb2, mesh_pb2


def describe_worker(worker: FleetWorker, now: float) -> mesh_pb2.MeshMember:
    """A worker as the gateway sees it, and as it reports itself; `now` is event loop time."""
    problem = worker.fault(now)
    member = mesh_pb2.MeshMember(
        member_id=worker.endpoint.address,
        role=MEMBER_ROLES.numbers[worker.role],
        address=worker.endpoint.address,
        healthy=not problem,
        problem=problem,
        breaker=worker.breaker.state(now).value,
    )
    if (info := worker.info) is not None:
        member.member_id = info.worker_id
        member.model, member.task = info.model, info.task
        member.dtype, member.weight_format = info.dtype, info.weight_format
        member.epoch = f"{info.epoch:016x}"
        member.transports.extend(name for one in info.transports if (name := TRANSPORTS[one]))
        member.notices.extend(info.notices)
    if (start := worker.start) is not None:
        member.member_id = start.worker_id or member.member_id
        member.start.phase = start.phase
        member.start.elapsed.CopyFrom(duration(start.elapsed_s))
        if start.fraction is not None:
            member.start.fraction = start.fraction
    report = worker.report
    if report is None:
        return member
    if worker.load.speed != (0.0, 0.0, 0.0):
        rate, base_s, request_s = worker.load.speed
        member.speed.prefill_tokens_per_second = rate
        member.speed.step_base.CopyFrom(duration(base_s))
        member.speed.step_request.CopyFrom(duration(request_s))
    if report.HasField("role"):
        state = member.role_state
        state.proved, state.changes = report.role.proved, report.role.changes
        if report.role.HasField("lease"):
            state.lease.CopyFrom(report.role.lease)
    if report.HasField("weights"):
        weights = report.weights
        member.weight_version = weights.version if weights.updates else ""
        member.weight_state = weights.state if weights.state != "ready" else weights.pause
    member.draining = report.draining
    member.running_requests = report.running_requests
    member.waiting_requests = report.waiting_requests
    member.filling_requests = report.filling_requests
    member.queued_tokens = report.queued_tokens
    member.pages.total, member.pages.free = report.total_pages, report.free_pages
    member.pages.cached, member.pages.used = report.cached_pages, report.used_pages
    member.pages.quarantined = report.quarantined_pages
    if report.HasField("recent_prefill_tokens_per_second"):
        member.prefill_tokens_per_second = report.recent_prefill_tokens_per_second
    member.decode_tokens_per_second = report.decode_tokens_per_second
    member.sessions, member.pinned_pages = report.sessions, report.pinned_pages
    member.adapters = worker.num_adapters
    if asked := report.counters.get("prefix_query_tokens", 0):
        member.hit_rate = report.counters.get("prefix_hit_tokens", 0) / asked
    if bubbles := describe_bubbles(report.counters):
        member.notices.append(bubbles)
    if report.HasField("experts"):
        member.notices.append(describe_experts(EXPERT_BALANCE.decode(report.experts)))
    member.tiers.extend(_tier(tier) for tier in report.tiers)
    return member


def describe_store(address: str, state: StoreState) -> mesh_pb2.MeshMember:
    """A KV store that workers name."""
    member = mesh_pb2.MeshMember(
        member_id=address,
        role=mesh_pb2.MEMBER_ROLE_KVSTORE,
        address=address,
        healthy=not state.problem,
        problem=state.problem,
    )
    if (info := state.info) is not None:
        member.member_id, member.epoch = info.store_id, f"{info.epoch:016x}"
        member.transports.extend(info.transports)
    if (stats := state.stats) is not None:
        member.pages.total, member.pages.free = stats.total_pages, stats.free_pages
        member.pages.cached, member.pages.used = stats.cached_pages, stats.pinned_pages
        member.pages.quarantined = stats.quarantined_pages
        member.filling_requests = stats.counters.get("open_fills", 0)
        if asked := stats.counters.get("lookup_pages", 0):
            member.hit_rate = stats.counters.get("hit_pages", 0) / asked
        member.tiers.extend(_tier(tier) for tier in stats.tiers)
    return member


def _tier(tier: kv_pb2.TierState) -> mesh_pb2.MemberTier:
    described = mesh_pb2.MemberTier(
        name=tier.name,
        total_pages=tier.total_pages,
        held_pages=tier.cached_pages + tier.used_pages,
    )
    if asked := tier.counters.get("queried_pages", 0):
        described.hit_rate = tier.counters.get("hit_pages", 0) / asked
    return described
