"""Time to the first token of a long prompt: computed, found in the owner's cache, in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.v1 import common_pb2

from serving.answers import Outcome, System
from serving.load import LoadError
from serving.sections import FIRST_TOKEN, attempt
from serving.series import Ledger
from serving.workload import Prompts

COLD, LOCAL, STORE = "cold", "local hit", "store hit"
MAX_UNCACHED_TOKENS = 64
"""A hit leaves at most so many tokens of the prompt to be computed."""


@dataclass(slots=True)
class FirstToken:
    """Sends one prompt three times; the timeline must show the expected source each time.

    Args:
        flush_workers: Empties the workers' caches once the store has everything; None: there is
            no store, or no way to flush, and the store's row is left out.
    """

    ledger: Ledger
    mesh: System
    prompts: Prompts
    prompt_tokens: int
    num_prompts: int
    flush_workers: Callable[[], None] | None
    name: str = FIRST_TOKEN

    def __post_init__(self) -> None:
        for kind in self._kinds():
            self.ledger.row(self.name, self.mesh.name, kind)

    def take(self, turn: int) -> None:
        for index in range(self.num_prompts if turn else 1):
            prompt = self.prompts.long(self.prompt_tokens)
            for kind in self._kinds():
                row = self.ledger.row(self.name, self.mesh.name, kind)
                outcome = attempt(row, partial(self._ask, kind, prompt))
                if outcome is not None and turn:
                    repeat = turn * self.num_prompts + index
                    row.note(repeat, outcome.answers[0].first_s, outcome.answers)
                    self.ledger.judge_later(row, [prompt], outcome.answers, 1)

    def finish(self) -> None:
        cold = self.ledger.row(self.name, self.mesh.name, COLD)
        for row in self.ledger.of(self.name):
            row.compare(cold, is_time=True)

    def _kinds(self) -> Sequence[str]:
        return (COLD, LOCAL, STORE) if self.flush_workers is not None else (COLD, LOCAL)

    def _ask(self, kind: str, prompt: list[int]) -> Outcome:
        if kind == STORE and self.flush_workers is not None:
            self.flush_workers()
        outcome = self.mesh.run([prompt], 1)
        found = describe_source(outcome.answers[0].timeline, len(prompt))
        if found != kind:
            raise LoadError(f"expected a {kind}, the timeline tells of: {found}")
        return outcome


def describe_source(timeline: Any, num_prompt_tokens: int) -> str:
    """Source of a prompt's KV: cold, local hit, store hit, or a mixture."""
    wanted = num_prompt_tokens - MAX_UNCACHED_TOKENS
    from_store = sum(
        fill.accepted_tokens
        for fill in timeline.fills
        if fill.source == common_pb2.FILL_SOURCE_KVSTORE
    )
    computed = timeline.local_prefill_tokens + sum(f.computed_tokens for f in timeline.fills)
    if timeline.matched_tokens >= wanted:
        return LOCAL
    if from_store >= wanted and computed <= MAX_UNCACHED_TOKENS:
        return STORE
    if computed >= wanted:
        return COLD
    return (
        f"{timeline.matched_tokens} tokens matched, {from_store} from the store, "
        f"{computed} computed"
    )
