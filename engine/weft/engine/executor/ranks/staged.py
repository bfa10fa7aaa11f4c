"""The executor of rank 0 where several steps are in the stages of a pipeline at once.

    other stages    step 1 | step 2      | step 3 ...
    rank 0                 | last stage 1, draw 1 | last stage 2, draw 2 ...

`launch` sends a step to the other stages and returns. A GPU has the last stage enqueued. On a CPU
rank 0 computes it when the step's logits are wanted, so that the other stages have their next step
meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.engine.base.device_copies import Mark
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import Order, PageOrder
from weft.engine.executor.port import Launched, Logits
from weft.engine.executor.ranks.frames import (
    NewPages,
    encode_barrier,
    encode_step,
    frame_of_order,
)
from weft.engine.executor.ranks.host_memory import OtherHosts
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.ranked import (
    SentPages,
    chains_on_all,
    draws_on_all,
    keep_on_all,
)
from weft.engine.executor.step_input import StepInput
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.shared import SharedGroup
from weft.engine.parallel.stage_links import SocketStages
from weft.pages.memory.page_table import PageTable

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers

_MOST_AHEAD = 16
"""Frames by which the host of rank 0 may be ahead of the other hosts where it does not wait for
their GPUs.
"""


class _LateStep:
    """A step that the other stages have, and that rank 0 has still to compute."""

    def __init__(
        self, compute: Callable[[], Launched], come_to: Callable[[_LateStep], None]
    ) -> None:
        self._compute, self._come_to = compute, come_to
        self.launched: Launched | None = None
        self.keep: Callable[[torch.Tensor], None] | None = None
        """Keeps the tokens that were drawn from this step; None: nothing of them is kept."""

    def run(self) -> None:
        self.launched = self._compute()

    def wait(self) -> Launched:
        """Computes this step, after all earlier ones."""
        if self.launched is None:
            self._come_to(self)
        assert self.launched is not None
        return self.launched

    def logits(self) -> Logits:
        logits = self.wait().logits
        assert logits is not None, "the step draws"
        return logits

    def rows(self) -> torch.Tensor:
        rows = self.logits().rows
        assert rows is not None, "no row of the step is verified"
        return rows()


class _LateScores:
    def __init__(self, step: _LateStep) -> None:
        self._step = step

    def wait(self) -> Any:
        scores = self._step.wait().scores
        assert scores is not None
        return scores.wait()


class _StageMark(Mark):
    """Reached when rank 0 has computed a step and all before it. The other stages have then
    computed them too.
    """

    def __init__(self, device: torch.device, late: _LateStep | None) -> None:
        super().__init__(device)
        self._late = late

    def wait(self) -> None:
        if self._late is not None:
            self._late.wait()

    def is_reached(self) -> bool:
        return self._late is None or self._late.launched is not None


class StagedExecutor:
    """Implements `Executor` with stages.

    Until it gets its first step, each rank works alone with its `LocalExecutor`.

    Args:
        local: Rank 0's share, part of the last stage.
        num_lanes: Steps that may be under way at once.
        hosts: Access to what other hosts have of pages; None: all ranks are on this one.
        peers: The GPUs of the last stage's ranks; None: it has one, or is on a CPU.
    """

    def __init__(
        self,
        local: LocalExecutor,
        ranks: RankLeader,
        num_lanes: int,
        hosts: OtherHosts | None = None,
        peers: DevicePeers | None = None,
    ) -> None:
        self._local = local
        self._peers = peers
        self._ranks = ranks
        self._hosts = hosts
        self._is_late = not local.facts.is_asynchronous
        """Whether rank 0 computes a step when its results are wanted."""
        num_rows, num_columns = local.page_table.pages.shape
        self.page_table = local.page_table
        """Has the pages of all steps that were launched. Where rank 0 is late, that of `local` has
        only those of the steps that it has computed.
        """
        if self._is_late:
            self.page_table = PageTable(num_rows - 1, num_columns, keeps_changes=False)
        self.window_tables = local.window_tables
        self._sent_pages = SentPages(self.page_table)
        ranked = chains_on_all(local, ranks, self._sent_pages.take)
        self.chains = local.chains if peers is None else ranked
        self._late = deque[_LateStep]()
        self._drawn: _LateStep | None = None
        """The step from which tokens are drawn, until they are kept."""
        self._has_one_pool = self._is_late and isinstance(ranks.group, SharedGroup)
        """Whether all ranks write to the pool of rank 0."""
        self._maps_pools = hosts is None and not (self._is_late or local.device_pages.is_whole)
        """Whether rank 0 reads and writes the pages of stages on other GPUs."""
        self._maps_peers = hosts is not None and peers is not None
        """Whether the first rank of each host reads and writes the pages of the host's GPUs."""
        moves_pages = not local.device_pages.is_whole
        writes_late = peers is not None and moves_pages and local.has_head
        self.facts = local.facts._replace(num_lanes=num_lanes, writes_after_draw=writes_late)
        self._began_ns = self._under_way_ns = 0

    def launch(self, step: StepInput) -> Launched:
        """Raises RanksLost if a rank is gone."""
        group, pages = self._ranks.group, self._sent_pages.take()
        if not self._is_late and isinstance(group, HostGroup):
            group.await_ended_by(group.num_frames - _MOST_AHEAD)
        group.post(encode_step(step, pages))
        if not self._is_late:
            return self._launch_own(step, group.num_frames)
        if not self._late:
            self._began_ns = time.perf_counter_ns()
        late = _LateStep(partial(self._compute, step, pages, group.num_frames), self._come_to)
        self._late.append(late)
        scores: Any = _LateScores(late) if step.scores else None
        slots, positions = _drawing_rows(step)
        if not len(slots):
            return Launched(None, scores)
        rows = late.rows if step.num_verified else None
        compute = partial(self._logits_of, late)
        return Launched(Logits(compute, slots, positions, rows=rows), scores)

    def _come_to(self, step: _LateStep) -> None:
        while step.launched is None:
            self._run_oldest()

    def _run_oldest(self) -> None:
        step = self._late[0]
        step.run()
        if self._local.has_head:
            step.keep = self._local.keeping()
        self._late.popleft()
        if not self._late:
            self._under_way_ns += time.perf_counter_ns() - self._began_ns

    def _compute(self, step: StepInput, pages: NewPages, number: int) -> Launched:
        pages.enter(self._local.page_table)
        neighbours = self._ranks.neighbours
        assert isinstance(neighbours, SocketStages), "stages on a CPU"
        with neighbours.computing():
            launched = self._launch_own(step, number)
        self._ranks.await_stage(number)
        return launched

    def _launch_own(self, step: StepInput, number: int) -> Launched:
        try:
            launched = self._local.launch(step)
        except RanksLost:
            raise
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in step {number}: {error}")
            raise RanksLost(f"rank 0 failed in step {number}: {error}") from error
        return launched if self._peers is None else draws_on_all(launched, self._ranks.group)

    def _logits_of(self, late: _LateStep) -> torch.Tensor:
        logits = late.logits().compute()
        self._drawn = late
        return logits

    def _settle(self) -> None:
        """Computes all steps that were launched."""
        while self._late:
            self._run_oldest()

    def counters(self) -> dict[str, int]:
        """Microseconds of all stages together with steps under way, and those of them in which
        stages had nothing to compute; empty on GPUs, where they are not measured.
        """
        neighbours = self._ranks.neighbours
        if not isinstance(neighbours, SocketStages):
            return {}
        of_stages = self._under_way_ns * len(neighbours.busy_ns)
        idle = max(0, of_stages - int(neighbours.busy_ns.sum()))
        return {"stage_us": of_stages // 1000, "bubble_us": idle // 1000}

    def keep(self, tokens: torch.Tensor) -> None:
        """Keeps the states of a head that follow from these tokens. With several lanes each step
        brings its tokens from the host.
        """
        if not self._is_late:
            # Tokens are drawn from the step that was launched last.
            if self._local.has_head and self._peers is not None:
                keep_on_all(tokens, self._local, self._peers, self._ranks.group)
            elif self._local.has_head:
                self._local.keep(tokens)
            return
        drawn, self._drawn = self._drawn, None
        if drawn is not None and drawn.keep is not None:
            drawn.keep(tokens)

    def mark(self) -> Mark:
        if not self._is_late:
            if self._maps_pools or self._maps_peers:
                self._meet()
            return self._local.mark()
        return _StageMark(self._local.device, self._late[-1] if self._late else None)

    def mark_pages(self) -> Mark:
        """As `mark`, for copies of pages from and to other workers. What is asked of other hosts
        after this call they do only when they have come to the mark too. On CPUs of several hosts
        nothing has to be waited for: orders on pages have ended when they return.
        """
        if self._hosts is not None and self._is_late:
            return self._local.mark()
        mark = self.mark()
        if self._hosts is not None and self._maps_peers:
            self._hosts.num_frames = self._ranks.group.num_frames
        return mark

    def _meet(self) -> None:
        """Makes rank 0's GPU wait until the other stages' GPUs have done all that was launched so
        far.
        """
        self._ranks.group.post(encode_barrier())
        self._local.meet()

    def order(self, order: Order) -> None:
        """On a CPU it waits for all steps so far. Raises RanksLost if a rank is gone."""
        group = self._ranks.group
        if self._maps_pools and self._local.lies_on_all(order):
            # Rank 0 copies between pages and pieces in the memory of all stages, whose GPUs go on
            # with what comes after, and do not wait for that of rank 0.
            self._meet()
            self._local.order(order)
            self._local.mark().wait()
            return
        # Of several hosts rank 0 copies between pieces and pages, whose bytes lie on all of them.
        is_alone = self._hosts is not None and self._local.lies_on_all(order)
        if is_alone and self._maps_peers:
            self._meet()
        if not (is_alone or (self._has_one_pool and isinstance(order, PageOrder))):
            group.post(frame_of_order(order))
        if self._hosts is not None:
            self._hosts.num_frames = group.num_frames
        self._settle()
        self._local.order(order)

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()
        neighbours = self._ranks.neighbours  # Sockets were closed with the ranks.
        if neighbours is not None and not isinstance(neighbours, SocketStages):
            neighbours.close()
        if self._peers is not None:
            self._peers.close()


def _drawing_rows(step: StepInput) -> tuple[Int64Array, Int64Array]:
    """Slots and positions of `Logits`."""
    num_drawing = step.counts.copy()
    num_drawing[step.num_decodes + step.num_verified :] = step.draws
    slots = np.repeat(step.slots, num_drawing)
    firsts = step.max_starts + step.counts - num_drawing
    behind = np.arange(len(slots)) - np.repeat(np.cumsum(num_drawing) - num_drawing, num_drawing)
    return slots, np.repeat(firsts, num_drawing) + behind + 1
