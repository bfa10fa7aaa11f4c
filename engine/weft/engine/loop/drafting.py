"""Speculative decoding as the loop uses it: a drafter, a gate, and the requests that take part."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base.config import EngineConfig
from weft.engine.protocol.adapters import AdapterOrder
from weft.engine.scheduler.plan import Plan, Run
from weft.engine.scheduler.ports import Drafter, DraftGate
from weft.engine.scheduler.running import RunningPlans
from weft.engine.scheduler.state import Request


class Drafting:
    """The drafter and the gate of an engine; every method also works without them.

    Args:
        config: Configuration of the engine.
        drafter: Proposes drafts; None: nothing is drafted.
        gate: Decides how many drafts are made; None without a drafter.
        draws_on_device: All tokens of a step are drawn at once, where the logits are.
    """

    def __init__(
        self,
        config: EngineConfig,
        drafter: Drafter | None,
        gate: DraftGate | None,
        *,
        draws_on_device: bool,
    ) -> None:
        self.drafter = drafter
        self.gate = gate
        self._max_chain = config.max_draft_tokens
        self.is_on_device = drafter is not None and drafter.is_on_device and draws_on_device
        """Whether drafting and drawing run without the host, so that drafts may follow a step whose
        outcome the host does not know yet.
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
        if self.drafter is not None:
            self.drafter.order(order)

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with adapters and requests."""
        return {} if self.drafter is None else self.drafter.sizes()

    def close(self) -> None:
        """Stops the drafter's threads, if any."""
        if self.drafter is not None:
            self.drafter.close()

    def depths(self) -> dict[int, int]:
        """See `DraftGate.depths`; empty where nothing is drafted."""
        return {} if self.gate is None else self.gate.depths()

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """Records a completed step with the runs of its requests with drafts."""
        if self.gate is not None:
            self.gate.observe(plan, runs, duration_s)
