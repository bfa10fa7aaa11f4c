"""The arithmetic of a beam search: which texts go on, which are complete, when it is over.

The search has one text at first, that of the prompt alone, and `BeamParams.width` after its first
step. Texts are known by their places, 0 to width - 1. All have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.contract.request import BeamParams

MAX_CANDIDATES = 256
"""Most candidates of a text in a step."""
Candidate = tuple[int, float]
"""A token and its log-probability."""
End = tuple[str, int | None]
"""Why a text ends with a token: the reason and the stop token, if one matched."""


class Continuation(NamedTuple):
    """What a place has after a step."""

    parent: int
    """The place whose text it continues."""
    token: int


class CompleteText(NamedTuple):
    """A text that has ended."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token."""
    score: float
    end: End


class BeamSearch:
    """One search.

    Args:
        num_end_tokens: Tokens that may end a text.
    """

    def __init__(self, params: BeamParams, num_end_tokens: int) -> None:
        self.width = params.width
        self._length_penalty = params.length_penalty
        self._num_wanted = max(1, round(params.width * params.patience))
        # So many of a step's best continuations contain `width` that do not end.
        self.num_candidates = (1 + num_end_tokens) * params.width
        """Candidates that `advance` needs of each text."""
        self.best: CompleteText | None = None
        self.restart()

    def restart(self) -> None:
        """Begins anew with the prompt alone."""
        self.best, self._num_complete = None, 0
        self._texts: list[tuple[float, list[int], list[float]]] = [(0.0, [], [])]

    def advance(
        self,
        candidates: Sequence[Sequence[Candidate]],
        end_of: Callable[[int], End | None],
    ) -> list[Continuation]:
        """Takes the likeliest next tokens of each text, and returns what each place has then. A
        place keeps its text where that goes on. Empty: the search is over, and `best` is set.

        Args:
            end_of: Why a text ends with such a token now; None: it goes on.
        """
        every = [
            (self._texts[parent][0] + logprob, parent, token, logprob)
            for parent, own in enumerate(candidates)
            for token, logprob in own
        ]
        every.sort(key=lambda one: -one[0])
        following = list[tuple[float, int, int, float]]()
        for rank, one in enumerate(every[: self.num_candidates]):
            if (end := end_of(one[2])) is not None:
                if rank < self.width:
                    self._complete(one, end)
            elif len(following) < self.width:
                following.append(one)
        if self._num_complete >= self._num_wanted or not following:
            return []
        placed = self._places(following)
        texts = self._texts
        self._texts = [
            (total, [*texts[parent][1], token], [*texts[parent][2], logprob])
            for total, parent, token, logprob in placed
        ]
        return [Continuation(parent, token) for _, parent, token, _ in placed]

    def tokens_of(self, place: int) -> list[int]:
        """Generated tokens of a text; not to be changed."""
        return self._texts[place][1]

    def _complete(self, one: tuple[float, int, int, float], end: End) -> None:
        total, parent, token, logprob = one
        _, tokens, logprobs = self._texts[parent]
        score = total / (len(tokens) + 1) ** self._length_penalty
        self._num_complete += 1
        if self.best is None or score > self.best.score:
            self.best = CompleteText([*tokens, token], [*logprobs, logprob], score, end)

    @staticmethod
    def _places(
        following: Sequence[tuple[float, int, int, float]],
    ) -> list[tuple[float, int, int, float]]:
        """The likeliest continuation of each text stays in its place; others take the rest."""
        placed = dict[int, tuple[float, int, int, float]]()
        others = [one for one in following if placed.setdefault(one[1], one) is not one]
        free = (place for place in range(len(following)) if place not in placed)
        placed |= dict(zip(free, others, strict=True))
        return [placed[place] for place in range(len(following))]
