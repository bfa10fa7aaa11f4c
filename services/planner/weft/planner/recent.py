"""Means over what has come lately, counted in requests and not in time, so that quiet hours are as
sure as busy ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.common.capacity import NUM_SIZES

MEMORIES = (1024, 128)
"""Requests after which the weight of an older one has fallen to 1/e: of a mean that is sure, and of
one that is quick."""
_FIRST_OUTPUT_TOKENS = 128.0
_LEAST_SHARE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of the requests that came lately."""

    sizes: tuple[tuple[float, float], ...]
    """Prompt tokens that must be computed, in groups of like sizes, and the share of requests with
    so many."""
    output_tokens: float
    """Mean of an answer."""
    memory: int = MEMORIES[0]
    """Requests that they are means of."""

    @property
    def deviation(self) -> float:
        """Standard deviation of the mean prompt, as a share of it."""
        mean = sum(tokens * share for tokens, share in self.sizes)
        squares = sum(tokens * tokens * share for tokens, share in self.sizes)
        # Of an exponentially weighted mean.
        return math.sqrt(max(squares / mean**2 - 1, 0.0) / (2 * self.memory)) if mean > 0 else 0.0


class RecentMean:
    """A mean in which each newer value weighs more."""

    __slots__ = ("_count", "_kept", "_total")

    def __init__(self, memory: int) -> None:
        self._kept = 1 - 1 / memory
        self._total = self._count = 0.0

    def add(self, total: float, count: int = 1) -> None:
        """Adds some values by their sum."""
        kept = self._kept if count == 1 else self._kept**count
        self._total = kept * self._total + total
        self._count = kept * self._count + count

    def mean(self, default: float) -> float:
        return self._total / self._count if self._count else default


class _Memory:
    """Lengths with one memory."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._kept = 1 - 1 / memory
        self._newest = 1.0
        """Weight of the next prompt; older ones keep theirs."""
        self._prompts = [0.0] * NUM_SIZES
        self._tokens = [0.0] * NUM_SIZES
        self._output = RecentMean(memory)
        self._ended = RecentMean(memory)
        self._cached = RecentMean(memory)

    def prompt(self, size: int, tokens: float, count: int) -> None:
        self._newest /= self._kept if count == 1 else self._kept**count
        if self._newest > 1e100:
            self._prompts = [weight / self._newest for weight in self._prompts]
            self._tokens = [weight / self._newest for weight in self._tokens]
            self._newest = 1.0
        self._prompts[size] += self._newest * count
        self._tokens[size] += self._newest * tokens

    def ended(self, count: int, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        self._ended.add(prompt_tokens, count)
        self._cached.add(cached_tokens, count)
        self._output.add(output_tokens, count)

    def lengths(self) -> Lengths:
        total = sum(self._prompts)
        computed = 1.0 - min(1.0, self._cached.mean(0.0) / max(self._ended.mean(1.0), 1.0))
        sizes = tuple(
            (computed * tokens / weight, weight / total)
            for tokens, weight in zip(self._tokens, self._prompts, strict=True)
            if weight > _LEAST_SHARE * total
        )
        output_tokens = self._output.mean(_FIRST_OUTPUT_TOKENS)
        return Lengths(sizes=sizes, output_tokens=output_tokens, memory=self._memory)


class RecentRequests:
    """Lengths of the requests of one model."""

    def __init__(self) -> None:
        self._memories = [_Memory(memory) for memory in MEMORIES]

    def prompt(self, size: int, tokens: float, count: int = 1) -> None:
        """Prompts of one size (`size_of_prompt`) came, with `tokens` in all."""
        for memory in self._memories:
            memory.prompt(size, tokens, count)

    def prompts(self, counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Prompts came, by their sizes; sizes that are not known here are left out."""
        for size, count, total in zip(range(NUM_SIZES), counts, tokens, strict=False):
            if count:
                self.prompt(size, total, count)

    def ended(self, count: int, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Requests ended."""
        for memory in self._memories:
            memory.ended(count, prompt_tokens, cached_tokens, output_tokens)

    def lengths(self) -> tuple[Lengths, ...]:
        """By all memories, the longest first."""
        return tuple(memory.lengths() for memory in self._memories)
