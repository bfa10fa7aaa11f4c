"""What the scheduler and the loop ask of guests and of other sources: one typed port each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.engine.base.draft_shapes import DraftShape
from weft.engine.protocol.adapters import AdapterOrder
from weft.engine.scheduler.plan import Plan, Run, VerifyItem
from weft.engine.scheduler.state import Request, State


class DraftGate(Protocol):
    """Decides how many drafts are worthwhile."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """The drafts that each of these running requests brings to the next step."""

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """Records a completed step.

        Args:
            plan: Its plan.
            runs: Runs of its requests with drafts.
            duration_s: How long it took, drafting included.
        """

    def depths(self) -> dict[int, int]:
        """Drafts of a request by the number of requests in a step from which on they apply."""
        return {}


class AdapterResidency(Protocol):
    """Residency of adapters on the device (`weft.engine.features.lora.residency`)."""

    def begin(self, digest: bytes) -> None:
        """Registers a request that needs the adapter; `end` must follow."""
        ...

    def end(self, digest: bytes) -> None:
        """Unregisters a request that needed it."""
        ...

    def is_here(self, digest: bytes) -> bool:
        """Whether requests may be admitted with it."""
        ...

    def enter(self, digest: bytes) -> int:
        """Admits a request: the adapter stays on the device until `leave`. Returns its slot."""
        ...

    def leave(self, digest: bytes) -> None:
        """Ends a request's use; steps that have begun may still use the adapter."""
        ...

    def step_began(self, number: int) -> None:
        """Notes that a step has begun. Numbers increase."""
        ...

    def step_ended(self, number: int) -> None:
        """Notes that a step, and all before it, have ended on the device too."""
        ...


class Fills(Protocol):
    """Other sources of a request's pages (`weft.engine.sources`)."""

    def next_state(self, request: Request) -> State:
        """Next state of an admitted request: LOADING, FILLING or PREFILLING."""
        ...

    def start(self, request: Request) -> bool:
        """Opens the next lease for a LOADING or FILLING request, or lets it wait for one; False:
        nobody can fill it at present, and `next_state` is to be asked again.
        """
        ...

    def abandon(self, request: Request) -> None:
        """Stops the lease of a request that has ended; its reservation outlives it."""
        ...


class Drafter(Protocol):
    """Proposes draft tokens, which only affect speed, never the text.

    Drafters inherit from it what they need not do themselves.
    """

    @property
    def is_on_device(self) -> bool:
        """Whether drafting depends on nothing that only the host knows, and the drafts stay on the
        device.

        Then a request may be drafted for while another step of it is under way.
        """
        return False

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """Returns tokens that may follow the last one of each request.

        Args:
            items: Their last tokens are known, to the device at least, and there are pages for
                `max_drafts` more.

        Returns:
            Of each at most `max_drafts`; none where it has no guess.
        """

    def forget(self, slot: int) -> None:
        """Frees the state of a slot whose request is gone."""

    def order(self, order: AdapterOrder) -> None:
        """Follows an order to load or unload an adapter, which may bring a draft adapter."""
        return None

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with adapters and requests."""
        return {}

    def close(self) -> None:
        """Stops its threads, if any."""
        return None
