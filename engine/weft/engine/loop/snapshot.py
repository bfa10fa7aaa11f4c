"""Snapshot of an engine's state for operators: ids and numbers, no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from weft.contract.adapters import AdapterState
from weft.engine.loop.reports import engine_counters
from weft.engine.loop.wiring import EngineWiring
from weft.engine.requests.request import Request
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.sources.fill import Fill
from weft.pages.fills.lease import Lease


def engine_snapshot(
    wired: EngineWiring,
    now: float,
    max_entries: int,
    *,
    is_idle: bool,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Snapshot of an engine's scheduler, memory and fills, as JSON values. The engine must be
    between two turns.

    Args:
        max_entries: Most entries of each list.
    """
    parts = wired.parts
    memory, staging = parts.memory, parts.transport.staging_counts()
    counts = [(each.name, each.memory.counts()._asdict()) for each in parts.companions]
    return {
        "epoch": f"{parts.info.epoch:016x}",
        "is_idle": is_idle,
        "is_draining": wired.filler.is_draining,
        "pages": {**memory.counts()._asdict(), "promised": memory.num_promised_pages},
        "state_blocks": next((own for name, own in counts if name == "state"), None),
        "window_pages": [own for name, own in counts if name == "window"],
        "staging_pages": asdict(staging) if staging is not None else None,
        "sizes": sizes,
        "requests": request_entries(wired.scheduler, now, max_entries),
        "open_fills": fill_entries(wired.owner_fills.open_fills, now, max_entries),
        "adapters": adapter_entries(parts.adapters.states(), max_entries),
        "leases": lease_entries(wired.filler.leases, now, max_entries),
        "counters": engine_counters(wired),
        "audit": asdict(wired.audit.check()) if wired.audit is not None else None,
    }


def request_entries(scheduler: Scheduler, now: float, max_entries: int) -> list[dict[str, Any]]:
    """Waiting requests come in their order of admission."""
    queues: tuple[Iterable[Request], ...] = (
        *(scheduler.running, scheduler.prefilling, scheduler.filling),
        *(scheduler.waiting, scheduler.held, scheduler.waitlist),
    )
    return [
        {
            "request_id": request.key.request_id,
            "attempt": request.key.attempt,
            "session": request.key.gateway,
            "sample": request.sample,
            "state": request.state.value,
            "is_fill": request.is_fill,
            "age_s": round(now - request.timeline.submitted_at, 3),
            "prompt_tokens": request.num_prompt_tokens,
            "generated_tokens": request.num_generated,
            "computed_tokens": request.num_computed,
            "pages": len(request.held.pages),
            "promised_pages": request.held.num_promised,
            "slot": request.slot,
            "adapter": request.adapter.hex()[:16],
            "candidates": [candidate.worker_id for candidate in request.sources.candidates],
            "priority": request.priority,
            "preemptions": request.timeline.num_preemptions,
        }
        for request in islice(chain(*queues), max_entries)
    ]


def fill_entries(fills: Iterable[Fill], now: float, max_entries: int) -> list[dict[str, Any]]:
    return [
        {
            "lease_id": fill.lease_id.hex(),
            "request_id": fill.request.key.request_id if fill.request else "",
            "filler": fill.candidate.worker_id,
            "filler_epoch": f"{fill.candidate.epoch:016x}",
            "kind": fill.candidate.kind,
            "state": fill.state.value,
            "start_token": fill.start_token,
            "end_token": fill.end_token,
            "accepted_token": fill.accepted_token,
            "pages": len(fill.landed),
            "transport": fill.record.transport,
            "since_progress_s": round(now - fill.last_progress_at, 3),
            "is_proven": fill.is_proven,
            "failure": fill.record.failure,
        }
        for fill in islice(fills, max_entries)
    ]


def adapter_entries(adapters: Iterable[AdapterState], max_entries: int) -> list[dict[str, Any]]:
    return [
        {**asdict(adapter), "digest": adapter.digest.hex()}
        for adapter in islice(adapters, max_entries)
    ]


def lease_entries(leases: Iterable[Lease], now: float, max_entries: int) -> list[dict[str, Any]]:
    return [
        {
            "lease_id": lease.handle.lease_id.hex(),
            "owner": lease.handle.owner_id,
            "owner_epoch": f"{lease.handle.owner_epoch:016x}",
            "state": lease.state.value,
            "start_token": lease.handle.start_token,
            "next_token": lease.next_token,
            "end_token": lease.end_token,
            "chunks_under_way": len(lease.shipping),
            "transport": lease.transport,
            "expires_in_s": round(lease.term.expires_at - now, 3),
            "is_stranded": lease.is_stranded,
            "failure": lease.failure,
        }
        for lease in islice(leases, max_entries)
    ]
