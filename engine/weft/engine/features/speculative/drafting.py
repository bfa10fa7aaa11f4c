"""Speculative decoding of an engine: drafter, gate and the requests that take part."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base.config import EngineConfig
from weft.engine.executor.drafts.eagle import EagleDrafter
from weft.engine.features.speculative.adapted import AdaptedDrafter
from weft.engine.features.speculative.fixed_gate import FixedGate
from weft.engine.features.speculative.gate import MeasuredGate
from weft.engine.features.speculative.model_drafter import ModelDrafter
from weft.engine.features.speculative.ngram import NgramDrafter
from weft.engine.protocol.adapters import AdapterOrder
from weft.engine.scheduler.drafter import Drafter
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.scheduler.running import DraftGate, RunningPlans
from weft.engine.scheduler.state import Request


class Drafting:
    """Chooses the drafter and the gate.

    Args:
        config: Configuration of the engine.
        draft_model: The loaded draft model; None: there is none.
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
            most, width = config.max_draft_tokens, config.draft_width
            if config.draft_gate == "measured":
                self.gate = MeasuredGate(most, width, overlaps=config.is_overlapped)
            else:
                self.gate = FixedGate(most, width)
        self._max_chain = config.max_draft_tokens
        is_head = isinstance(self.drafter, EagleDrafter) and self.drafter.is_on_device
        if isinstance(self.drafter, EagleDrafter):
            self.drafter.waits_for_trees = not draws_on_device
        self.is_on_device = is_head and draws_on_device
        """Whether drafting and drawing run without the host, so that drafts may follow a step whose
        outcome it does not know.
        """

    def attach(self, plans: RunningPlans, max_context_tokens: int) -> None:
        """Enables drafts in these plans."""
        plans.draft(self.gate, self.is_on_device, self._max_chain, max_context_tokens)

    def is_for(self, request: Request) -> bool:
        """Whether tokens of a new request may be drafted."""
        return self.drafter is not None and request.params.speculates

    def forget(self, slot: int) -> None:
        """Frees the state of a slot whose request is gone."""
        if self.drafter is not None:
            self.drafter.forget(slot)

    def order(self, order: AdapterOrder) -> None:
        """Follows an order to load or unload an adapter."""
        if isinstance(self.drafter, AdaptedDrafter):
            self.drafter.order(order)

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with adapters and requests."""
        if isinstance(self.drafter, AdaptedDrafter | ModelDrafter):
            return self.drafter.sizes()
        return {}

    def close(self) -> None:
        """Stops the threads, if any."""
        if isinstance(self.drafter, AdaptedDrafter):
            self.drafter.close()

    def depths(self) -> dict[int, int]:
        """See `MeasuredGate.depths`; empty where nothing is drafted."""
        return self.gate.depths() if isinstance(self.gate, MeasuredGate) else {}

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """Records a completed step with the runs of its requests with drafts."""
        if self.gate is not None:
            self.gate.observe(plan, runs, duration_s)
