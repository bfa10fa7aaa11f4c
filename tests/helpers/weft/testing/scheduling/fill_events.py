"""Fill events for a bench whose scheduler is made after its sources of pages."""

from __future__ import annotations

from typing import Protocol

from weft.engine.scheduler.events import FillEvents
from weft.engine.scheduler.scheduler import Scheduler


class HasScheduler(Protocol):
    scheduler: Scheduler


def fill_events_to(bench: HasScheduler) -> FillEvents:
    return FillEvents(
        lambda request: bench.scheduler.publish(request),
        lambda request: bench.scheduler.fill_completed(request),
        lambda request: bench.scheduler.fill_failed(request),
    )
