"""The interface of routing policies: their questions and their choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from weft.contract.keys import RecentPages, ShortKeys, namespace_digest
from weft.gateway.routing.page_index import FleetPageIndex
from weft.gateway.routing.view import Column, PoolView, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Settings of all policies; each uses those that concern it."""

    seed: int | None = None
    """Seed of policies that draw; None: a different one each time."""
    clock: Callable[[], float] = time.monotonic
    """Clock, seconds."""
    kv_events: bool = True
    """`cache_aware`: whether to use the workers' reports, rather than what was sent to them."""
    index_pages: int = 1 << 20
    """Most pages in an index over all workers."""
    request_tokens: int = 0
    """`cache_aware`: cost of one request on a worker, in prompt tokens."""
    compute_weight: float = 8.0
    """`cache_aware`: cost of a prompt token to be computed, in queued tokens."""
    spread_tokens: int = 80_000
    """`cache_aware`: cost of a cache that was refilled lately, in queued tokens, for a prompt that
    may go anywhere.
    """
    balance_abs_threshold: int = 32
    """Approximate `cache_aware`: difference in requests up to which loads count as balanced."""
    balance_rel_threshold: float = 1.0001
    """Approximate `cache_aware`: ratio of the most to the least requests that is balanced."""
    cache_threshold: float = 0.5
    """Approximate `cache_aware`: share of the prompt that a match must have to decide."""
    max_tree_pages: int = 1 << 16
    """Approximate `cache_aware`: pages remembered of each worker."""
    eviction_interval_s: float = 60.0
    """Approximate `cache_aware`: seconds between evictions."""
    load_factor: float = 1.25
    """`prefix_hash`: most requests of a worker, as a multiple of the mean."""
    prefix_tokens: int = 256
    """`prefix_hash`: number of leading tokens that decide."""
    max_pins: int = 1 << 17
    """`manual`: number of keys remembered."""
    pin_idle_s: float = 14_400.0
    """`manual`: seconds after which an unused key is forgotten."""


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
    recent: RecentPages | None = field(default=None, repr=False, compare=False)
    """Prompts of earlier requests, which need not be hashed again; None: nothing is remembered."""
    _keys: dict[tuple[bytes, str, int], ShortKeys] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def separator(self) -> bytes:
        """Bytes that only requests have in common whose pages match."""
        return self.adapter + self.cache_salt.encode() + b"\0"

    def page_keys(self, worker: WorkerView) -> ShortKeys:
        """Keys of the prompt's full pages on a worker, whose page size must be known."""
        keys = self._keys.get(worker.naming)
        if keys is None:
            namespace = _namespace(
                worker.model_digest, worker.kv_layout, self.adapter, self.cache_salt
            )
            keys = ShortKeys(self.prompt_ids, worker.page_size, namespace, self.recent)
            self._keys[worker.naming] = keys
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


class Choice(NamedTuple):
    """A worker that a policy chose."""

    position: int
    """Position in the view."""
    match_tokens: int = 0
    """Leading prompt tokens that the worker is believed to hold; 0 if the policy does not know."""


class Policy(ABC):
    """Chooses workers. One instance serves one pool, and may keep state."""

    def __init__(self, options: PolicyOptions | None = None) -> None:
        """Creates the policy without state; `options` default to their defaults."""
        self.options = options or PolicyOptions()
        self.index: FleetPageIndex | None = None
        """Prefix index, updated from the workers' KV events; None: the policy needs none."""
        self._turn = 0

    @abstractmethod
    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        """Chooses workers for a request.

        Args:
            view: The pool's healthy workers; not empty.
            request: The request to place.
            count: Workers wanted, at least 1.

        Returns:
            At most `count` different workers, the best first; at least one.
        """

    def flush(self) -> int:
        """Forgets the pages sent to workers, since they were told to drop them.

        Returns:
            Entries forgotten.
        """
        return 0

    def least(self, view: PoolView, count: int, *columns: Column) -> list[int]:
        """The workers with the least value of the first column, ties broken by the next columns,
        then in turn.

        Args:
            view: The pool.
            count: Number of workers wanted.
            columns: The most important one first.

        Returns:
            Positions, the best first.
        """
        turn, self._turn = self._turn, self._turn + 1
        return least(len(view), count, turn, *columns)


def least(size: int, count: int, turn: int, *columns: Column) -> list[int]:
    """See `Policy.least`; equal ones are taken in turn, beginning at `turn`."""
    first = columns[0]
    if count < size:
        limit = first.min() if count == 1 else np.partition(first, count - 1)[count - 1]
        found = np.flatnonzero(first <= limit)
    else:
        found = np.arange(size)
    if len(found) == 1:
        return [int(found[0])]
    # For one worker, the columns are compared one after the other, so that nothing large is sorted.
    if count == 1:
        for column in columns[1:]:
            values = column[found]
            found = found[values == values.min()]
            if len(found) == 1:
                return [int(found[0])]
        return [int(found[np.argmin((found - turn) % size)])]
    keys = [(found - turn) % size, *(column[found] for column in reversed(columns))]
    order: list[int] = found[np.lexsort(keys)][:count].tolist()
    return order
