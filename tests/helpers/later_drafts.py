"""Drafts that lie on a device, for tests that look at them before the step does."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.scheduler.plan import LaterDrafts


def fetched(drafts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The same drafts, fetched before the step that verifies them."""
    if isinstance(drafts, LaterDrafts):
        drafts.fetch_first()
    return drafts
