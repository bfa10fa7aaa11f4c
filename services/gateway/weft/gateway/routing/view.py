"""What policies see: a pool's workers with columns of their loads, and the request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from weft.common.capacity import StepModel
from weft.contract.keys import PromptMedia, RecentPages, ShortKeys, namespace_digest
from weft.contract.spans import MediaSpan

Column = NDArray[np.int64]
"""One integer per worker, by its position in the view."""
Rates = NDArray[np.float64]
"""One float per worker, by its position in the view."""
LOADS = ("num_requests", "queued_tokens", "num_tokens")
UNREPORTED = ("unreported_requests", "unreported_tokens")
SPEEDS = ("tokens_per_s", "step_base_s", "step_request_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The constant facts about one incarnation of a worker."""

    worker_id: str
    address: str
    epoch: int
    host: str = ""
    """Machine that it runs on."""
    total_pages: int = 0
    """Pages of its pool; 0: not known."""
    page_size: int = 0
    """Token positions per page; 0: unknown."""
    model_digest: bytes = b""
    kv_layout: str = ""
    """Layout of its pages, which with the digest determines their names."""
    encoder_digest: bytes = b""
    """Digest of its encoder of media, which names pages that media touch; empty: it has none."""

    @property
    def naming(self) -> tuple[bytes, str, int]:
        """Workers with equal values have the same keys for the same tokens."""
        return (self.model_digest, self.kv_layout, self.page_size)


class PoolView:
    """The healthy workers of one pool; read-only for policies.

    Members never change: a pool that gains or loses a worker gets a new view. Loads change in
    place, so a decision costs no pass over the workers in Python.
    """

    __slots__ = (*LOADS, *UNREPORTED, *SPEEDS, "has_recent_steps", "total_pages", "workers")

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        """Creates a view of idle workers, in an order that does not depend on load."""
        self.workers = tuple(workers)
        self.total_pages: Column = np.array([one.total_pages for one in workers], np.int64)
        """Pages of each worker's pool; 0: not known."""
        self.num_requests: Column = np.zeros(len(workers), np.int64)
        """Numbers of running, waiting and filling requests."""
        self.queued_tokens: Column = np.zeros(len(workers), np.int64)
        """Prompt tokens still to be computed."""
        self.num_tokens: Column = np.zeros(len(workers), np.int64)
        """Prompt and generated tokens of all those requests."""
        self.unreported_requests: Column = np.zeros(len(workers), np.int64)
        """Part of `num_requests` that this gateway added since the last report, less those that
        ended.
        """
        self.unreported_tokens: Column = np.zeros(len(workers), np.int64)
        """Part of `queued_tokens` that this gateway added since the last report."""
        self.tokens_per_s: Rates = np.zeros(len(workers))
        """Prompt tokens computed per second; 0: unknown."""
        self.step_base_s: Rates = np.zeros(len(workers))
        """Time of a decode step without requests; 0, with the next column: not known."""
        self.step_request_s: Rates = np.zeros(len(workers))
        """Time that each request adds to it."""
        self.has_recent_steps: NDArray[np.bool_] = np.zeros(len(workers), np.bool_)
        """Whether the worker has run decode steps lately."""

    def __len__(self) -> int:
        return len(self.workers)

    def put(self, position: int, num_requests: int, queued_tokens: int, num_tokens: int) -> None:
        """Sets one worker's load."""
        self.num_requests[position] = num_requests
        self.queued_tokens[position] = queued_tokens
        self.num_tokens[position] = num_tokens

    def put_unreported(self, position: int, num_requests: int, queued_tokens: int) -> None:
        """Sets the part of one worker's load that it has not reported yet."""
        self.unreported_requests[position] = num_requests
        self.unreported_tokens[position] = queued_tokens

    def put_speed(self, position: int, tokens_per_s: float, steps: StepModel) -> None:
        """Sets one worker's speed."""
        self.tokens_per_s[position] = tokens_per_s
        self.step_base_s[position] = steps.base_s
        self.step_request_s[position] = steps.request_s
        self.has_recent_steps[position] = steps.is_recent

    def without(self, positions: Collection[int]) -> tuple[PoolView, list[int]]:
        """A copy without some workers, with the members' positions in this one."""
        kept = [position for position in range(len(self.workers)) if position not in positions]
        view = PoolView([self.workers[position] for position in kept])
        for name in (*LOADS, *UNREPORTED, *SPEEDS, "has_recent_steps"):
            getattr(view, name)[:] = getattr(self, name)[kept]
        return view, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """The part of a request that matters for routing."""

    request_id: str
    prompt_ids: Sequence[int]
    context_tokens: int = 0
    """Most tokens that prompt and answer may come to; 0: unknown."""
    cache_salt: str = ""
    routing_key: str = ""
    """Routing key; empty: none."""
    worker_id: str = ""
    """Decode worker that the client has named; empty: any."""
    prefill_host: str = ""
    """Machine of the prefill worker that will fill the request's pages; empty: unknown."""
    first_token_s: float | None = None
    """Target for the time from sending to the first token; None: none."""
    adapter: bytes = b""
    """Content digest of its adapter; empty: the base model. Pages of other adapters do not match.
    """
    is_computed_anew: bool = False
    """Whether the owner computes the whole prompt, no matter who holds or could fill it."""
    spans: Sequence[MediaSpan] = ()
    """Media of the prompt, which the keys of its pages name."""
    recent: RecentPages | None = field(default=None, repr=False, compare=False)
    """Prompts of earlier requests, which need not be hashed again; None: nothing is remembered."""
    _keys: dict[tuple[bytes, str, int, bytes], ShortKeys] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def separator(self) -> bytes:
        """Requests whose pages match have equal separators."""
        return self.adapter + self.cache_salt.encode() + b"\0"

    def page_keys(self, worker: WorkerView) -> ShortKeys:
        """Keys of the prompt's full pages on a worker, whose page size must be known."""
        encoder = worker.encoder_digest if self.spans else b""
        naming = (*worker.naming, encoder)
        keys = self._keys.get(naming)
        if keys is None:
            namespace = _namespace(
                worker.model_digest, worker.kv_layout, self.adapter, self.cache_salt
            )
            media = PromptMedia(self.spans, encoder)
            size = worker.page_size
            keys = ShortKeys(self.prompt_ids, size, namespace, self.recent, media)
            self._keys[naming] = keys
        return keys

    def beside(self, host: str) -> RoutingRequest:
        """The same request, with its prefill worker's host."""
        placed = replace(self, prefill_host=host)
        object.__setattr__(placed, "_keys", self._keys)  # they need not be computed again
        return placed

    def num_useful_pages(self, page_size: int) -> int:
        """Number of full pages that others may fill: the owner always runs the last token."""
        return max(0, len(self.prompt_ids) - 1) // page_size


@lru_cache(maxsize=1024)
def _namespace(model_digest: bytes, layout: str, adapter: bytes, cache_salt: str) -> bytes:
    return namespace_digest(model_digest, layout, adapter_digest=adapter, cache_salt=cache_salt)


class Throughput(NamedTuple):
    """A worker's speed as it reports it; 0: not known."""

    tokens_per_s: float = 0.0
    """Prompt tokens computed per second."""
    step_s: float = 0.0
    """Mean time of its latest decode steps."""
    step_requests: float = 0.0
    """Mean number of decoding requests in those steps."""


class LoadEstimate:
    """One worker's load as it last reported it, corrected by what this gateway has done since.

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
        """Reported requests, prompt tokens to compute, and tokens."""
        self._own = (0, 0, 0)
        """The part of this gateway's requests now."""
        self._own_then = (0, 0, 0)
        """The part of this gateway's requests at the last report."""
        self._others_queued = 0
        """Prompt tokens that other gateways' requests had still to compute, at the last report."""
        self._tokens_per_s = 0.0
        self._steps = StepModel()
        self._view: PoolView | None = None
        self._position = 0

    def show_in(self, view: PoolView | None, position: int = 0) -> None:
        """Keeps a view's columns up to date from now on; None: no view."""
        self._view, self._position = view, position
        self._show()
        self._show_speed()

    def take_speed(self, speed: Throughput) -> None:
        """Takes the worker's report of its speed."""
        self._tokens_per_s = speed.tokens_per_s
        self._steps.observe(speed.step_requests, speed.step_s)
        self._show_speed()

    @property
    def speed(self) -> tuple[float, float, float]:
        """Prompt tokens a second, time of an empty step, time that each request adds; 0:
        unknown.
        """
        return self._tokens_per_s, self._steps.base_s, self._steps.request_s

    def report(self, num_requests: int, queued_tokens: int, num_tokens: int) -> None:
        """Takes the worker's report of its load, which includes the requests sent before it."""
        self._reported = (num_requests, queued_tokens, num_tokens)
        self._own_then = self._own
        self._others_queued = max(0, queued_tokens - self._own[1])
        self._show()

    def begin(self, num_tokens: int, to_compute: int) -> None:
        """Adds a request that is being sent; `computed` and `end` follow. `num_tokens` is the
        length of its prompt; of those, the worker is believed not to hold `to_compute`.
        """
        self._add(1, to_compute, num_tokens)

    def stays(self, to_compute: int) -> None:
        """Adds a prompt to the queue of this worker, which computes it after all. Its request was
        counted before without the prompt, since a prefill worker was expected to compute that.
        """
        self._add(0, to_compute, 0)

    def computed(self, to_compute: int) -> None:
        """Removes a request's prompt, which is computed or never will be. `to_compute` is that of
        `begin`.
        """
        self._add(0, -to_compute, 0)

    def end(self, num_tokens: int) -> None:
        """Removes a request. `num_tokens` is that of `begin`."""
        self._add(-1, 0, -num_tokens)

    @property
    def own_requests(self) -> int:
        """Number of requests of this gateway on it now."""
        return self._own[0]

    @property
    def num_requests(self) -> int:
        """Number of running, waiting and filling requests."""
        return self._now(0)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
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
