"""Greedy tokens against a reference that computes in float32 in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

NEAR_TIE = 1e-5
"""Difference of logits, relative to the largest one, that roundings in float32 may turn over. Of a
million tokens of random models one is chosen by so little.
"""


def check_choices(logits: torch.Tensor, tokens: Sequence[int]) -> None:
    """Each token is the choice of the reference, where float32 can tell.

    Args:
        logits: `[num_tokens, vocab]`, the reference's, behind what comes before each token.
        tokens: The tokens.
    """
    assert len(logits) == len(tokens)
    lacks = (logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).tolist()
    for at, (lack, size) in enumerate(zip(lacks, logits.abs().amax(-1).tolist(), strict=True)):
        assert lack <= NEAR_TIE * size, f"token {at} of {tokens} lacks {lack} of {size}"


def are_clear(logits: torch.Tensor) -> bool:
    """Whether float32 can tell the largest of each row: `[num_tokens, vocab]`."""
    best, second = logits.topk(2, -1).values.unbind(-1)
    return bool((best - second > NEAR_TIE * logits.abs().amax(-1)).all())


class Choices(list[int]):
    """A reference's greedy tokens. Other tokens are equal if `check_choices` takes each of them
    behind those before it.

    Args:
        logits_of: The reference: `[num_tokens, vocab]` behind each of some tokens.
        prompt: What comes before.
        num_new: Number of tokens.
    """

    def __init__(
        self, logits_of: Callable[[list[int]], torch.Tensor], prompt: Sequence[int], num_new: int
    ) -> None:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(num_new):
                tokens.append(int(logits_of(tokens)[-1].argmax()))
        super().__init__(tokens[len(prompt) :])
        self._logits_of, self._prompt = logits_of, list(prompt)

    def is_clear(self) -> bool:
        """Whether no other tokens are equal."""
        return are_clear(self._logits_behind(self))

    def __eq__(self, found: object) -> bool:
        if list.__eq__(self, found) is True:
            return True
        if not isinstance(found, list) or len(found) != len(self):
            return False
        try:
            check_choices(self._logits_behind(found), found)
        except AssertionError:
            return False
        return True

    def __ne__(self, found: object) -> bool:
        return not self == found

    def _logits_behind(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._logits_of([*self._prompt, *tokens])[len(self._prompt) - 1 : -1]
