"""Keeps on the device the drafts that a step accepts, as input of later steps."""

from __future__ import annotations

from typing import Protocol

import torch
from weft.kernels.step_rows import SlotTokens, StepRows, Verified, accept_drafts
from weft.kernels.tree_rows import accept_trees, move_paths


class KeptStates(Protocol):
    """Hidden states of the target by slot, from which drafts continue."""

    def keep_accepted(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Keeps the hidden states of `rows` of the last forward pass for `slots`; both are [V]
        int64.
        """


class DraftKeeper:
    """Keeps accepted drafts, and makes the token that follows them the last one of its slot.

    Args:
        known: Tokens by slot, which this class writes.
        pool: KV pool, in which this class moves the KV of accepted tree paths.
        states: Hidden states by slot, for a draft head; None: there is no head.
    """

    def __init__(self, known: SlotTokens, pool: torch.Tensor, states: KeptStates | None) -> None:
        self.known = known
        self._pool = pool
        self._states = states

    def accept(self, tokens: torch.Tensor, step: StepRows, verified: Verified) -> None:
        """Accepts the drafts of a step up to the first one that differs from the drawn token.

        Args:
            tokens: [L] int64, by row of the logits; negative where there is none.
            step: The step that drew.
        """
        if step.ancestors is None:
            last_rows, slots = accept_drafts(tokens, step, verified, self.known)
        else:
            last_rows, slots, paths = accept_trees(tokens, step, verified, self.known)
            move_paths(self._pool, step.places, verified.rows, paths)
        if self._states is not None:
            self._states.keep_accepted(last_rows, slots)
