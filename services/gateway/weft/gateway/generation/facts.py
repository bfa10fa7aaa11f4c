"""What operators may know of a client's request: ids, times and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.gateway.generation.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """A request that waits, runs or has just ended."""

    request_id: str
    trace_id: str
    """Trace id, 32 hex digits; empty if nothing is traced."""
    model: str
    """Name of the model or adapter, as the client gave it where nothing has begun yet."""
    arrival: float
    """Arrival, event loop time."""
    duration_s: float
    """Time since its arrival, or until its end."""
    outcome: str
    """waiting or running; ok, or the failure's reason in lower case."""
    generations: Sequence[Generation] = ()
    """Its prompts; none: it was refused, or waits."""

    @property
    def first_token_s(self) -> float | None:
        """Time from its arrival to its first token; None: it has none."""
        times = [
            sample.first_token_time
            for generation in self.generations
            for sample in generation.samples
            if sample.first_token_time
        ]
        return min(times) - self.arrival if times else None

    @property
    def worker_id(self) -> str:
        """Id of the owner of its first prompt, or of the last one; empty: none."""
        return self.generations[0].worker_id if self.generations else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(one.num_prompt_tokens for one in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        """Of these, tokens whose KV the owners had."""
        return sum(one.cached_prompt_tokens for one in self.generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(sample.ids) for one in self.generations for sample in one.samples)
