"""A gate that always drafts, whether or not it pays."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base.config import MAX_TREE_REQUESTS
from weft.engine.base.drafts import DraftShape, tree_shapes
from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.scheduler.ports import DraftGate


class FixedGate(DraftGate):
    """Always requests the most drafts: the largest trees for few requests, chains for more.

    Args:
        width: Width of trees; 1: drafts form chains only.
    """

    def __init__(self, max_drafts: int, width: int = 1) -> None:
        self._chain = DraftShape.chain(max_drafts)
        self._tree = max(tree_shapes(width), default=self._chain)

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        return self._tree if len(requests) <= MAX_TREE_REQUESTS else self._chain

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """Does nothing: measurements do not change the choice."""
