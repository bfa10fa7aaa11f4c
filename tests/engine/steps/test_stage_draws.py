"""Ranks of the last of several stages on GPUs draw and draft with rank 0, and those of the others
do not. GPUs and models are noted calls here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.engine.executor.drafts.eager_chains import LastTokens
from weft.engine.executor.port import ExecutorFacts, Launched, Logits
from weft.engine.executor.ranks.follow import Drafting, follow
from weft.engine.executor.ranks.staged import StagedExecutor
from weft.engine.executor.step_input import StepInput
from weft.pages.memory.page_table import PageTable

CPU = torch.device("cpu")


class NotedExecutor:
    """In place of a rank's share."""

    def __init__(self, *, has_logits: bool) -> None:
        self.has_logits, self.has_head, self.device = has_logits, True, CPU
        self.facts = ExecutorFacts(16, (), is_asynchronous=True)
        self.page_table = PageTable(4, 8, keeps_changes=True)
        self.window_tables: list[PageTable] = []
        self.device_pages = SimpleNamespace(is_whole=False)
        self.calls: list[Any] = []

    def launch(self, step: StepInput) -> Launched:
        self.calls.append(("step", step.slots.tolist()))
        captured = self.draw if self.has_logits else None
        return Launched(
            Logits(lambda: torch.zeros(1, 5), step.slots, step.slots, captured=captured)
        )

    def draw(self, way: str, slot_override: Int64Array | None) -> Any:
        self.calls.append(("draw", way))

    def chains(self, model: Any, table: PageTable) -> NotedExecutor:
        return self

    def run(self, lasts: LastTokens, counts: Int64Array) -> torch.Tensor:
        self.calls.append(("drafts", lasts.slots.tolist(), counts.tolist()))
        return torch.zeros(1)

    def keep(self, tokens: torch.Tensor) -> None:
        self.calls.append(("keep", tokens.tolist()))

    def keep_shared(self, count: int) -> None:
        self.calls.append(("keep", [0] * count))

    def meet(self) -> None:
        self.calls.append("meet")

    def mark(self) -> str:
        return "mark"


class NotedGroup:
    """Frames that rank 0 has posted, as another rank takes them."""

    def __init__(self) -> None:
        self.frames: list[Int64Array] = []
        self.num_taken = self.num_frames = 0

    def post(self, parts: Any) -> None:
        self.frames.append(np.concatenate(parts, dtype=np.int64))
        self.num_frames += 1

    def take(self, *, spins: bool) -> Int64Array:
        if self.num_taken == len(self.frames):
            raise RanksLost("the end")
        self.num_taken += 1
        return self.frames[self.num_taken - 1]

    def end(self) -> None: ...


@pytest.mark.parametrize("is_last", [True, False])
def test_ranks_of_the_last_stage_do_what_rank_0_does(is_last: bool) -> None:
    group: Any = NotedGroup()
    first: Any = NotedExecutor(has_logits=True)
    model: Any = None
    ranks: Any = SimpleNamespace(group=group, neighbours=None, fail=None)
    peers: Any = SimpleNamespace(share_tokens=lambda tokens: tokens)
    executor = StagedExecutor(first, ranks, 2, None, peers)
    # Other GPUs write the head's entries after the tokens of a step have arrived.
    assert executor.facts == ExecutorFacts(
        16, (), is_asynchronous=True, writes_after_draw=True, num_lanes=2
    )
    numbers = np.arange(2)
    executor.page_table.extend(1, [3, 5])
    chains = executor.chains(model, executor.page_table)
    chains.run(LastTokens(numbers, numbers, numbers), numbers + 1)
    executor.page_table.extend(0, [4])
    step = StepInput(
        slots=numbers, starts=numbers, max_starts=numbers, counts=numbers + 1, num_decodes=2
    )
    logits = executor.launch(step).logits
    assert logits is not None
    assert logits.captured is not None
    logits.captured("any", None)
    executor.keep(torch.zeros(3, dtype=torch.int64))
    executor.mark()
    other: Any = NotedExecutor(has_logits=is_last)
    drafting = Drafting(other, None) if is_last else None
    with pytest.raises(RanksLost, match="the end"):
        follow(other, drafting, group, other.launch)
    if is_last:
        assert other.calls == first.calls
    else:
        assert other.calls == [("step", [0, 1]), "meet"]
    assert other.page_table.pages[1, :2].tolist() == [3, 5]
    assert other.page_table.pages[0, 0] == 4
