"""`StateBench` with a device that alone knows how many drafts it accepted, as a GPU does.

A step begins before the one before it has run. Where that verifies drafts of a request, the host
knows the largest position at which the request may be, and the blocks that it may reach by then.
Requests of few rows are taken through blocks and rings in place, here token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from weft.engine.base.drafts import LaterDrafts
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.states import DeviceStates
from weft.engine.model.state_step import StateStep
from weft.engine.requests.request import Request, State
from weft.engine.scheduler.plan import Plan
from weft.kernels.ops.slot_states.spec import LayerMemory, SlotRows
from weft.testing.scheduling.state_bench import (
    PAGE,
    PRIME,
    VOCAB,
    BenchStep,
    StateBench,
)

MOST_DRAFTS = PAGE - 1
"""As `check_recurrent` has it."""


@dataclass
class _LateStep(BenchStep):
    prompts: list[list[int]] = field(default_factory=list)
    """Of each chunk, the request's tokens up to its end."""
    drawn: list[list[int]] = field(default_factory=list)
    """Tokens that the requests drew; of chunks that draw none, empty."""

    def run(self, bench: StateBench) -> None:
        """The device gets to it, after all steps before."""
        assert isinstance(bench, LateStateBench)
        if self.is_done:
            return
        self.is_done = True
        rng, arrays, bounds = bench.rng, self.arrays, self.arrays.cu_q_lens
        counts, slots = np.diff(bounds).tolist(), arrays.slots.tolist()
        num_few = len(self.plan.decodes) + len(self.plan.verifies)
        texts = [
            [*bench.known[slot], *(rng.randrange(VOCAB) for _ in range(count - 1))]
            for slot, count in zip(slots[:num_few], counts[:num_few], strict=True)
        ]
        texts += self.prompts
        late = set(arrays.owners[arrays.owners >= 0].tolist())
        positions, places = arrays.positions.copy(), arrays.places.copy()
        for number, (text, count) in enumerate(zip(texts, counts, strict=True)):
            rows = slice(*bounds[number : number + 2])
            own = np.arange(len(text) - count, len(text))
            assert (own <= positions[rows]).all(), "a request is beyond what the host expects"
            if number in late:
                positions[rows] = own
                places[rows] = self.table[number][own // PAGE] * PAGE + own % PAGE
            assert (own == positions[rows]).all(), "a request is not where the host expects it"
        self.compute(bench, bench.states_of(arrays, positions), texts, places)
        draws = [item.draws for item in self.plan.chunks]
        for number, (slot, text, count) in enumerate(zip(slots, texts, counts, strict=True)):
            drafts = count - 1 if number < num_few else 0
            num_right = rng.randint(0, drafts)
            new = [*text[len(text) - drafts :][:num_right], rng.randrange(VOCAB)]
            if number >= num_few and not draws[number - num_few]:
                new = []
            self.drawn.append(new)
            bench.known[slot] = [*text[: len(text) - drafts], *new]


class LateStateBench(StateBench):
    """See above; arguments as `StateBench` takes them, overlapped, with at most `MOST_DRAFTS`."""

    is_on_device = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, max_drafts=MOST_DRAFTS, is_overlapped=True, **settings)
        most = self.limits.max_running_requests
        self.few_rows = self._few_rows
        self.late = DeviceStates(self.device, PAGE, most, torch.device("cpu"))
        self.known = [list[int]() for _ in range(most)]
        """Tokens of each slot's request, as the device knows them."""
        self.num_captured = self.num_late = 0

    def states_of(self, arrays: StepArrays, positions: np.ndarray[Any, Any]) -> StateStep:
        """What layers do in a step; those of few rows alone may be captured, padded."""
        rows, slots = arrays.states, arrays.slots
        assert rows is not None
        self.num_late += int((arrays.owners >= 0).any())
        bounds, of_rows = torch.from_numpy(arrays.cu_q_lens), torch.from_numpy(positions)
        if rows.num_few < len(slots) or self.rng.random() < 0.5:
            return self.late.batch(arrays, torch.from_numpy(slots), bounds, of_rows)
        self.num_captured += 1
        most = self.limits.max_running_requests
        idle = self.rng.randint(0, most - len(slots))
        self.late.send(rows, len(slots) + idle)
        padded = np.concatenate([slots, np.full(idle, most)])
        bounds = torch.cat([bounds, bounds[-1:].expand(idle)])
        return self.late.captured(torch.from_numpy(padded), bounds, of_rows)

    def _few_rows(
        self, few: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """`weft.kernels.ops.slot_states.step_heads` of sums; rings have what they are to add."""
        (rows,), (totals, numbers), (ring,), (kept,) = inputs, *memory
        out = torch.zeros(len(rows), dtype=torch.float64)
        for slot, first, count, start, border, block, after, new, begin in few.plan.tolist():
            if not count:
                continue
            total, number = int(totals[block, 0]), int(numbers[block])
            assert number == border, "a block is of another border"
            for position in range(border, start + count):
                at = position % ring.shape[1]
                if position == after:
                    totals[new], numbers[new] = float(total), float(number)
                if position >= start:
                    ring[slot, at] = rows[first + position - start]
                token = float(ring[slot, at])
                if position >= begin:
                    kept[slot, at] = token
                assert float(kept[slot, at]) == token, "what was kept is of another row"
                total, number = (total * 31 + int(token) + 1) % PRIME, number + 1
                if position >= start:
                    out[first + position - start] = total
            if after == start + count:
                totals[new], numbers[new] = float(total), float(number)
        return out

    def _drafts(self, plan: Plan) -> Sequence[list[int]]:
        return LaterDrafts([self.rng.randint(0, item.max_drafts) for item in plan.verifies])

    def _step(
        self,
        number: int,
        plan: Plan,
        arrays: StepArrays,
        table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ) -> BenchStep:
        prompts = [item.request.tokens[: item.start + item.num_tokens] for item in plan.chunks]
        return _LateStep(number, plan, arrays, table, prompts=prompts)

    def _end(self, step: BenchStep) -> None:
        """Commits a step, and gives requests what the device drew."""
        assert isinstance(step, _LateStep)
        step.run(self)
        plan = step.plan
        self.scheduler.commit(step.number, plan)
        requests: list[Request] = [*plan.decodes, *(item.request for item in plan.verifies)]
        requests += [item.request for item in plan.chunks]
        for request, drawn in zip(requests, step.drawn, strict=True):
            left = request.max_tokens - request.num_generated
            if request.state is State.FINISHED or not drawn:
                continue
            request.tokens += drawn[:left]
            self.num_accepted += len(drawn) - 1
            if len(drawn) > 1 and left > 1:
                self.scheduler.accepted(request)
            self._settle(request)
