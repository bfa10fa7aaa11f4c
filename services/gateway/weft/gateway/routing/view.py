"""What a routing policy sees of a pool: who is there, and columns of how loaded each is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from weft.gateway.routing.step_model import StepModel

Column = NDArray[np.int64]
"""One number a worker, by its position in the view."""
Rates = NDArray[np.float64]
"""Likewise."""
LOADS = ("num_requests", "queued_tokens", "num_tokens")
UNREPORTED = ("unreported_requests", "unreported_tokens")
SPEEDS = ("tokens_per_s", "step_base_s", "step_request_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One incarnation of a worker: what of it does not change."""

    worker_id: str
    address: str
    epoch: int
    host: str = ""
    """Machine that it runs on; workers of one host are beside each other."""
    total_pages: int = 0
    """Of its pool; 0 = not known."""
    page_size: int = 0
    """Token positions a page; 0 = not known."""
    model_digest: bytes = b""
    kv_layout: str = ""
    """With the digest, what pages of this worker are named by."""

    @property
    def naming(self) -> tuple[bytes, str, int]:
        """Workers of equal naming have the same keys for the same tokens."""
        return (self.model_digest, self.kv_layout, self.page_size)


class PoolView:
    """The healthy workers of one pool. Policies read it and change nothing.

    Members never change: a pool that gains or loses a worker gets a new view. Loads change in
    place, so a decision costs no pass over the workers in Python.
    """

    __slots__ = (*LOADS, *UNREPORTED, *SPEEDS, "total_pages", "workers")

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        """A view of idle workers.

        Args:
            workers: In an order that does not depend on load.
        """
        self.workers = tuple(workers)
        self.total_pages: Column = np.array([one.total_pages for one in workers], np.int64)
        """Of each worker's pool; 0 = not known."""
        self.num_requests: Column = np.zeros(len(workers), np.int64)
        """Running, waiting and filling."""
        self.queued_tokens: Column = np.zeros(len(workers), np.int64)
        """Prompt tokens that are still to be computed."""
        self.num_tokens: Column = np.zeros(len(workers), np.int64)
        """Prompt and generated tokens of all those requests."""
        self.unreported_requests: Column = np.zeros(len(workers), np.int64)
        """Of `num_requests`, what this gateway added since the last report; less what ended."""
        self.unreported_tokens: Column = np.zeros(len(workers), np.int64)
        """Likewise, of `queued_tokens`."""
        self.tokens_per_s: Rates = np.zeros(len(workers))
        """Prompt tokens that it computes a second; 0 = not known."""
        self.step_base_s: Rates = np.zeros(len(workers))
        """Of a decode step without requests; 0 with the next one = not known."""
        self.step_request_s: Rates = np.zeros(len(workers))
        """That each request adds to it."""

    def __len__(self) -> int:
        return len(self.workers)

    def put(self, position: int, num_requests: int, queued_tokens: int, num_tokens: int) -> None:
        """Sets one worker's load."""
        self.num_requests[position] = num_requests
        self.queued_tokens[position] = queued_tokens
        self.num_tokens[position] = num_tokens

    def put_unreported(self, position: int, num_requests: int, queued_tokens: int) -> None:
        """Sets what of one worker's load it does not know of yet."""
        self.unreported_requests[position] = num_requests
        self.unreported_tokens[position] = queued_tokens

    def put_speed(self, position: int, tokens_per_s: float, steps: StepModel) -> None:
        """Sets how fast one worker is."""
        self.tokens_per_s[position] = tokens_per_s
        self.step_base_s[position] = steps.base_s
        self.step_request_s[position] = steps.request_s

    def without(self, positions: Collection[int]) -> tuple[PoolView, list[int]]:
        """A copy without some workers, and where its members were in this one."""
        kept = [position for position in range(len(self.workers)) if position not in positions]
        view = PoolView([self.workers[position] for position in kept])
        for name in (*LOADS, *UNREPORTED, *SPEEDS):
            getattr(view, name)[:] = getattr(self, name)[kept]
        return view, kept


class Speed(NamedTuple):
    """How fast a worker says that it is; 0 = not known."""

    tokens_per_s: float = 0.0
    """Prompt tokens that it computes."""
    step_s: float = 0.0
    """Mean time of its latest decode steps."""
    step_requests: float = 0.0
    """Mean requests that decoded in those."""


class LoadEstimate:
    """One worker's load: as it reported, and corrected by what this gateway did since.

    Reports are some hundred milliseconds apart. Without the correction all requests between two
    of them would go to the same worker, and one that has done its work would seem busy.
    """

    __slots__ = (
        "_others_queued",
        "_own",
        "_own_then",
        "_position",
        "_reported",
        "_steps",
        "_tokens_per_s",
        "_view",
    )

    def __init__(self) -> None:
        self._reported = (0, 0, 0)
        """Requests, prompt tokens to compute, tokens."""
        self._own = (0, 0, 0)
        """Likewise, of this gateway's requests on it now."""
        self._own_then = (0, 0, 0)
        """Likewise, at the last report."""
        self._others_queued = 0
        """At the last report, prompt tokens to compute of the requests of others."""
        self._tokens_per_s = 0.0
        self._steps = StepModel()
        self._view: PoolView | None = None
        self._position = 0

    def show_in(self, view: PoolView | None, position: int = 0) -> None:
        """Keeps a view's columns right from now on; None: no view any more."""
        self._view, self._position = view, position
        self._show()
        self._show_speed()

    def take_speed(self, speed: Speed) -> None:
        """Takes the worker's own word on how fast it is."""
        self._tokens_per_s = speed.tokens_per_s
        self._steps.observe(speed.step_requests, speed.step_s)
        self._show_speed()

    def report(self, num_requests: int, queued_tokens: int, num_tokens: int) -> None:
        """Takes the worker's own word; what was sent before is part of it."""
        self._reported = (num_requests, queued_tokens, num_tokens)
        self._own_then = self._own
        self._others_queued = max(0, queued_tokens - self._own[1])
        self._show()

    def begin(self, num_tokens: int, to_compute: int) -> None:
        """A request is sent to it; `computed` and `end` follow.

        Args:
            num_tokens: Of its prompt.
            to_compute: Of those, tokens that it is believed not to hold.
        """
        self._add(1, to_compute, num_tokens)

    def computed(self, to_compute: int) -> None:
        """A request's prompt has been computed, or never will be; as at its `begin`."""
        self._add(0, -to_compute, 0)

    def end(self, num_tokens: int) -> None:
        """A request left it; as at its `begin`."""
        self._add(-1, 0, -num_tokens)

    @property
    def own_requests(self) -> int:
        """Requests of this gateway that are on it now."""
        return self._own[0]

    @property
    def num_requests(self) -> int:
        """Running, waiting and filling."""
        return self._now(0)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return self._others_queued + self._own[1]

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens of all its requests."""
        return self._now(2)

    def _now(self, which: int) -> int:
        own = self._own[which]
        return max(own, self._reported[which] + own - self._own_then[which])

    def _add(self, num_requests: int, to_compute: int, num_tokens: int) -> None:
        own = self._own
        self._own = (own[0] + num_requests, own[1] + to_compute, own[2] + num_tokens)
        self._show()

    def _show(self) -> None:
        if self._view is not None:
            self._view.put(self._position, self._now(0), self.queued_tokens, self._now(2))
            own, then = self._own, self._own_then
            self._view.put_unreported(self._position, own[0] - then[0], own[1] - then[1])

    def _show_speed(self) -> None:
        if self._view is not None:
            self._view.put_speed(self._position, self._tokens_per_s, self._steps)
