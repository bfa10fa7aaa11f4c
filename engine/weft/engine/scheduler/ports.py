"""The interfaces of masks, drafts and other sources of pages that scheduler and loop use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from weft.contract.errors import WeftError
from weft.engine.base.drafts import DraftShape
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.scheduler.plan import Plan, Run, VerifyItem

Mask = npt.NDArray[np.uint32]
"""[ceil(vocab_size / 32)]: bit i % 32 of word i / 32 allows token i."""
Masks = list[Mask | None]
"""The masks of a sample in one step: for its next token, then for the token that follows each of
its drafts. None: every token is allowed.
"""
MaskRows = npt.NDArray[np.uint32]
"""[num_slots, ceil(vocab_size / 32)]: a mask for each slot, where the sampler reads it."""
Made = Masks | WeftError | None
"""A sample's masks or its error. None: the mask of its next token was written into its slot's row.
"""


class MaskSource(Protocol):
    """The constraints of requests. The source holds a request back until its constraint is
    compiled, then makes a mask for each of its tokens. Requests without a constraint never reach
    it.
    """

    lost_s: float
    """Seconds that steps have waited for masks. Its reader sets it back to 0."""

    @property
    def grammars(self) -> Mapping[RequestKey, object]:
        """The grammar of each unfinished request whose constraint has been compiled."""
        ...

    def admit(self, request: Request) -> bool:
        """Whether a new request may run now. If not, `take_compiled` returns it later. Raises
        InvalidRequest if its constraint can never be used here, and Overloaded if too many
        constraints are being compiled.
        """
        ...

    def expect(self) -> None:
        """Reads the vocabulary ahead of constrained requests, which may come."""
        ...

    def take_compiled(self) -> list[tuple[RequestKey, WeftError | None]]:
        """Requests whose constraint has been compiled, or with the error that prevented it."""
        ...

    def end(self, request: Request, *, is_last: bool) -> None:
        """Drops the state of a finished sample. `is_last`: all samples of the request have
        finished.
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
        """Starts computing the masks of requests that get a token in the current step, except ended
        ones.

        Args:
            accepted: For each request, the tokens that it already got in this step; None: no
                tokens.
            ahead: For each request, tokens that may follow and get masks too; None: none.
            rows: Returns the rows by slot into which masks may be written; None: `take_masks`
                returns all masks.
            is_awaited: Whether `take_masks` follows at once.
        """
        ...

    def take_masks(self) -> list[tuple[Request, Made]]:
        """Waits for the masks that `begin_masks` started."""
        ...

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with requests."""
        ...

    def close(self) -> None: ...


class DraftGate(Protocol):
    """Decides how many drafts a request gets in a step."""

    def shape(self, requests: Sequence[Request]) -> DraftShape: ...

    def observe(self, plan: Plan, runs: Sequence[Run], duration_s: float) -> None: ...

    def depths(self) -> dict[int, int]:
        """Number of drafts of a request, by the number of running requests from which on it
        applies.
        """
        return {}


class Fills(Protocol):
    """Other sources of a request's pages: prefill workers, tiers and the KV store."""

    def next_state(self, request: Request) -> State:
        """The state that an admitted request enters next: LOADING, FILLING or PREFILLING."""
        ...

    def has_room(self, request: Request) -> bool:
        """Whether a fill that follows the request's pages could begin once other fills
        have ended.
        """
        ...

    def start(self, request: Request) -> bool:
        """Opens the next lease for a LOADING or FILLING request, or lets it wait for one. Returns
        False if no filler is available at present; the caller then asks `next_state` again.
        """
        ...

    def abandon(self, request: Request) -> None:
        """Stops the lease of a request that has ended. The lease's reservation outlives the
        request.
        """
        ...


class Drafter(Protocol):
    """Proposes draft tokens, which affect speed and never the text.

    The methods with a body are defaults for drafters that keep no state.
    """

    @property
    def is_on_device(self) -> bool:
        """Whether drafting needs nothing that only the host knows, and the drafts stay on the
        device. Then drafts of a request may be made while another step of it is under way.
        """
        return False

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """Tokens that may follow the last one of each request: at most `max_drafts` each, or none
        where the drafter has no guess. At least the device knows the last token of each request,
        which has pages for `max_drafts` more.
        """

    def forget(self, slot: int) -> None:
        """Frees the state of a slot whose request is gone."""

    def sizes(self) -> dict[str, int]:
        """Sizes of the structures that grow with requests."""
        return {}

    def close(self) -> None:
        return None
