"""Submits that come in parts."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.errors import InvalidRequest
from weft.v1 import decode_pb2

MAX_PROMPT_TOKENS = 4 << 20
"""Of a prompt and everything that its samples have generated."""
MAX_SAMPLES = 128


class Assembly:
    """One Submit and the tokens that have arrived for it."""

    def __init__(self, message: decode_pb2.Submit) -> None:
        """Takes the first message; `is_complete` says whether parts are to follow.

        Raises:
            InvalidRequest: It announces too much.
        """
        progress = message.progress
        total = message.prompt_length + sum(entry.num_tokens for entry in progress)
        if total > MAX_PROMPT_TOKENS:
            raise InvalidRequest("the prompt is too long", param="prompt")
        if len({entry.sample for entry in progress}) < len(progress) or len(progress) > MAX_SAMPLES:
            raise InvalidRequest("one entry a sample at most", param="progress")
        self.message = message
        self.prompt = list(message.prompt.ids)
        self.generated = {entry.sample: list(entry.tokens.ids) for entry in progress}
        self._missing = {entry.sample: entry.num_tokens for entry in progress}
        for sample, ids in self.generated.items():
            self._missing[sample] -= len(ids)

    @property
    def is_complete(self) -> bool:
        """Nothing is missing."""
        return len(self.prompt) >= self.message.prompt_length and not any(
            missing > 0 for missing in self._missing.values()
        )

    def add_prompt(self, ids: Iterable[int]) -> None:
        """The next part of the prompt."""
        self.prompt += ids

    def add_generated(self, sample: int, ids: Iterable[int]) -> None:
        """The next part of what a sample has generated; one without an entry is left out."""
        known = self.generated.get(sample)
        if known is not None:
            before = len(known)
            known += ids
            self._missing[sample] -= len(known) - before
