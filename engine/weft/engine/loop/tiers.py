"""Assembles an engine's tiers and its access to other fillers."""

from __future__ import annotations

from collections.abc import Callable

from weft.contract.clock import Clock
from weft.contract.reports import TierReport
from weft.engine.base.config import EngineConfig
from weft.engine.loop.parts import EngineComponents
from weft.engine.requests.pages import RequestPages
from weft.engine.scheduler.ports import Fills
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.fills import TieredFills
from weft.engine.sources.tiers.tiers import Tiers
from weft.pages.tiers.policy import TierPolicy


def tier_reports(
    tiers: Tiers | None, store: StoreLink | None, policy: TierPolicy
) -> list[TierReport]:
    """Reports of the tiers below the pool, nearest first."""
    reports = tiers.report() if tiers is not None else []
    if store is not None:
        reports.append(store.report(policy.bytes_per_s("store")))
    return reports


def make_tiers(
    config: EngineConfig,
    parts: EngineComponents,
    owner: OwnerFills,
    pages: RequestPages,
    prefill_tokens_per_s: Callable[[], float],
    clock: Clock,
) -> tuple[Tiers | None, Fills, TierPolicy]:
    """Creates the tiers (None: there are none), the scheduler's `Fills`, and the policy of both.

    Args:
        prefill_tokens_per_s: Measured; 0: unknown.
    """
    policy = TierPolicy(config.write_through_threshold, config.load_back_threshold)
    tiers: Tiers | None = None
    if parts.tiers is not None:
        tiers = Tiers(
            parts.tiers,
            config.page_size,
            parts.memory,
            policy,
            prefill_tokens_per_s,
            pages.num_cached_pages,
            clock,
            config.fill_progress_timeout_s,
            pages.num_continuable_pages,
            parts.carriers,
        )
    if tiers is None and not config.has_store:
        return None, owner, policy
    fills = TieredFills(
        tiers, owner, policy, parts.layout.page_bytes, config.page_size, prefill_tokens_per_s
    )
    return tiers, fills, policy
