"""An engine's load reports and counters."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from weft.contract.messages import Inbox
from weft.contract.reports import LoadReport, TierReport, WeightsInUse
from weft.engine.executor.ranks.attention_dp import LockstepExecutor
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.tiers import Tiers
from weft.pages.tiers.policy import TierPolicy

if TYPE_CHECKING:
    from weft.engine.loop.engine import Engine

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.5, 60.0


def wants_report(inbox: Inbox) -> bool:
    """Whether a load report is due at once, because the sender of these messages waits for their
    effect.
    """
    commands = inbox.drains or inbox.flush_cache or inbox.dump_state or inbox.weight_commands
    return inbox.hand_back or bool(commands or inbox.expert_commands)


def retry_after_s(engine: Engine) -> float:
    """Seconds until the queued work will be computed at the present rate, within bounds."""
    rate = engine.costs.local_tokens_per_s
    time_s = engine.scheduler.num_queued_tokens / rate if rate else 0.0
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, time_s))


def load_report(engine: Engine) -> LoadReport:
    """An engine's load, for routing and metrics. Takes the changes of adapters since the last
    report. The engine must not be planning a step.
    """
    counts, scheduler, stats = engine.memory.counts(), engine.scheduler, engine.stats
    adapters, gone_adapters = engine.adapters.take_changes()
    gate = scheduler.running_plans.gate
    prefill_rate = engine.costs.local_tokens_per_s
    weights = engine.weights.status
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
        quarantine_over_s=engine.fills.quarantine_over_s,
        staging=engine.staging_counts(),
        prefill_tokens_per_second=prefill_rate,
        recent_prefill_tokens_per_second=prefill_rate if stats.prefilled_lately else 0.0,
        decode_tokens_per_second=stats.decode_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        decode_step_requests=stats.decode_step_requests,
        new_token_ratio=scheduler.estimate.ratio,
        stale_after_s=stats.stale_after_s,
        is_draining=engine.is_draining,
        asleep=list(engine.weights.status.asleep),
        is_idle=_is_idle(engine),
        transport_detail=engine.parts.transport.describe(),
        counters=engine.counters(),
        tiers=_tier_reports(engine.tiers, engine.store, engine.tier_policy),
        adapters=adapters,
        gone_adapters=gone_adapters,
        draft_depths={} if gate is None else gate.depths(),
        sessions=len(engine.sessions.pins) if engine.sessions is not None else 0,
        pinned_pages=engine.sessions.pins.num_pages if engine.sessions is not None else 0,
        weights=WeightsInUse(
            version=weights.version,
            state=weights.state,
            pause=weights.pause,
            num_updates=weights.num_updates,
        ),
    )
    report.experts = engine.experts.balance
    for companion in engine.parts.companions:
        companion.report(report)
    return report


def _is_idle(engine: Engine) -> bool:
    scheduler, lockstep = engine.scheduler, engine.parts.lockstep
    is_idle = not (scheduler.num_requests or engine.filler.num_active or engine.num_copies)
    if lockstep is None:
        return is_idle
    # Workers that share experts leave together: one that is done waits for the others.
    all_idle = lockstep.all_idle(is_idle)
    return all_idle if engine.is_draining else is_idle


def engine_counters(engine: Engine) -> dict[str, int]:
    scheduler, media = engine.scheduler, engine.media
    return {
        **asdict(engine.fills.counters),
        **asdict(engine.filler.counters),
        **(asdict(engine.store.counters) if engine.store is not None else {}),
        **engine.adapters.counters(),
        **(asdict(engine.sessions.pins.counters) if engine.sessions is not None else {}),
        **engine.stats.counters(),
        **{"stage_us": 0, "bubble_us": 0, **engine.parts.stage_counters()},
        **_counters_of_lockstep(engine.parts.lockstep),
        "preemptions": scheduler.num_preemptions,
        "urgent_preemptions": scheduler.num_urgent_preemptions,
        "prefix_waits": scheduler.sharing.num_waits,
        "prefix_query_tokens": scheduler.num_prefix_query_tokens,
        "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
        "partial_page_hits": scheduler.pages.num_partial_hits,
        "evicted_pages": engine.memory.num_evictions,
        "encoded_media": 0 if media is None else media.num_encoded,
        "encoded_patches": 0 if media is None else media.num_patches,
        "reused_media": 0 if media is None else media.num_reused,
        "open_fills": engine.fills.num_open,
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
