"""Drafts that lie on a device, for tests that look at them before the step does."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base.drafts import LaterDrafts
from weft.engine.executor.drafts.chains import LaterChains
from weft.engine.executor.drafts.trees import tree_of
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.encode import verified_input
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.scheduler.ports import Drafter
from weft.kernels.ops.step_rows.spec import SlotTokens


def fetched(
    drafter: Drafter, items: Sequence[VerifyItem], known: SlotTokens
) -> Sequence[Sequence[int]]:
    """Drafts for the items, read from the device if they lie there.

    Args:
        drafter: Makes them.
        items: To draft for.
        known: What the device knows of the slots.
    """
    drafts = drafter.draft(items)
    if not isinstance(drafts, LaterDrafts):
        return drafts
    if isinstance(drafts, LaterChains):
        assert isinstance(drafter, EagleDrafter)
        paged = drafter._table, drafter._page_size
        drafts.requests = verified_input(items, drafts.counts, *paged)
    drafts.begin()
    found = []
    for item, count in zip(items, drafts.counts, strict=True):
        own = (slice(1, 1 + count), item.request.slot)
        tokens = known.tokens[own].tolist()
        if item.tree is not None:
            assert known.words is not None
            tokens = tree_of(tokens, known.words[own].tolist())
        found.append(tokens)
    return found
