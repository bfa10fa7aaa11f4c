"""A device that is as late as it can be, made of an engine on a CPU.

What the engine's executor and sampler are told to do is put into a queue, as a GPU would. The queue
is worked off when somebody waits for its results, and at random moments before. Meanwhile pages
that became free are filled with NaN at once: so does a filler that is given such a page.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from weft.contract.messages import Inbox, Outbox
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.orders import Order, PoisonPages, PoisonPieces
from weft.engine.executor.port import Launched, Logits
from weft.engine.executor.step_input import StepInput
from weft.engine.loop.engine import Engine
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.engine.sampling.sampler import Sampler


class _Later:
    """A tensor that is not there yet."""

    value: torch.Tensor


class _Mark:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._number = device.num_told

    def wait(self) -> None:
        self._device.work()

    def is_reached(self) -> bool:
        self._device.may_work()
        return self._device.num_done >= self._number

    def hold(self, stream: None) -> None:
        """Lets a staging thread wait; the engine's thread does the work for it."""
        deadline = time.monotonic() + 60
        while self._device.num_done < self._number:
            assert time.monotonic() < deadline, "the device does nothing"
            time.sleep(1e-4)


class LateDevice:
    """Takes the place of an engine's device.

    Args:
        engine: On a CPU, overlapped; its requests have no penalties, biases or constraints.
        rng: Decides when it works.
        early_chance: That it gets to its work before it must, each time that it is given some.
        leaves: Whether turns of the engine leave steps under way, and begin the next ones at
            random moments.
    """

    def __init__(
        self,
        engine: Engine,
        rng: random.Random,
        early_chance: float = 0.1,
        *,
        leaves: bool = False,
    ) -> None:
        self._rng = rng
        self._early_chance = early_chance
        self._queue: deque[Callable[[], None]] = deque()
        self._memories = engine.memories
        self._memory = engine.memory
        self._sampler = engine._step_sampler._sampler
        self._executor = executor = engine.parts.local
        first, *others = executor._pools
        self._pools: list[tuple[torch.Tensor, ...]] = [(first,)]
        if executor.states is not None:
            self._pools.append(executor.states.pools.blocks)
        self._pools += [(pool,) for pool in others]
        self._run, self._keep = executor.run, executor.keep
        self._order = executor.order
        self.num_told = self.num_done = 0
        """Number of pieces of work enqueued."""
        self.most_queued = 0
        """Most pieces of work enqueued at one time."""
        exchange, self._turn = engine.parts.transport._exchange, engine.turn
        if exchange.staging is not None:
            exchange._mover.mark = self.mark  # type: ignore[attr-defined]
            engine.turn = self.turn  # type: ignore[method-assign]
        for name in ("launch", "keep", "order", "mark"):
            setattr(executor, name, getattr(self, name))
        self._sampler.begin = self.begin  # type: ignore[method-assign, assignment]
        for group, memory in enumerate(self._memories):
            fill_free = partial(self._fill_free, group, memory._set_free)
            memory._set_free = fill_free  # type: ignore[method-assign]
        evict, self._evicting = engine.memory._evict, False
        self._tiers = engine.tiers

        def noted_evict() -> Any:
            self._evicting = self._tiers is not None
            try:
                return evict()
            finally:
                self._evicting = False

        engine.memory._evict = noted_evict  # type: ignore[method-assign]
        if leaves:
            engine.pipeline.leaves = True
            begins = partial(rng.choice, (0.0, 1.0))
            engine.pipeline._begins_in_s = lambda step: begins()  # type: ignore[method-assign]
        self._kept: set[int] = set()
        """Free pages that have been given up: what lies there is still to be copied down."""
        for pools, memory in zip(self._pools, self._memories, strict=True):
            for pool in pools:
                pool[memory._free] = float("nan")

    # -- what it is told -------------------------------------------------------------------------

    def launch(self, step: StepInput) -> Launched:
        """See `Executor.launch`; what the host knows is taken along."""
        table = self._executor.page_table
        arrays = StepArrays.of_step(step, table, self._executor.facts.page_size)
        tables = (table, *self._executor.window_tables)
        copies = [one.pages.copy() for one in tables]
        computed = _Later()

        def run() -> None:
            current = [one.pages for one in tables]
            for one, pages in zip(tables, copies, strict=True):
                one.pages = pages
            try:
                value = self._run(arrays)
            finally:
                for one, pages in zip(tables, current, strict=True):
                    one.pages = pages
            if value is not None:
                computed.value = value

        self._enqueue(run)
        if not len(arrays.logits_rows):
            return Launched(None)
        later: Any = computed
        logits = Logits(lambda: later, arrays.drawing_slots, arrays.drawing_positions)
        return Launched(logits)

    def begin(
        self,
        logits: _Later,
        slots: np.ndarray,
        positions: np.ndarray,
        on_device: None = None,
        drafted: None = None,
        slot_override: None = None,
    ) -> PendingTokens:
        """See `Sampler.begin`."""
        sampler = Sampler(self._sampler._vocab_size, len(slots))
        for row, slot in enumerate(slots.tolist()):
            if slot != self._sampler.null_slot:
                sampler.add(row, self._sampler._rows[slot], (), ())
        tokens, outputs = _Later(), list[SampledRows]()

        def draw() -> None:
            output = sampler.draw(logits.value, np.arange(len(slots)), positions)
            outputs.append(output)
            tokens.value = torch.from_numpy(output.token_ids)

        self._enqueue(draw)

        def fetch() -> SampledRows:
            self.work()
            return outputs[0]

        later: Any = tokens
        return PendingTokens(later, positions, fetch)

    def keep(self, tokens: _Later) -> None:
        """See `LocalExecutor.keep`."""
        self._enqueue(lambda: self._keep(tokens.value))

    def order(self, order: Order) -> None:
        """See `LocalExecutor.order`. Free pages are poisoned at once, so orders to do so are not
        followed.
        """
        if not isinstance(order, PoisonPages | PoisonPieces):
            self._enqueue(lambda: self._order(order))

    def mark(self) -> _Mark:
        """See `LocalExecutor.mark`."""
        return _Mark(self)

    def turn(self, inbox: Inbox | None = None) -> Outbox:
        """See `Engine.turn`; the device gets on with its work even if it is told nothing new."""
        self.may_work()
        return self._turn(inbox)

    # -- what it does ----------------------------------------------------------------------------

    def work(self) -> None:
        """Does all enqueued work."""
        while self._queue:
            self._queue.popleft()()
            self.num_done += 1
            self.check_free()

    def may_work(self) -> None:
        """Does all enqueued work, or none."""
        if self._rng.random() < self._early_chance:
            self.work()

    def check_free(self) -> None:
        """Checks that no work wrote to a free page."""
        self._kept &= set(self._memory._free)
        for group, (pools, memory) in enumerate(zip(self._pools, self._memories, strict=True)):
            kept = self._kept if group == 0 else ()
            free = [page for page in memory._free if page not in kept]
            for pool in pools:
                assert bool(pool[free].isnan().all()), "a step wrote to a free page"

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.num_told += 1
        self.most_queued = max(self.most_queued, len(self._queue))
        self.may_work()

    def _fill_free(self, group: int, set_free: Callable[[int], None], page: int) -> None:
        set_free(page)
        if group == 0 and (self._evicting or self._is_given_up(page)):
            self._kept.add(page)
            return
        if group == 0:
            self._kept.discard(page)
        for pool in self._pools[group]:
            pool[page] = float("nan")

    def _is_given_up(self, page: int) -> bool:
        """Whether a page's earlier content is still to be copied down: a request that got the page
        and lost it within the same turn has not written to it.
        """
        return self._tiers is not None and any(one.page == page for one in self._tiers._reclaimed)
