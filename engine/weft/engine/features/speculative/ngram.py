"""Drafts from the request's own text: the tokens that followed an earlier occurrence of its last
tokens.

The method is prompt lookup (Saxena, 2023, "Prompt Lookup Decoding"). It pays if answers repeat
their prompt, as in summaries, edits and code.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.requests.request import Request
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.scheduler.ports import Drafter

MAX_TEXT_TOKENS = 8192
"""Number of a request's newest tokens that the drafter searches."""


class NgramDrafter(Drafter):
    """Looks up the longest known n-gram that ends the text.

    Args:
        min_tokens: Shortest n-gram. Shorter ones recur by chance.
    """

    def __init__(self, max_tokens: int = 4, min_tokens: int = 2) -> None:
        self._lengths = range(max_tokens, min_tokens - 1, -1)
        self._texts: dict[int, _Text] = {}
        """Requests by slot."""

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        return [self._draft(item.request, item.max_drafts) for item in items]

    def forget(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def _draft(self, request: Request, max_drafts: int) -> Sequence[int]:
        text = self._texts.get(request.slot)
        if text is None:
            text = self._texts[request.slot] = _Text(request, self._lengths)
        return text.continuation(max_drafts)


class _Text:
    """The last position of each n-gram of a request's growing text; `lengths` are the n-grams'
    lengths, longest first.
    """

    def __init__(self, request: Request, lengths: range) -> None:
        self.request = request
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = max(0, request.num_tokens - MAX_TEXT_TOKENS)

    def continuation(self, max_drafts: int) -> list[int]:
        tokens = self.request.tokens
        # The n-gram at the very end is not entered: it is the one that is looked up.
        for end in range(max(self._num_known, 1), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_known = len(tokens)
        for length in self._lengths:
            found = self._ends.get(tuple(tokens[-length:]))
            if found is not None:
                return tokens[found : found + max_drafts]
        return []
