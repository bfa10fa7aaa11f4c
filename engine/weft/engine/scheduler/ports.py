"""What the scheduler and the loop ask of guests and of other sources: one typed port each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from weft.contract.errors import WeftError
from weft.engine.base.drafts import DraftShape
from weft.engine.scheduler.plan import Plan, Run, VerifyItem
from weft.engine.scheduler.state import Request, RequestKey, State

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i."""
Masks = list[Mask | None]
"""The masks of a sample in one step: for its next token, then for the token behind each of its
drafts. None: every token may come.
"""
MaskRows = npt.NDArray[np.uint32]
"""[num_slots, ceil(vocab_size / 32)]: a mask for each slot, where the sampler reads it."""
Made = Masks | WeftError | None
"""A sample's masks or its error; None: its next token's mask was written into its slot's row."""


class MaskSource(Protocol):
    """The constraints of requests (`weft.engine.features.constraints`): they hold requests back
    until they are compiled, then make a mask for each token. Nothing else is asked about requests
    without one.
    """

    lost_s: float
    """Seconds that steps have waited for masks that were too slow; its reader sets it to 0."""

    @property
    def grammars(self) -> Mapping[RequestKey, object]:
        """The grammar of each unfinished request whose constraint has been compiled."""
        ...

    def admit(self, request: Request) -> bool:
        """Whether a new request may run now; if not, `take_compiled` will return it.

        Raises:
            InvalidRequest: Its constraint can never be used here.
            Overloaded: Too many are being compiled.
        """
        ...

    def expect(self) -> None:
        """Prepares for constrained requests, which may come."""
        ...

    def take_compiled(self) -> list[tuple[RequestKey, WeftError | None]]:
        """Requests whose constraint has been compiled or could not be compiled."""
        ...

    def end(self, request: Request, *, is_last: bool) -> None:
        """Drops the state of a finished sample.

        Args:
            request: The sample.
            is_last: Whether all samples of the request have finished.
        """
        ...

    def begin_masks(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]] | None = None,
        ahead: Sequence[Sequence[int]] | None = None,
        *,
        rows: Callable[[], MaskRows] | None = None,
        is_awaited: bool = False,
    ) -> None:
        """Starts computing the masks of requests that draw in the current step, except ended ones.

        Args:
            requests: The requests.
            accepted: For each request, the tokens that it has already drawn in this step; None: no
                tokens.
            ahead: For each request, tokens that may follow and get masks too; None: none.
            rows: Returns the rows by slot into which masks may be written; None: they are returned
                instead.
            is_awaited: Whether `take_masks` follows at once.
        """
        ...

    def take_masks(self) -> list[tuple[Request, Made]]:
        """Waits for the masks that `begin_masks` started."""
        ...

    def sizes(self) -> dict[str, int]:
        """Sizes of what grows with requests."""
        ...

    def close(self) -> None:
        """Ends threads."""
        ...


class DraftGate(Protocol):
    """Decides how many drafts are worthwhile."""

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        """The drafts that each of these running requests brings to the next step."""

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None:
        """Records a completed step.

        Args:
            plan: Its plan.
            runs: Runs of its requests with drafts.
            duration_s: Duration of the step, drafting included.
        """

    def depths(self) -> dict[int, int]:
        """Drafts of a request by the number of requests in a step from which on they apply."""
        return {}


class Fills(Protocol):
    """Other sources of a request's pages (`weft.engine.sources`)."""

    def next_state(self, request: Request) -> State:
        """Next state of an admitted request: LOADING, FILLING or PREFILLING."""
        ...

    def has_room(self, request: Request) -> bool:
        """Whether a fill behind the pages that an admitted request has could begin, once others
        have ended.
        """
        ...

    def start(self, request: Request) -> bool:
        """Opens the next lease for a LOADING or FILLING request, or lets it wait for one. False: no
        filler is available at present, and the caller asks `next_state` again.
        """
        ...

    def abandon(self, request: Request) -> None:
        """Stops the lease of a request that has ended; its reservation outlives it."""
        ...


class Drafter(Protocol):
    """Proposes draft tokens, which only affect speed, never the text.

    The methods with a body are defaults for drafters that keep no state.
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
            For each request at most `max_drafts` tokens; none where the drafter has no guess.
        """

    def forget(self, slot: int) -> None:
        """Frees the state of a slot whose request is gone."""

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with requests."""
        return {}

    def close(self) -> None:
        """Stops its threads, if any."""
        return None
