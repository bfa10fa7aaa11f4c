"""Context parallelism: ranks that have all weights divide the rows of long chunks of prompts.

A chunk is cut into 2N segments for N ranks. Rank r computes the segments r and 2N - 1 - r, so that
each rank attends to about as many earlier positions (zigzag). To a step these are two requests with
one slot. K and V of all segments are exchanged between a layer's write and its attention, so that
pages are whole on each rank.

https://arxiv.org/abs/2411.01783 (section 3.5) has this order of segments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from weft.contract.arrays import NO_NUMBERS, Int64Array
from weft.contract.errors import RanksLost
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import Mark, sent
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import Order, PageOrder
from weft.engine.executor.port import Launched
from weft.engine.executor.ranks.frames import encode_barrier, encode_step, frame_of_order
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.ranked import SentPages
from weft.engine.executor.step_input import StepInput
from weft.engine.model.step import Step
from weft.engine.parallel.shared import SharedGroup

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers

LEAST_ROWS = 16
"""Rows of the shortest segment."""
MOST_TRIED = 4096
"""Longest chunk that is timed at the start. Longer ones are divided whatever its time."""


class Ranks(Protocol):
    """One rank's interface to the others during the start."""

    rank: int
    size: int

    def agree(self, phase: str, number: int = 0, text: str = "") -> int:
        """Waits for all ranks. Returns the least number of all."""
        ...


def least_divided(config: EngineConfig, executor: LocalExecutor, ranks: Ranks) -> int:
    """Rows of the shortest chunk that the ranks divide: as configured, else of the shortest one
    that they computed faster together than rank 0 alone. Chunks twice as long are tried in turn.
    All ranks must call it together, while no step is under way.
    """
    if config.cp_least_tokens is not None:
        return config.cp_least_tokens
    rows = 2 * ranks.size * LEAST_ROWS
    never = max(rows, min(config.prefill_chunk_tokens, MOST_TRIED)) + 1
    while rows < never:
        alone, together = (
            min(_time(executor, ranks, rows, least) for _ in range(2)) for least in (never, rows)
        )
        is_faster = ranks.rank == 0 and together < alone
        if ranks.agree("division", rows if is_faster else never) == rows:
            return rows
        rows *= 2
    return never


def _time(executor: LocalExecutor, ranks: Ranks, rows: int, least: int) -> float:
    """Seconds of a chunk in the null page."""
    slots = np.array([len(executor.page_table.pages) - 1])
    nothing = np.zeros(1, np.int64)
    step = StepInput(
        slots=slots,
        starts=nothing,
        max_starts=nothing,
        counts=np.array([rows]),
        draws=nothing,
        recomputed_rows=nothing,
        tokens=np.zeros(rows, np.int64),
    )
    ranks.agree("chunk")
    began = time.perf_counter()
    launch_share(executor, step, ranks.rank, ranks.size, least)
    executor.mark().wait()
    return time.perf_counter() - began


def is_divided(step: StepInput, least: int) -> bool:
    """Whether the ranks divide a step among them, since it has a chunk of at least so many rows;
    else rank 0 computes it alone.
    """
    if step.scores or step.pooled or step.has_media:
        return False
    chunks = step.counts[step.num_decodes + step.num_verified :]
    return bool((chunks >= least).any())


def share_of(step: StepInput, rank: int, size: int, least: int) -> StepInput | None:
    """A rank's part of a step that is divided; None: it has no rows. Rank 0 has all rows that
    draw, in their order.

    Args:
        least: Rows of the shortest chunk that is divided.
    """
    num_first = step.num_decodes + step.num_verified
    first_rows = int(step.counts[step.num_decodes : num_first].sum())
    first = slice(0, num_first if rank == 0 else 0)
    pieces: list[tuple[int, int, int, int]] = []
    tokens: list[Int64Array] = [step.tokens[:first_rows] if rank == 0 else NO_NUMBERS]
    sources = list(range(first.stop))
    at = first_rows
    for index in range(num_first, len(step.slots)):
        start, count = int(step.starts[index]), int(step.counts[index])
        number = index - num_first
        draws, recomputed = int(step.draws[number]), int(step.recomputed_rows[number])
        for begin, end in _segments(count, rank, size, least):
            known = min(max(recomputed - begin, 0), end - begin)
            is_last = draws and end == count
            pieces.append((start + begin, end - begin, is_last, known))
            tokens.append(step.tokens[at + begin : at + end])
            sources.append(index)
        at += count
    if not pieces and not first.stop:
        return None
    columns = np.array(pieces, np.int64).reshape(-1, 4)
    starts, counts, draws_of, recomputed_of = columns.T
    starts = np.concatenate([step.max_starts[first], starts])
    return replace(
        step.of_requests(sources),
        starts=starts,
        max_starts=starts,
        counts=np.concatenate([step.counts[first], counts]),
        num_decodes=step.num_decodes if rank == 0 else 0,
        num_verified=step.num_verified if rank == 0 else 0,
        draws=np.ascontiguousarray(draws_of),
        recomputed_rows=np.ascontiguousarray(recomputed_of),
        tokens=np.concatenate(tokens),
        is_divided=True,
    )


def _segments(count: int, rank: int, size: int, least: int) -> Sequence[tuple[int, int]]:
    if count < least:
        return [(0, count)] if rank == 0 else []
    borders = [count * number // (2 * size) for number in range(2 * size + 1)]
    first, last = rank, 2 * size - 1 - rank
    return [(borders[number], borders[number + 1]) for number in (first, last)]


class HostGather:
    """Implements `weft.engine.model.step.Gather` where all ranks write to one pool."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group

    def __call__(self, mixer: Any, step: Step, pool: torch.Tensor) -> None:
        self._group.meet()

    def meet(self) -> None:
        self._group.meet()


class DeviceGather:
    """Implements `weft.engine.model.step.Gather` on GPUs, which map one another's pools.

    Args:
        pools: The pool of each rank, as this rank maps them.
    """

    def __init__(self, peers: DevicePeers, pools: Sequence[torch.Tensor]) -> None:
        from weft.kernels.ops.pages.triton_push import PeerPools

        self._peers = peers
        self._pools = PeerPools.of(pools, peers.rank)

    def __call__(self, mixer: Any, step: Step, pool: torch.Tensor) -> None:
        self._pools.push(step.groups[0].places, range(mixer.in_pool, mixer.in_pool + 1))
        self._peers.meet()

    def meet(self) -> None:
        self._peers.meet()

    def push_all(self, places: torch.Tensor) -> None:
        """Copies what all layers have at these places to the other ranks."""
        self._pools.push(places, range(self._pools.num_layers))


class ContextExecutor:
    """Implements `Executor` with ranks that divide prompts. Rank 0 draws, decodes and ships.

    Args:
        local: Rank 0's own executor, whose pool has all pages.
        peers: The ranks' GPUs; None: the ranks are on a CPU.
        least: Rows of the shortest chunk that is divided.
    """

    def __init__(
        self, local: LocalExecutor, ranks: RankLeader, peers: DevicePeers | None, least: int
    ) -> None:
        self._local, self._least = local, least
        self._ranks = ranks
        self._peers = peers
        self.page_table, self.window_tables = local.page_table, local.window_tables
        self._sent_pages = SentPages(local.page_table)
        self._fills_pools = not local.device_pages.is_whole
        """Whether rank 0 copies pages that come from elsewhere to the pools of all ranks."""
        self.facts = local.facts

    def launch(self, step: StepInput) -> Launched:
        """Raises RanksLost if a rank is gone, or if this rank fails while the others continue."""
        group = self._ranks.group
        group.post(encode_step(step, self._sent_pages.take()))
        try:
            launched = launch_share(self._local, step, 0, self._ranks.size, self._least)
        except RanksLost:
            raise
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in step {group.num_frames}: {error}")
            raise RanksLost(f"rank 0 failed in step {group.num_frames}: {error}") from error
        if self._peers is None:
            group.await_ended()
        assert launched is not None, "rank 0 has a part of every step"
        return launched

    def keep(self, tokens: torch.Tensor) -> None:
        self._local.keep(tokens)

    def mark(self) -> Mark:
        if self._fills_pools:
            # Another rank may not have zeroed yet what such a copy writes to.
            self._ranks.group.post(encode_barrier())
            self._local.meet()
        return self._local.mark()

    def order(self, order: Order) -> None:
        if self._peers is not None or not isinstance(order, PageOrder):
            self._ranks.group.post(frame_of_order(order))
        self._local.order(order)

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()
        if self._peers is not None:
            self._peers.close()


def launch_share(
    executor: LocalExecutor, step: StepInput, rank: int, size: int, least: int
) -> Launched | None:
    """Runs a rank's part of a step; None: the rank has none."""
    gather = executor.gather
    if isinstance(gather, DeviceGather):
        # Others may still read, zero or copy pages that this step writes to in their pools.
        gather.meet()
    if is_divided(step, least):
        share = share_of(step, rank, size, least)
        assert share is not None, "each rank has two segments of a chunk"
        launched = executor.launch(share)
        if isinstance(gather, DeviceGather):
            # When the step has ended on rank 0, no other rank still reads memory for it.
            gather.meet()
        return launched
    if rank:
        return None
    launched = executor.launch(step)
    if isinstance(gather, DeviceGather):
        arrays = StepArrays.of_step(step, executor.page_table, executor.facts.page_size)
        gather.push_all(sent(arrays.places, executor.device))
    return launched
