"""A scheduler around a device that draws random tokens, and fills that come and go at random.

A page of the device holds the tokens whose KV it would hold. The device is late: it may run a step
when it is waited for, long after later ones were planned. A filler writes into each page that it
is given at once, and into each page that becomes free.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from weft.contract.layout import PagedPlane, PageGroup
from weft.contract.pages import PageCopy
from weft.contract.spans import MediaSpan, before_span
from weft.contract.timeline import FillCandidate, Timeline
from weft.engine.base.config import PolicyName
from weft.engine.base.state_rows import StateRows
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import PageSources, Request, RequestKey, State
from weft.engine.requests.window_companion import WindowCompanion
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.plan import Plan, PlanItem
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.prompt_budget import PromptTokens
from weft.engine.scheduler.running import Drafting
from weft.engine.scheduler.scheduler import Scheduler
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.page_table import PageTable
from weft.pages.memory.tree import PrefixTree
from weft.pages.memory.window_index import WindowIndex
from weft.testing.scheduling.adapter_bench import AdapterBench
from weft.testing.scheduling.bare_request import bare_request

PAGE = 4
NAMESPACE = bytes(32)
CANDIDATE = FillCandidate(worker_id="p", address="p", epoch=1)
POISON = -7
Content = list[list[int]]
"""The token whose KV is stored, by page and offset."""


def window_group(reach: int) -> PageGroup:
    """A page group whose rows need the last `reach` positions."""
    return PageGroup((PagedPlane(layers=1, heads=1, dim=1, dtype="float32"),), reach)


@dataclass
class _Step:
    """A step that has begun: what the device was told then."""

    number: int
    plan: Plan
    items: list[PlanItem]
    copies: list[PageCopy]
    pages: list[list[int]]
    adapters: list[tuple[int, bytes]]
    """Slot and digest, of those that have one."""
    window_pages: list[list[int]]
    """Rows of the page table, where there is a window group."""
    is_done: bool = False

    def run(
        self, content: Content, adapters: AdapterBench | None, window: WindowBench | None
    ) -> None:
        """The device gets to it; tokens of earlier steps have been committed."""
        if self.is_done:
            return
        self.is_done = True
        for slot, digest in self.adapters:
            assert adapters is not None
            adapters.check(slot, digest)
        for source, destination in self.copies:
            content[destination] = list(content[source])
        for item, pages in zip(self.items, self.pages, strict=True):
            tokens = item.request.tokens
            for position in range(item.start + item.num_tokens):
                page, offset = pages[position // PAGE], position % PAGE
                if position >= item.start:
                    content[page][offset] = tokens[position]
                assert content[page][offset] == tokens[position], "a step reads another's KV"
        if window is not None:
            for item, pages in zip(self.items, self.window_pages, strict=True):
                window.run(item, pages)


@dataclass
class _Made:
    states: StateRows | None = None


class WindowBench:
    """A window group of a device.

    Args:
        cache: Index of the first group's pages.
        num_pages: Of the group, the null page included.
        reach: Positions that a row attends to.
        limits: Budgets.
        max_pages: Of the longest request.
    """

    def __init__(
        self,
        cache: PrefixTree,
        num_pages: int,
        reach: int,
        limits: SchedulerLimits,
        max_pages: int,
    ) -> None:
        self.reach = reach
        self.content: Content = [[POISON] * PAGE for _ in range(num_pages)]
        group = window_group(reach)
        self.index = WindowIndex(cache, group, PAGE)
        self.memory = PageMemory(num_pages, self.index, tracks_freed=True)
        most = limits.max_step_tokens
        self.table = PageTable(limits.max_running_requests, max_pages, keeps_changes=False)
        self.pages = WindowCompanion(self.memory, self.index, self.table, group, PAGE, most)
        self.lent: dict[int, list[int]] = {}
        """Pages that a fill will give, by the identity of its request."""
        self.held: list[int] = []
        """Pages that are being copied."""

    def run(self, item: PlanItem, pages: list[int]) -> None:
        """The device writes and reads the rows of an item."""
        tokens, end = item.request.tokens, item.start + item.num_tokens
        for position in range(max(0, item.start - self.reach + 1), end):
            page, offset = self.content[pages[position // PAGE]], position % PAGE
            if position >= item.start:
                page[offset] = tokens[position]
            assert page[offset] == tokens[position], "a row's window has another's KV"

    def fill(self, request: Request) -> None:
        """A filler's pages of the group come with the last one of its fill."""
        num_pages = request.num_computed // PAGE
        lent = self.lent.pop(id(request), None)
        pages = self.pages.adopt(request, num_pages, lent)
        for index, page in enumerate(pages, num_pages - len(pages)):
            self.content[page] = request.tokens[index * PAGE : (index + 1) * PAGE]

    def lend(self, request: Request, num_pages: int) -> None:
        """Prepares what `fill` will give, as a tier does, if there is room."""
        if (pages := self.pages.lend(request, num_pages)) is not None:
            self.lent[id(request)] = pages

    def give_back(self, request: Request) -> None:
        """Ends `lend` without `fill`."""
        self.pages.give_back(self.lent.pop(id(request), []))

    def hold_some(self, rng: random.Random) -> None:
        """Holds some cached pages, as copies of them do, and lets others go."""
        cached = [*self.index._left, *self.index._unused]
        some = rng.sample(cached, rng.randint(0, len(cached)))
        self.held += [page for page in some if self.pages.hold(page)]
        self.let_go(rng.randint(0, len(self.held)))

    def let_go(self, count: int | None = None) -> None:
        """Ends the holding of so many pages; None: of all."""
        count = len(self.held) if count is None else count
        self.pages.give_back(self.held[:count])
        del self.held[:count]

    def check(self) -> None:
        """Poisons what is free, where no step may have written since it was."""
        fresh = self.memory.take_freed()
        for page in set(self.memory._free) - set(fresh):
            assert self.content[page] == [POISON] * PAGE, f"a step wrote to free page {page}"
        for page in fresh:
            self.content[page] = [POISON] * PAGE
        self.memory.check_integrity()
        self.index.check_integrity()


class FakeFills:
    """Accepts a random number of pages a turn; refuses and fails at random; keeps the contract of
    `Fills`.
    """

    def __init__(self, memory: PageMemory, rng: random.Random, content: Content) -> None:
        self.memory = memory
        self.content = content
        self.rng = rng
        self.idle_chance = rng.choice([0.0, 0.7])
        """That a fill makes no progress in a turn."""
        self.open: dict[int, tuple[Request, list[int]]] = {}
        self.scheduler: Scheduler | None = None
        self.window: WindowBench | None = None
        """A window group; a fill brings of it what the request needs behind its last page."""

    def next_state(self, request: Request) -> State:
        is_remote = bool(request.sources.candidates) and self._end(request) > self._begin(request)
        is_wanted = self.rng.random() < 0.8
        return State.FILLING if is_remote and is_wanted else State.PREFILLING

    def has_room(self, request: Request) -> bool:
        return self.rng.random() < 0.7

    def start(self, request: Request) -> bool:
        if id(request) not in self.open:
            if self.rng.random() < 0.2:
                return False
            first = self._begin(request)
            count = (self._end(request) - first) // PAGE
            pages = self.memory.allocate(count, promised=True)
            request.held.num_promised -= count
            for index, page in enumerate(pages):
                begin = first + index * PAGE
                self.content[page] = request.tokens[begin : begin + PAGE]
            self.open[id(request)] = (request, pages)
            if self.window is not None and self.rng.random() < 0.5:
                self.window.lend(request, self._end(request) // PAGE)
        return True

    def abandon(self, request: Request) -> None:
        _, pages = self.open.pop(id(request), (request, []))
        self.memory.release(pages)
        if self.window is not None:
            self.window.give_back(request)

    def turn(self) -> None:
        assert self.scheduler is not None
        for request, pages in list(self.open.values()):
            if self.rng.random() < self.idle_chance:
                continue
            accepted = self.rng.randint(0, len(pages))
            request.held.add(pages[:accepted])
            del pages[:accepted]
            if self.window is None:
                request.num_computed += accepted * PAGE
            elif not pages:
                request.num_computed = self._begin(request)
            self.scheduler.publish(request)
            if self.window is not None and not pages:
                self.window.fill(request)
            if not pages:
                del self.open[id(request)]
                self.scheduler.fill_completed(request)
            elif self.rng.random() < 0.2:
                del self.open[id(request)]
                self.memory.release(pages)
                if self.window is not None:
                    self.window.give_back(request)
                request.sources.candidates.pop()
                self.scheduler.fill_failed(request)

    def _begin(self, request: Request) -> int:
        return request.num_computed if self.window is None else len(request.held.pages) * PAGE

    def _end(self, request: Request) -> int:
        return (request.num_tokens - 1) // PAGE * PAGE


class Bench:
    """A scheduler with a model that emits random tokens."""

    def __init__(
        self,
        rng: random.Random,
        num_pages: int,
        limits: SchedulerLimits,
        policy: PolicyName = "fcfs",
        ageing_s: float = 30.0,
        *,
        is_overlapped: bool = False,
        stop_chance: float = 0.0,
        adapters: AdapterBench | None = None,
        prompt_budget: PromptTokens | None = None,
        reach: int | None = None,
        num_window_pages: int = 0,
        drafting: Drafting | None = None,
        num_leaving_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rng = rng
        self.is_overlapped = is_overlapped
        self.stop_chance = stop_chance
        """That a drawn token ends its request, which cannot be foreseen."""
        self.content: Content = [[POISON] * PAGE for _ in range(num_pages)]
        self.num_surplus = 0
        """Tokens drawn for requests that had ended."""
        self._flying: _Step | None = None
        self.limits = limits
        self.cache = PrefixTree(PAGE)
        self.memory = PageMemory(num_pages, self.cache, tracks_freed=True)
        self.fills = FakeFills(self.memory, rng, self.content)
        self.finished: list[Request] = []
        self.freed_slots: list[int] = []
        self.window: WindowBench | None = None
        """A window group; None: there is none."""
        if reach is not None:
            sizes = num_window_pages, reach, limits, num_pages
            self.window = WindowBench(self.cache, *sizes)
        windows = () if self.window is None else (self.window.pages,)
        pages = RequestPages(self.memory, self.cache, PAGE, windows)
        waiting = make_queue(policy, ageing_s, pages.num_cached_tokens, limits.max_step_tokens)
        self.adapters = adapters
        self.scheduler = Scheduler(
            limits,
            pages,
            waiting,
            self.fills,
            self.finished.append,
            self.freed_slots.append,
            adapters.manager.residency if adapters is not None else None,
            prompt_budget=prompt_budget,
            drafting=drafting,
            num_leaving_tokens=num_leaving_tokens,
        )
        if adapters is not None:
            adapters.attach(self.scheduler)
        self.fills.scheduler = self.scheduler
        self.fills.window = self.window
        self.num_added = 0
        self.now = 0.0
        self.num_computed = 0

    def add(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        remote: bool = False,
        prefix: Sequence[int] = (),
        priority: int = 0,
        tenant: str = "",
        adapter: bytes = b"",
        deadline: float = math.inf,
        first_token_deadline: float = math.inf,
        uncut_spans: Sequence[MediaSpan] = (),
    ) -> Request:
        """Queues a prompt of random tokens behind a prefix."""
        tokens = ([*prefix] + [self.rng.randrange(100) for _ in range(num_prompt)])[:num_prompt]
        self.num_added += 1
        request = bare_request(
            tokens,
            PAGE,
            hashlib.sha256(adapter).digest() if adapter else NAMESPACE,
            key=RequestKey(0, str(self.num_added), 1),
            num_prompt_tokens=num_prompt,
            max_tokens=max_tokens,
            arrival=self.num_added,
            timeline=Timeline(submitted_at=self.now),
            priority=priority,
            tenant=tenant,
            sources=PageSources([CANDIDATE, CANDIDATE] if remote else []),
            adapter=adapter,
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            uncut_spans=uncut_spans,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[PlanItem]:
        """One turn, and what the scheduler must keep to in each; a second of its clock."""
        self.now += 1.0
        if self.adapters is not None:
            self.adapters.turn()
        plan = self.scheduler.plan(self.now)
        items = list(plan)
        self._check_plan(items)
        self.num_computed += plan.num_tokens
        step = self._launch(plan) if items else None
        if self.rng.random() < 0.3:
            self.fills.turn()
            self.scheduler.admit(self.now)
        if self._flying is not None:
            self._end(self._flying)
        self._flying = step
        if step is not None and self.rng.random() < 0.5:
            step.run(self.content, self.adapters, self.window)
        if step is not None and not self.is_overlapped:
            self._flying = None
            self._end(step)
        self.fills.turn()
        self._poison()
        self.memory.check_integrity()
        self.cache.check_integrity()
        if self.window is not None:
            self.window.check()
        return items

    def _check_plan(self, items: list[PlanItem]) -> None:
        limits = self.limits
        most = limits.max_step_tokens + limits.decodes_beside
        assert sum(item.num_tokens for item in items) <= most
        assert len({id(item.request) for item in items}) == len(items)
        assert len({item.request.slot for item in items}) == len(items)
        for item in items:
            request = item.request
            end = item.start + item.num_tokens
            is_under_way = request.state is State.RUNNING and request.num_launched > 0
            start = request.num_computed + request.num_launched
            assert item.start == start, "tokens are computed in order, once"
            assert len(request.held.pages) * PAGE >= end, "computed tokens have pages"
            longest = max((span.length for span in request.uncut_spans), default=0)
            assert item.num_tokens <= max(limits.chunk_tokens, 1, longest + PAGE)
            assert before_span(request.uncut_spans, end) == end, "no chunk ends in a span"
            assert item.draws == (end == request.num_tokens + is_under_way)
            is_within = end // PAGE == item.start // PAGE or bool(longest)
            assert end % PAGE == 0 or item.draws or is_within, "chunks end at page borders"
            assert end <= request.num_prompt_tokens + request.max_tokens - 1 or not is_under_way

    def _launch(self, plan: Plan) -> _Step:
        assert plan.slots.tolist() == [request.slot for request in plan.decodes]
        number = self.scheduler.launch(plan)
        copies: list[PageCopy] = []
        self.scheduler.pages.make_copies(copies.extend)
        items = list(plan)
        pages = [list(item.request.held.pages) for item in items]
        slots = np.zeros(len(items), np.int64)
        if plan.columns is not None and plan.columns.adapter_slots is not None:
            slots[: len(plan.decodes)] = plan.columns.adapter_slots
        slots[len(plan.decodes) :] = [item.request.adapter_slot for item in plan.chunks]
        digests = [item.request.adapter for item in items]
        assert [bool(slot) for slot in slots] == [bool(digest) for digest in digests]
        adapters = [pair for pair in zip(slots.tolist(), digests, strict=True) if pair[0]]
        rows: list[list[int]] = []
        if self.window is not None:
            self.window.pages.begin_step(plan.companion_rows, _Made())
            rows = [self.window.table.pages[item.request.slot].tolist() for item in items]
        return _Step(number, plan, items, copies, pages, adapters, rows)

    def _end(self, step: _Step) -> None:
        """The device has done the step: commits it, and draws."""
        step.run(self.content, self.adapters, self.window)
        self._check_free()
        self.scheduler.commit(step.number, step.plan)
        for request in [item.request for item in step.items if item.draws]:
            if request.state is State.FINISHED:
                self.num_surplus += 1
                continue
            request.tokens.append(self.rng.randrange(100))
            is_stopped = self.rng.random() < self.stop_chance
            if is_stopped or request.num_generated >= request.max_tokens:
                self.scheduler.finish(request)

    def _poison(self) -> None:
        """A filler that writes into every page as soon as it is free."""
        for page in self.memory.take_freed():
            self.content[page] = [POISON] * PAGE

    def _check_free(self) -> None:
        """No step wrote to a page that it had no right to any more."""
        fresh = set(self.memory._freed or ())
        for page in set(self.memory._free) - fresh:
            assert self.content[page] == [POISON] * PAGE, f"a step wrote to free page {page}"

    def run(self, *requests: Request, max_steps: int = 20_000) -> None:
        """Steps until these requests have ended."""
        for _ in range(max_steps):
            if all(request.state is State.FINISHED for request in requests):
                self.settle()
                return
            self.step()
        raise AssertionError("a request starved")

    def settle(self) -> None:
        """Waits for the step under way, if there is one, and commits it."""
        if self._flying is not None:
            self.step()
