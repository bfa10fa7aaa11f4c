"""Keeps on the device the drafts that a step accepts, as input of later steps."""

from __future__ import annotations

import torch
from weft.engine.model.heads.drafted import DraftedModel
from weft.kernels.ops.step_rows import accept_drafts
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.ops.tree_rows import accept_trees, move_paths


class DraftKeeper:
    """Keeps accepted drafts, and makes the token that follows them the last one of its slot.

    Args:
        known: Tokens by slot, which this class writes.
        pool: KV pool, in which this class moves the KV of accepted tree paths.
        drafted: The model with its draft head, whose hidden states this class keeps by slot; None:
            there is no head.
    """

    def __init__(self, known: SlotTokens, pool: torch.Tensor, drafted: DraftedModel | None) -> None:
        self.known = known
        self._pool = pool
        self._drafted = drafted

    @property
    def states(self) -> torch.Tensor | None:
        """The head's states of the last step's rows; None: there is no head."""
        return None if self._drafted is None else self._drafted.last

    def accept(
        self,
        tokens: torch.Tensor,
        step: StepRows,
        verified: Verified,
        states: torch.Tensor | None = None,
    ) -> None:
        """Accepts the drafts of a step up to the first one that differs from the drawn token.

        Args:
            tokens: [L] int64, by row of the logits; negative where there is none.
            states: `states` after that step; None: no step has run since.
        """
        if step.ancestors is None:
            last_rows, slots = accept_drafts(tokens, step, verified, self.known)
        else:
            last_rows, slots, paths = accept_trees(tokens, step, verified, self.known)
            move_paths(self._pool, step.places, verified.rows, paths)
        if self._drafted is not None:
            self._drafted.keep_accepted(last_rows, slots, states)
