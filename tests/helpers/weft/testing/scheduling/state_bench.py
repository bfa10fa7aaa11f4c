"""A scheduler around a device whose only layers are recurrent, and whose states are sums of tokens.

KV of a page is the tokens that it would hold. A state is a number made of all tokens before it, so
that any wrong, missing or additional token shows in every output behind it. Free pages and blocks
are poisoned. Drafts are random, and so is how many of them are accepted. Below the pool there may
be host memory and a disk, the real ones.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.keys import ROOT_KEY
from weft.contract.layout import StatePart, StatePlane, num_ring_rows
from weft.contract.pages import PageCopy
from weft.contract.timeline import Timeline
from weft.engine.base.drafts import DraftShape
from weft.engine.executor.block_pool import BlockPool
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.states import StateMemory
from weft.engine.loop.encode import step_input
from weft.engine.model.state_step import FewRows, StateStep
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request, RequestKey, State
from weft.engine.requests.state_companion import StateCompanion
from weft.engine.scheduler.events import SchedulerEvents
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.plan import Plan
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.ports import DraftGate
from weft.engine.scheduler.running import Drafting
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.tiers.build import TierComponents
from weft.engine.sources.tiers.fills import TieredFills
from weft.engine.sources.tiers.tiers import Tiers
from weft.engine.sources.tiers.write_through import write_through
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.pages.memory.eviction import lru
from weft.pages.memory.page_memory import NULL_PAGE, PageMemory
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.state_index import StateIndex
from weft.pages.memory.tree import Node, PrefixTree
from weft.pages.tiers.disk import PageFiles, disk_tier
from weft.pages.tiers.host import host_tier
from weft.pages.tiers.policy import TierPolicy
from weft.pages.transfer.page_pool import HostPool
from weft.testing.scheduling.bare_request import bare_request
from weft.testing.scheduling.fill_events import fill_events_to

PAGE = 4
NAMESPACE = bytes(32)
MAX_DRAFTS = 6
VOCAB = 90
POISON = -7
LAYERS = 2
PRIME = 33_554_393
COPIES = 3
"""Numbers of a layer's sum, all equal."""
PAGE_BYTES = PAGE * 8
BLOCK_PAGES = -(-LAYERS * (COPIES + 1) * 8 // PAGE_BYTES)
PLANE = StatePlane(
    name="sums",
    layers=LAYERS,
    parts=(StatePart("sum", (COPIES,), "float64"), StatePart("count", (), "float64")),
    ring=(StatePart("token", (), "float64"),),
    found=(StatePart("found", (), "float64"),),
)


def sums(tokens: Sequence[int]) -> list[int]:
    """A number for each token, made of it and all before it."""
    found, total = [], 0
    for token in tokens:
        total = (total * 31 + token + 1) % PRIME
        found.append(total)
    return found


def scan_sums(
    inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    tokens, bounds = inputs[0].tolist(), sequences.cu_lens.tolist()
    outputs, totals = [], states[0][:, 0].tolist()
    for number, total in enumerate(totals):
        for token in tokens[bounds[number] : bounds[number + 1]]:
            total = (total * 31 + token + 1) % PRIME
            outputs.append(total)
        totals[number] = total
    counts = states[1] + sequences.cu_lens.diff()
    return torch.tensor(outputs, dtype=torch.float64), [
        torch.tensor(totals, dtype=torch.float64)[:, None].repeat(1, COPIES),
        counts,
    ]


@dataclass
class BenchStep:
    """A step that has been launched."""

    number: int
    plan: Plan
    arrays: StepArrays
    table: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    is_done: bool = False

    def run(self, bench: StateBench) -> None:
        """The device gets to it; tokens of earlier steps have been committed."""
        if self.is_done:
            return
        self.is_done = True
        arrays, texts = self.arrays, list[list[int]]()
        starts = arrays.positions[arrays.cu_q_lens[:-1]]
        states = bench.device.step(arrays.slots, starts, np.diff(arrays.cu_q_lens), arrays.states)
        drafts = dict(zip((i.request for i in self.plan.verifies), self.plan.drafts, strict=True))
        for item, start in zip(self.plan, starts.tolist(), strict=True):
            tokens = item.request.tokens[: start + item.num_tokens]
            if item.request in drafts:
                tokens = [*item.request.tokens[: start + 1], *drafts[item.request]]
            texts.append(tokens)
        self.compute(bench, states, texts, arrays.places)

    def compute(
        self, bench: StateBench, states: StateStep, texts: list[list[int]], places: Int64Array
    ) -> None:
        """Writes and reads KV and states.

        Args:
            bench: Has them.
            states: What layers do.
            texts: Of each request, its tokens up to the end of the step.
            places: [T]: of the rows' KV.
        """
        content, bounds = bench.content, self.arrays.cu_q_lens.tolist()
        row_tokens, expected = list[int](), list[int]()
        for number, tokens in enumerate(texts):
            begin, end = bounds[number : number + 2]
            start = len(tokens) - (end - begin)
            row_tokens += tokens[start:]
            expected += sums(tokens)[start:]
            at = places[begin:end]
            content[at // PAGE, at % PAGE] = tokens[start:]
            read = content[self.table[number, : -(-len(tokens) // PAGE)]].ravel()
            assert (read[: len(tokens)] == tokens).all(), "a step reads another's KV"
        inputs = torch.tensor(row_tokens, dtype=torch.float64)
        for layer in range(LAYERS):
            found = states.run(layer, [inputs + layer], scan_sums, bench.few_rows)
            if layer == 0:
                assert found.tolist() == expected, "a step continues another state"


class RandomGate(DraftGate):
    """Wants any number of drafts up to a most."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self._rng = rng
        self._most = most

    def shape(self, requests: Sequence[Request]) -> DraftShape:
        return DraftShape.chain(self._rng.randint(0, self._most))

    def observe(self, *_: object) -> None:
        pass


class StateBench:
    """A scheduler with a model that draws random tokens.

    Drafts are verified from where the host knows that a request is; `LateStateBench` has a device
    that alone knows it.

    Args:
        rng: Decides everything.
        num_pages: Of the pool, the null page included.
        num_blocks: The null block included.
        limits: Budgets.
        max_drafts: Most drafts of a request in a step.
        checkpoint_tokens: See `StateCompanion`.
        has_cache: Whether prefixes are cached.
        drafts: Whether requests get drafts.
        is_overlapped: Whether a step begins before the one before it is committed.
        stop_chance: That a drawn token ends its request, which cannot be foreseen.
        slots: Pages that host memory and the disk have room for; 0: there is no such tier.
        folder: Of the disk.
        threshold: `write_through_threshold`.
    """

    is_on_device = False
    """Whether the device knows by itself where requests with drafts are."""
    few_rows: FewRows | None = None
    """How the device takes requests of few rows through states; None: as it does others."""

    def __init__(
        self,
        rng: random.Random,
        num_pages: int,
        num_blocks: int,
        limits: SchedulerLimits,
        *,
        max_drafts: int = MAX_DRAFTS,
        checkpoint_tokens: int = 8 * PAGE,
        has_cache: bool = True,
        drafts: bool = False,
        is_overlapped: bool = False,
        stop_chance: float = 0.0,
        slots: tuple[int, int] = (0, 0),
        folder: Path = Path(),
        threshold: int = 0,
    ) -> None:
        self.rng = rng
        self.limits = limits
        self.is_overlapped = is_overlapped
        self.stop_chance = stop_chance
        self.content = np.full((num_pages, PAGE), POISON, np.int64)
        self.cache = PrefixTree(PAGE) if has_cache else None
        self.memory = PageMemory(num_pages, self.cache, tracks_freed=True)
        self.index = None if self.cache is None else StateIndex(self.cache)
        self.told: set[bytes] = set()
        """Keys of pages of which gateways are told."""
        has_tiers = slots[0] > 0 and has_cache
        self.blocks = PageMemory(num_blocks, self.index, tracks_freed=has_tiers)
        set_free = self.blocks._set_free

        def poison(block: int) -> None:
            set_free(block)
            self.device.poison([block])

        if not has_tiers:  # They read what the pool has just given up.
            self.blocks._set_free = poison  # type: ignore[method-assign]
        most = limits.max_running_requests
        most_late = max_drafts if drafts and self.is_on_device else 0
        blocks = self.blocks, self.index
        self.states = StateCompanion(*blocks, PAGE, checkpoint_tokens, most, 1 + most_late)
        self.states.watch(self._reached, self.told.remove)
        rows = num_ring_rows(PAGE, 1 + max_drafts)
        self.device = StateMemory(PLANE, num_blocks, most, rows, torch.device("cpu"))
        self.device.poison(range(1, num_blocks))
        for ring in self.device.pools.rings:
            ring.fill_(float("nan"))
        self.table = PageTable(most, num_pages, keeps_changes=False)
        pages = RequestPages(self.memory, self.cache, PAGE, (self.states,))
        queue = make_queue("fcfs", 30.0, pages.num_cached_tokens, limits.max_step_tokens)
        self.finished: list[Request] = []
        self.now = 0.0
        self.tiers: Tiers | None = None
        """Host memory and disk; None: there are none."""
        fills, events = None, SchedulerEvents()
        if has_tiers:
            policy = TierPolicy(threshold, load_back_threshold=0)
            self.tiers = self._make_tiers(pages, policy, slots, folder)
            alone = cast("OwnerFills", _NoFillers())
            fills = TieredFills(self.tiers, None, alone, policy, PAGE_BYTES, PAGE, lambda: 0.0)
            write_through(events, policy, self.tiers, None)
        drafting = None
        if drafts:
            gate = RandomGate(rng, max_drafts)
            drafting = Drafting(gate, self.is_on_device, max_drafts, num_pages * PAGE)
        self.scheduler = Scheduler(
            limits,
            pages,
            queue,
            fills,
            self.finished.append,
            self._free_slot,
            events=events,
            drafting=drafting,
        )
        self._flying: BenchStep | None = None
        self.num_added = 0
        self.num_accepted = 0
        self.num_computed = 0
        self.num_rerun = 0
        """Rows that were computed for their states alone."""
        self._siblings: dict[Request, list[list[int]]] = {}
        """Samples that are still to be forked: the tokens that each has generated elsewhere."""

    def _make_tiers(
        self, pages: RequestPages, policy: TierPolicy, slots: tuple[int, int], folder: Path
    ) -> Tiers:
        files = PageFiles(folder) if slots[1] else None
        disk = None
        if files is not None:
            disk = disk_tier(files, slots[1] * PAGE_BYTES, PAGE_BYTES, lru)
        rows = self.content.view(np.uint8)
        parts = TierComponents(
            host=host_tier(slots[0], PAGE_BYTES, lru)[0],
            disk=disk,
            files=files,
            make_pool=lambda: HostPool(rows),
            notices=[],
        )
        carried = _Blocks(self.states, self.device)
        return Tiers(
            parts,
            PAGE,
            self.memory,
            policy,
            lambda: 0.0,
            pages.num_cached_pages,
            lambda: self.now,
            progress_timeout_s=1e9,
            num_continuable_pages=pages.num_continuable_pages,
            events=fill_events_to(self),
            wake=lambda: None,
            companions=(carried,),
        )

    def _reached(self, key: bytes, parent: bytes) -> None:
        assert key not in self.told
        assert parent in self.told or parent == ROOT_KEY, "pages are told in order"
        self.told.add(key)

    def _free_slot(self, slot: int) -> None:
        self.table.clear(slot)

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        num_siblings: int = 0,
        generated: Sequence[int] = (),
    ) -> Request:
        """Queues a prompt, of which samples are forked behind its first token. Where another worker
        has `generated` tokens, the siblings have a part of these.
        """
        self.num_added += 1
        request = bare_request(
            [*tokens, *generated],
            PAGE,
            NAMESPACE,
            key=RequestKey(0, str(self.num_added), 1),
            num_prompt_tokens=len(tokens),
            max_tokens=max_tokens + len(generated),
            arrival=self.num_added,
            timeline=Timeline(submitted_at=self.now),
        )
        request.drafts.wanted = self.scheduler.running_plans.gate is not None
        if num_siblings:
            self._siblings[request] = [
                list(generated[: self.rng.randint(0, len(generated))]) for _ in range(num_siblings)
            ]
        if self.tiers is not None:
            self.tiers.look_up(request)
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request."""
        self._siblings.pop(request, None)
        self.scheduler.finish(request)

    def step(self) -> None:
        """One turn, in the order of `StepPipeline.turn`."""
        self.now += 1.0
        if self.tiers is not None:
            self.tiers.take()
        plan = self.scheduler.plan(self.now)
        if self.tiers is not None:
            self.tiers.write_back()
            self.tiers.begin_loads()
        step = self._launch(plan) if len(plan) else None
        before, self._flying = self._flying, step
        if before is not None:
            self._end(before)
        if step is not None and self.rng.random() < 0.5:
            step.run(self)
        if step is not None and not self.is_overlapped:
            self._flying = None
            self._end(step)
        if self.tiers is not None:
            self.tiers.tick()
            self.device.poison(self.blocks.take_freed())
        self.content[self.memory.take_freed()] = POISON
        for pool in self.device.pools.blocks:
            assert pool[self.blocks._free].isnan().all(), "a step wrote to a free block"
        self.memory.check_integrity()
        self.blocks.check_integrity()

    def _launch(self, plan: Plan) -> BenchStep:
        number = self.scheduler.launch(plan)
        copies: list[PageCopy] = []
        self.scheduler.pages.make_copies(copies.extend)
        assert not copies, "there are no copies of parts of pages"
        plan.drafts = self._drafts(plan)
        made = step_input(plan, self.table, PAGE)
        self.states.begin_step(plan.companion_rows, made)
        arrays = StepArrays.of_step(made, self.table, PAGE)
        self.num_computed += len(arrays.positions)
        self.num_rerun += int((arrays.places < PAGE).sum())
        assert NULL_PAGE == 0
        table = self.table.pages[arrays.slots].copy()
        return self._step(number, plan, arrays, table)

    def _drafts(self, plan: Plan) -> Sequence[list[int]]:
        return [
            [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, item.max_drafts))]
            for item in plan.verifies
        ]

    def _step(
        self,
        number: int,
        plan: Plan,
        arrays: StepArrays,
        table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    ) -> BenchStep:
        return BenchStep(number, plan, arrays, table)

    def _end(self, step: BenchStep) -> None:
        """The device has done the step: commits it, and draws."""
        step.run(self)
        plan = step.plan
        self.scheduler.commit(step.number, plan)
        drawing = [*plan.decodes, *(item.request for item in plan.drawing_chunks)]
        for request in drawing:
            if request.state is not State.FINISHED:
                request.tokens.append(self.rng.randrange(VOCAB))
                self._settle(request)
        for item, drafts in zip(plan.verifies, plan.drafts, strict=True):
            request = item.request
            if request.state is State.FINISHED:
                continue
            count = self.rng.randint(0, len(drafts))
            left = request.max_tokens - request.num_generated
            request.tokens += [*drafts[:count], self.rng.randrange(VOCAB)][:left]
            self.num_accepted += count
            if count and left > 1:
                self.scheduler.accepted(request)
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """Forks and ends a request that drew."""
        is_last = request.num_generated >= request.max_tokens
        for number, generated in enumerate(self._siblings.pop(request, ())):
            self._fork(request, number + 1, generated)
        if is_last or self.rng.random() < self.stop_chance:
            self.scheduler.finish(request)

    def _fork(self, first: Request, sample: int, generated: list[int]) -> None:
        self.num_added += 1
        request = bare_request(
            first.tokens[: first.num_prompt_tokens] + generated,
            PAGE,
            NAMESPACE,
            key=first.key,
            num_prompt_tokens=first.num_prompt_tokens,
            max_tokens=first.max_tokens,
            arrival=self.num_added,
            timeline=Timeline(submitted_at=first.timeline.submitted_at),
        )
        request.drafts.wanted, request.sample, request.is_sibling = (
            first.drafts.wanted,
            sample,
            True,
        )
        if first.state is State.RUNNING:
            self.scheduler.pages.share(first, request)
        self.scheduler.add(request)

    def check_cached(self) -> None:
        """Every cached block is the state of its node's tokens, and of nothing else."""
        if self.index is None:
            return
        self.index.check_integrity()
        for node, kept in self.index._of_node.items():
            tokens = _tokens_to(node)
            found = torch.cat([pool[kept.block, 0].view(-1) for pool in self.device.pools.blocks])
            right = [sums(tokens)[-1]] * COPIES + [len(tokens)]
            assert found.tolist() == right, "a cached state is of other tokens"
        assert self.told == {node.key for node in self.index._num_reaching}

    def run_out(self, max_steps: int = 20_000) -> None:
        """Steps until nothing is left, and checks that nothing is."""
        for _ in range(max_steps):
            is_moving = self.tiers is not None and self.tiers.num_open > 0
            if not (self.scheduler.num_requests or self._flying is not None or is_moving):
                break
            self.step()
            if is_moving:
                time.sleep(2e-4)
        else:
            raise AssertionError("a request starved")
        self.step()
        self.check_cached()
        assert not len(self.states)
        assert self.states._reserved == (0, 0)
        assert not self.blocks.counts().used
        assert not self.memory.counts().used
        assert not self.memory.num_promised_pages
        if self.tiers is not None:
            assert not any(self.tiers.sizes().values()), self.tiers.sizes()
            for tier in self.tiers._tiers:
                tier.pages.check_integrity()
                assert not tier.counts().used


@dataclass(frozen=True)
class _Blocks:
    """Implements `Carried`."""

    companion: StateCompanion
    device: StateMemory
    num_pages: int = BLOCK_PAGES
    first_key: int = 0

    def make_pool(self) -> BlockPool:
        return BlockPool(self.device.of_blocks, BLOCK_PAGES, PAGE_BYTES)


class _NoFillers:
    """Stands for the owner's side of fills, of which there are none."""

    def num_more(self, request: Request, end_token: int) -> int:
        return BLOCK_PAGES

    def next_state(self, request: Request) -> State:
        return State.PREFILLING

    def has_room(self, request: Request) -> bool:
        return True

    def start(self, request: Request) -> bool:
        return True

    def abandon(self, request: Request) -> None:
        pass


def _tokens_to(node: Node) -> list[int]:
    parts: list[bytes] = []
    while node.parent is not None:
        parts.append(node.tokens)
        node = node.parent
    return array("I", b"".join(reversed(parts))).tolist()
