"""Collects the log-probabilities of one prompt's tokens, as its owner sends them."""

from __future__ import annotations

from weft.v1 import common_pb2, decode_pb2


class PromptScores:
    """Log-probabilities of all tokens of a prompt but the first, which has none.

    They arrive in order, before the first generated token. After a resubmission the new owner sends
    all of them again.
    """

    def __init__(self, ids: list[int]) -> None:
        """Starts without any, for the prompt with these tokens."""
        self._ids = ids
        self.entries: list[common_pb2.TokenLogprob] = []
        """Received log-probabilities; the first one belongs to the prompt's second token."""
        self.is_complete = len(ids) < 2
        """Whether all log-probabilities have arrived."""

    @property
    def missing(self) -> str:
        """The missing part, for error messages; empty: none."""
        if self.is_complete:
            return ""
        first, last = len(self.entries) + 1, len(self._ids) - 1
        return f"log-probabilities of prompt tokens {first} to {last} are missing"

    def restart(self) -> None:
        """Begins anew, with another owner, unless all have come."""
        if not self.is_complete:
            self.entries.clear()

    def add(self, event: decode_pb2.SessionEvent.PromptLogprobs) -> str:
        """Takes the next ones.

        Returns:
            What is wrong with the entries, of which then none is taken; empty if they were taken.
        """
        first, count = event.first_position, len(event.logprobs)
        given = [entry.token_id for entry in event.logprobs]
        are_own = first > 0 and given == self._ids[first : first + count]
        if are_own and first + count <= 1 + len(self.entries):
            return ""  # Told once more.
        told = f"log-probabilities of prompt tokens {first} to {first + count - 1}"
        expected = len(self.entries) + 1
        if self.is_complete or first != expected or first + count > len(self._ids):
            return f"{told}, expected " + (f"from {expected}" if not self.is_complete else "none")
        if not are_own:
            return f"{told} are of other tokens"
        self.entries.extend(event.logprobs)
        self.is_complete = len(self.entries) == len(self._ids) - 1
        return ""
