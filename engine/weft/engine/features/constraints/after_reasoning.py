"""Constraints that begin after the sample's reasoning, or that a first token can lift.

```
 reasoning.begin           reasoning.end [.. until]        any other
FIRST ----------> REASONING -----------------------> START ---------> CONSTRAINED
  |  any other                                         |
  +--------------> as after START                      +-------------> FREE
                                                         alternatives
```
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from weft.contract.request import Reasoning
from weft.engine.base.token_trees import TokenTree, parents_of
from weft.engine.scheduler.ports import Mask, Masks

if TYPE_CHECKING:
    from weft.engine.features.constraints.grammar_state import ChargedTime, ConstraintState


class Phase(Enum):
    FIRST = "first"
    """Before the sample's first token, which may open its reasoning."""
    REASONING = "reasoning"
    START = "start"
    """Before the first token that the constraint applies to."""
    CONSTRAINED = "constrained"
    FREE = "free"
    """After a token that lifts the constraint."""


class Place(NamedTuple):
    """Phase of a sample before its constrained text, and the state of the reasoning's end."""

    phase: Phase
    tail: tuple[int, ...] = ()
    """The last tokens of the reasoning, as many as may be the start of its end."""
    is_ending: bool = False
    """Whether the reasoning's end has come, but not yet the token `until` after it."""


class AfterReasoning:
    """The position of a sample whose constraint begins later than the sample. Tokens before the
    constrained text need no masks.

    Args:
        state: The constraint's state before any token.
        reasoning: How reasoning begins and ends; None: the sample has none.
        alternatives: Tokens that may come in place of the constrained text and lift the constraint.
    """

    def __init__(
        self,
        state: ConstraintState,
        vocab_size: int,
        reasoning: Reasoning | None = None,
        alternatives: Sequence[int] = (),
    ) -> None:
        self._state = state
        self.vocab_size = vocab_size
        self._reasoning = reasoning
        self._alternatives = frozenset(alternatives)
        self._num_before = 0
        """Number of tokens before the constrained text."""
        self._place = Place(Phase.START)
        if reasoning is not None:
            is_open = reasoning.begin is None
            self._place = Place(Phase.REASONING if is_open else Phase.FIRST)

    @property
    def charged(self) -> ChargedTime:
        return self._state.charged

    @property
    def num_accepted(self) -> int:
        """Number of the sample's tokens that were followed."""
        return self._num_before + self._state.num_accepted

    @property
    def in_group(self) -> ConstraintState | None:
        """None before the constrained text."""
        return self._state.in_group if self._place.phase is Phase.CONSTRAINED else None

    @property
    def is_lost(self) -> bool:
        return self._state.is_lost

    @is_lost.setter
    def is_lost(self, is_lost: bool) -> None:
        self._state.is_lost = is_lost

    def next_masks(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> Masks:
        num_before = 0
        for token in tokens:
            place = self._step(self._place, token)
            if place.phase is Phase.CONSTRAINED:
                break
            self._place, num_before = place, num_before + 1
        self._num_before += num_before
        own = tokens[num_before:]
        if own or self._place.phase is Phase.CONSTRAINED:
            self._place = Place(Phase.CONSTRAINED)
            return self._state.next_masks(own, ahead)
        return self._masks_before(ahead)

    def _step(self, place: Place, token: int) -> Place:
        phase, reasoning = place.phase, self._reasoning
        if phase in (Phase.CONSTRAINED, Phase.FREE):
            return place
        if phase is Phase.REASONING:
            assert reasoning is not None
            return _in_reasoning(place, token, reasoning)
        if phase is Phase.FIRST and reasoning is not None and token == reasoning.begin:
            return Place(Phase.REASONING)
        return Place(Phase.FREE if token in self._alternatives else Phase.CONSTRAINED)

    def _masks_before(self, ahead: Sequence[int]) -> Masks:
        """The tokens ahead may reach the constrained text."""
        parents, places = parents_of(ahead), [self._place]
        for token, parent in zip(ahead, parents, strict=True):
            places.append(self._step(places[parent], token))
        masks: Masks = [None] * len(places)
        starts = [row for row, at in enumerate(places) if at.phase in (Phase.FIRST, Phase.START)]
        for start in starts:
            rows = [start]
            for row, parent in enumerate(parents, 1):
                # Collects the tokens that continue the constrained text.
                if parent in rows and places[row].phase is Phase.CONSTRAINED:
                    rows.append(row)
            behind = TokenTree(
                [ahead[row - 1] for row in rows[1:]],
                [rows.index(parents[row - 1]) for row in rows[1:]],
            )
            for row, mask in zip(rows, self._state.next_masks((), behind), strict=False):
                masks[row] = mask
            masks[start] = self._with_others(masks[start], places[start].phase)
        return masks if starts else [None]

    def _with_others(self, mask: Mask | None, phase: Phase) -> Mask | None:
        """The mask also allows the tokens that may come in place of the constraint's first
        token.
        """
        others = set(self._alternatives)
        if phase is Phase.FIRST and self._reasoning is not None:
            others |= {-1 if self._reasoning.begin is None else self._reasoning.begin}
        if mask is None:
            return None
        mask = mask.copy()
        for token in others:
            if 0 <= token < self.vocab_size:
                mask[token // 32] |= np.uint32(1 << token % 32)
        return mask


def _in_reasoning(place: Place, token: int, reasoning: Reasoning) -> Place:
    if place.is_ending:
        return Place(Phase.START) if token == reasoning.until else place
    seen = (*place.tail, token)
    if seen[-len(reasoning.end) :] == reasoning.end:
        return (
            Place(Phase.REASONING, (), True) if reasoning.until is not None else Place(Phase.START)
        )
    kept = len(reasoning.end) - 1
    return Place(Phase.REASONING, seen[-kept:] if kept else ())
