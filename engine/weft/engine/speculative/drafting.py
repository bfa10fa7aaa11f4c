"""Speculation of an engine: who drafts, for whom, how far, and what it brings."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.config import EngineConfig
from weft.engine.messages import AdapterOrder
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.scheduler.running import DraftGate, RunningPlans
from weft.engine.scheduler.state import Request
from weft.engine.speculative.adapted import AdaptedDrafter
from weft.engine.speculative.drafter import Drafter
from weft.engine.speculative.eagle import EagleDrafter
from weft.engine.speculative.fixed_gate import FixedGate
from weft.engine.speculative.gate import MeasuredGate
from weft.engine.speculative.model_drafter import ModelDrafter
from weft.engine.speculative.ngram import NgramDrafter


class Drafting:
    """Chooses the drafter and the gate.

    Args:
        config: Of the engine.
        draft_model: Of a loaded draft; None: there is none.
        draws_on_device: All tokens of a step are drawn at once, where the logits are.
    """

    def __init__(
        self, config: EngineConfig, draft_model: Drafter | None, *, draws_on_device: bool
    ) -> None:
        self.drafter: Drafter | None = None
        if config.drafter == "ngram":
            self.drafter = NgramDrafter()
        elif config.drafter != "none":
            self.drafter = draft_model
        self.gate: DraftGate | None = None
        if self.drafter is not None:
            kind = MeasuredGate if config.draft_gate == "measured" else FixedGate
            self.gate = kind(config.max_draft_tokens, config.draft_width)
        self._max_chain = config.max_draft_tokens
        self._draws_on_device = draws_on_device
        is_head = isinstance(self.drafter, EagleDrafter) and self.drafter.is_on_device
        if isinstance(self.drafter, EagleDrafter):
            self.drafter.waits_for_trees = not draws_on_device
        self.is_on_device = is_head and draws_on_device
        """Drafting and drawing need nothing of the host: drafts may begin behind a step whose
        outcome it does not know."""

    def attach(self, plans: RunningPlans, max_context_tokens: int) -> None:
        """Lets these plan drafts."""
        plans.draft(self.gate, self.is_on_device, self._max_chain, max_context_tokens)

    def is_for(self, request: Request) -> bool:
        """Tokens of a new request may be drafted."""
        if self.drafter is None or not request.params.speculates:
            return False
        return not (self._draws_on_device and request.draws_in_turn)

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        if self.drafter is not None:
            self.drafter.forget(slot)

    def order(self, order: AdapterOrder) -> None:
        """An adapter is to be loaded or unloaded."""
        if isinstance(self.drafter, AdaptedDrafter):
            self.drafter.order(order)

    def sizes(self) -> dict[str, int]:
        """Of what grows with adapters and requests."""
        if isinstance(self.drafter, AdaptedDrafter | ModelDrafter):
            return self.drafter.sizes()
        return {}

    def close(self) -> None:
        """Ends what threads there are."""
        if isinstance(self.drafter, AdaptedDrafter):
            self.drafter.close()

    def depths(self) -> dict[int, int]:
        """See `MeasuredGate.depths`; empty where nothing is drafted."""
        return self.gate.depths() if isinstance(self.gate, MeasuredGate) else {}

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """A step has ended, with these runs of requests with drafts."""
        if self.gate is not None:
            self.gate.observe(plan, runs, duration_s)
