"""An engine's load reports and counters."""

from __future__ import annotations

from dataclasses import asdict

from weft.contract.messages import Inbox
from weft.contract.reports import LoadReport, TierReport, WeightsInUse
from weft.engine.executor.ranks.attention_dp import LockstepExecutor
from weft.engine.loop.wiring import EngineWiring
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.tiers import Tiers
from weft.pages.tiers.policy import TierPolicy

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.5, 60.0


def wants_report(inbox: Inbox) -> bool:
    """Whether a load report is due at once, because the sender of these messages waits for their
    effect.
    """
    commands = inbox.drains or inbox.flush_cache or inbox.dump_state or inbox.weight_commands
    return inbox.hand_back or bool(commands or inbox.expert_commands)


def retry_after_s(wired: EngineWiring) -> float:
    """Seconds until the queued work will be computed at the present rate, within bounds."""
    rate = wired.costs.local_tokens_per_s
    time_s = wired.scheduler.num_queued_tokens / rate if rate else 0.0
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, time_s))


def load_report(wired: EngineWiring) -> LoadReport:
    """An engine's load, for routing and metrics. Takes the changes of adapters since the last
    report. The engine must not be planning a step.
    """
    counts, scheduler, stats = wired.parts.memory.counts(), wired.scheduler, wired.stats
    adapters, gone_adapters = wired.parts.adapters.take_changes()
    gate = scheduler.running_plans.gate
    prefill_rate = wired.costs.local_tokens_per_s
    weights = wired.weights.status
    report = LoadReport(
        running_requests=len(scheduler.running) + len(scheduler.prefilling),
        waiting_requests=len(scheduler.waiting) + len(scheduler.waitlist),
        filling_requests=len(scheduler.filling),
        queued_tokens=scheduler.num_queued_tokens,
        request_tokens=scheduler.num_request_tokens,
        total_pages=counts.total,
        free_pages=counts.free,
        cached_pages=counts.cached,
        used_pages=counts.used,
        quarantined_pages=counts.quarantined,
        quarantine_over_s=wired.owner_fills.quarantine_over_s,
        staging=wired.parts.transport.staging_counts(),
        prefill_tokens_per_second=prefill_rate,
        recent_prefill_tokens_per_second=prefill_rate if stats.prefilled_lately else 0.0,
        decode_tokens_per_second=stats.decode_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        decode_step_requests=stats.decode_step_requests,
        new_token_ratio=scheduler.estimate.ratio,
        stale_after_s=stats.stale_after_s,
        is_draining=wired.filler.is_draining,
        asleep=list(wired.weights.status.asleep),
        is_idle=_is_idle(wired),
        transport_detail=wired.parts.transport.describe(),
        counters=engine_counters(wired),
        tiers=_tier_reports(wired.tiers, wired.store, wired.tier_policy),
        adapters=adapters,
        gone_adapters=gone_adapters,
        draft_depths={} if gate is None else gate.depths(),
        sessions=len(wired.sessions.pins) if wired.sessions is not None else 0,
        pinned_pages=wired.sessions.pins.num_pages if wired.sessions is not None else 0,
        weights=WeightsInUse(
            version=weights.version,
            state=weights.state,
            pause=weights.pause,
            num_updates=weights.num_updates,
            problem=weights.problem if weights.state == "failed" else "",
        ),
    )
    report.experts = wired.experts.balance
    for companion in wired.parts.companions:
        companion.report(report)
    return report


def _is_idle(wired: EngineWiring) -> bool:
    scheduler, lockstep = wired.scheduler, wired.parts.lockstep
    is_idle = not (scheduler.num_requests or wired.filler.num_active or wired.num_copies)
    if lockstep is None:
        return is_idle
    # Workers that share experts leave together: one that is done waits for the others.
    all_idle = lockstep.all_idle(is_idle)
    return all_idle if wired.filler.is_draining else is_idle


def engine_counters(wired: EngineWiring) -> dict[str, int]:
    scheduler, media = wired.scheduler, wired.media
    return {
        **asdict(wired.owner_fills.counters),
        **asdict(wired.filler.counters),
        **(asdict(wired.store.counters) if wired.store is not None else {}),
        **wired.parts.adapters.counters(),
        **(asdict(wired.sessions.pins.counters) if wired.sessions is not None else {}),
        **wired.stats.counters(),
        **{"stage_us": 0, "bubble_us": 0, **wired.parts.stage_counters()},
        **_counters_of_lockstep(wired.parts.lockstep),
        "preemptions": scheduler.num_preemptions,
        "urgent_preemptions": scheduler.num_urgent_preemptions,
        "prefix_waits": scheduler.sharing.num_waits,
        "prefix_query_tokens": scheduler.num_prefix_query_tokens,
        "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
        "partial_page_hits": scheduler.pages.num_partial_hits,
        "evicted_pages": wired.parts.memory.num_evictions,
        "encoded_media": 0 if media is None else media.num_encoded,
        "encoded_patches": 0 if media is None else media.num_patches,
        "reused_media": 0 if media is None else media.num_reused,
        "open_fills": wired.owner_fills.num_open,
    }


def _counters_of_lockstep(lockstep: LockstepExecutor | None) -> dict[str, int]:
    names = ("empty_steps", "expert_wait_us", "gathered_rows", "dispatched_rows")
    return dict.fromkeys(names, 0) if lockstep is None else lockstep.counters()


def _tier_reports(
    tiers: Tiers | None, store: StoreLink | None, policy: TierPolicy
) -> list[TierReport]:
    """Reports of the tiers below the pool, nearest first."""
    reports = tiers.report() if tiers is not None else []
    if store is not None:
        reports.append(store.report(policy.bytes_per_s("store")))
    return reports
