"""Simulated workers on a virtual clock."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.trace import PAGE_SIZE, Arrival

At = Callable[[float, Callable[[float], None]], None]
"""Calls a function at a time, with that time."""


@dataclass(slots=True)
class Job:
    """A request on a worker."""

    arrival: Arrival
    gateway: int
    worker: int
    submitted_at: float
    expected: int
    """Prompt tokens that the gateway expected to be computed."""
    matched: int = 0
    """Prompt tokens that the worker really held."""
    computed: int = 0
    """Prompt tokens that the worker had to compute, of those looked up so far."""
    started_at: float = 0.0
    """Time at which its prompt is computed, which is that of its first token."""
    ended_at: float = 0.0

    @property
    def num_pages(self) -> int:
        """Number of full pages of the prompt that another worker may fill."""
        return (len(self.arrival.tokens) - 1) // PAGE_SIZE


class PageCache:
    """Pages that a worker holds, least recently used ones evicted first, ends of prompts earlier.

    Args:
        max_pages: Most pages held.
        tell: Called with (stored, removed) after each change.
    """

    def __init__(self, max_pages: int, tell: Callable[[list[int], list[int]], None]) -> None:
        self._max_pages = max_pages
        self._tell = tell
        self._pages: OrderedDict[int, None] = OrderedDict()

    def match(self, names: Sequence[int], num_pages: int) -> int:
        """Number of leading pages held."""
        pages = self._pages
        for index in range(num_pages):
            if names[index] not in pages:
                return index
        return num_pages

    def add(self, names: Sequence[int], num_pages: int) -> None:
        """Adds the first pages of a prompt."""
        pages = self._pages
        stored = []
        for index in range(min(num_pages, self._max_pages) - 1, -1, -1):
            name = names[index]
            if name in pages:
                pages.move_to_end(name)
            else:
                pages[name] = None
                stored.append(name)
        removed = [pages.popitem(last=False)[0] for _ in range(len(pages) - self._max_pages)]
        if stored or removed:
            self._tell(stored[::-1], removed)


class SimulatedWorker(Protocol):
    """Common base of both kinds of workers."""

    num_requests: int
    queued_tokens: int
    num_tokens: int
    cache: PageCache

    def submit(self, now: float, job: Job) -> None:
        """Takes a request."""
        ...


class PrefillWorker:
    """Computes prompts one by one at a fixed rate, without the pages that it holds.

    Args:
        at: Calls a function at a later time.
        on_end: Called with every job that ended.
        cache: The worker's pages.
        rate: Prompt tokens per second.
    """

    def __init__(
        self, at: At, on_end: Callable[[Job], None], cache: PageCache, rate: float
    ) -> None:
        self._at = at
        self._on_end = on_end
        self.cache = cache
        self._rate = rate
        self._queue: deque[Job] = deque()
        self.num_requests = 0
        self.queued_tokens = 0
        self.num_tokens = 0

    def submit(self, now: float, job: Job) -> None:
        self.num_requests += 1
        self._look(job)
        self.queued_tokens += job.computed
        self.num_tokens += len(job.arrival.tokens)
        self._queue.append(job)
        if len(self._queue) == 1:
            self._begin(now)

    def _begin(self, now: float) -> None:
        job = self._queue[0]
        self.queued_tokens -= job.computed
        self._look(job)
        self.queued_tokens += job.computed
        self._at(now + job.computed / self._rate, self._end)

    def _look(self, job: Job) -> None:
        job.matched = PAGE_SIZE * self.cache.match(job.arrival.pages, job.num_pages)
        job.computed = len(job.arrival.tokens) - job.matched

    def _end(self, now: float) -> None:
        job = self._queue.popleft()
        num_tokens = len(job.arrival.tokens)
        self.num_requests -= 1
        self.queued_tokens -= job.computed
        self.num_tokens -= num_tokens
        self.cache.add(job.arrival.pages, job.num_pages)
        job.started_at = job.ended_at = now
        self._on_end(job)
        if self._queue:
            self._begin(now)


class DecodeWorker:
    """Decodes all its requests in one batch: a step takes `step_s` + `request_s` a request.

    Every request gets a token a step, so in virtual time they are served alike: a request ends when
    the worker's count of steps has grown by its output.

    Args:
        at: Calls a function at a later time.
        on_end: Called with every job that ended.
        cache: The worker's pages.
        step_s: Seconds of a step without requests.
        request_s: Seconds that each request adds.
    """

    def __init__(
        self,
        at: At,
        on_end: Callable[[Job], None],
        cache: PageCache,
        step_s: float,
        request_s: float,
    ) -> None:
        self._at = at
        self._on_end = on_end
        self.cache = cache
        self._step_s = step_s
        self._request_s = request_s
        self._steps = 0.0
        self._updated_at = 0.0
        self._ends: list[tuple[float, int, Job]] = []
        self._count = 0
        self._version = 0
        self.queued_tokens = 0
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        """Number of running requests."""
        return len(self._ends)

    def submit(self, now: float, job: Job) -> None:
        self._advance(now)
        job.started_at = now
        job.matched = PAGE_SIZE * self.cache.match(job.arrival.pages, job.num_pages)
        job.computed = len(job.arrival.tokens) - job.matched
        self.num_tokens += len(job.arrival.tokens)
        self._count += 1
        heapq.heappush(self._ends, (self._steps + job.arrival.num_output, self._count, job))
        self._schedule(now)

    def _advance(self, now: float) -> None:
        self._steps += (now - self._updated_at) / self.step_time_s
        self._updated_at = now

    @property
    def step_time_s(self) -> float:
        """Time of a step with all its requests."""
        return self._step_s + self._request_s * len(self._ends)

    def _schedule(self, now: float) -> None:
        self._version += 1
        version = self._version

        def end(then: float) -> None:
            if version == self._version:
                self._end(then)

        if self._ends:
            left = max(0.0, self._ends[0][0] - self._steps)
            self._at(now + left * self.step_time_s, end)

    def _end(self, now: float) -> None:
        self._advance(now)
        steps, _, job = heapq.heappop(self._ends)
        self._steps = max(self._steps, steps)  # Rounding must not stop the count.
        self.num_tokens -= len(job.arrival.tokens)
        num_pages = (len(job.arrival.tokens) + job.arrival.num_output - 1) // PAGE_SIZE
        self.cache.add(job.arrival.pages, min(num_pages, len(job.arrival.pages)))
        job.ended_at = now
        self._on_end(job)
        self._schedule(now)
